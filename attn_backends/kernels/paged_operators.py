"""Attention over paged keys as operators of `torch.library`, whatever lists the pages.

    paged_attention     keys and values of any sizes, types and extras
    latent_attention    MLA's latents of 512 + 64 elements, on Hopper

The CPU implementation in torch is the definition. On CUDA the first is Triton: requests of few query rows divide their
keys among programs (`triton_decode`), those of many their rows (`triton_prefill`). The second is Gluon (`gluon_mla`),
but for requests of few rows, as Triton's tiles may be of 16. Else as `operators`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels.devices import on_its_device, undispatched
from attn_backends.kernels.torch_attention import (
    SINK_TYPES,
    block_table_attention,
    csr_attention,
    page_table_attention,
)

MAX_DIVIDED_WIDTH = 64  # query rows of a request up to which its keys are divided
LATENT, RANK = 576, 512  # elements of a latent, and those that are its value
FEW_ROWS = 16  # query rows of a request times heads, of which a tile of 64 would be mostly empty
_ALIGNED = 16  # elements that strides of the Gluon kernel's copies are multiples of

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor? query_indptr, Tensor? page_indptr, "
    "Tensor page_ids, Tensor kv_lens, int max_query, int max_kv_len, bool causal, float scale, float k_scale, "
    "float v_scale, Tensor(a!) partial_out, Tensor(b!) partial_lse, int? window=None, Tensor? drafted=None, "
    "Tensor? sinks=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "latent_attention(Tensor q, Tensor latents, Tensor? query_indptr, Tensor? page_indptr, Tensor page_ids, "
    "Tensor kv_lens, int max_query, int max_kv_len, bool causal, float scale, float k_scale, float v_scale, "
    "Tensor(a!) partial_out, Tensor(b!) partial_lse) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    max_kv_len: int,
    causal: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each request's query rows over the keys in its pages.

    q: [num_tokens, num_heads, dim]. k_pages: [num_pages, page_size, num_kv_heads, dim]. v_pages: [..., v_dim]; for MLA
    both are views of the latents. query_indptr: [bs + 1] int32, first query row of each request; None where each has
    max_query. page_indptr: [bs + 1] int32, first of each request's pages in page_ids [num] int32 (CSR); None where
    page_ids is a table [bs, max_pages] int32, rows of stride 1. kv_lens: [bs] int32, keys that the last row sees.
    max_query, max_kv_len: bounds of rows and keys of a request. causal: row j of w sees kv_len - (w - 1 - j) keys, else
    all. scale: multiplies query·key. partial_out, partial_lse: dense float32 scratch of one
    dimension; into how many parts a request's keys may be divided follows from its size, none at all is enough for one.

    window: of the keys that a row sees it attends to the last so many; blocks before are skipped. drafted: [num_tokens]
    int32, keys that each row sees elsewhere, after these, which its window counts too. Below zero it is how many of
    these are after the row's own, max_query - 1 at most; only where not causal and all requests have max_query rows.
    sinks: [num_heads] of `SINK_TYPES`, the logit of a key without value, which takes its share of the softmax once.

    Returns out [num_tokens, num_heads, v_dim] in q's dtype and natural lse [num_tokens, num_heads] in float32, or
    float64 for float64 queries, of the keys only, with and without sinks. Parts can be joined by it, and their sink
    added then. A row that sees nothing gets 0 and -inf. Keys past kv_lens, and those before every row's window, are not
    read: their memory may hold NaN. Raises ValueError where shapes or types do not fit together.
    """
    return _call(
        q,
        k_pages,
        v_pages,
        query_indptr,
        page_indptr,
        page_ids,
        kv_lens,
        max_query,
        max_kv_len,
        causal,
        scale,
        k_scale,
        v_scale,
        partial_out,
        partial_lse,
        window,
        drafted,
        sinks,
    )


def latent_attention(q: Tensor, latents: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Attention of each request's query rows over the latents in its pages.

    q: [num_tokens, num_heads, 576], bfloat16 or float16. latents: [num_pages, page_size, 576] of q's type or
    float8_e4m3fn; their first 512 elements are the values. Elements of both are dense, other strides multiples of 16,
    and both begin at a multiple of 16 bytes. given: what follows the values in `paged_attention`, up to partial_lse;
    this is the same for one KV head without windows and sinks. At most 16 rows times heads of a request are
    left to `paged_attention`: they would leave most of a tile of 64 empty.

    Returns out [num_tokens, num_heads, 512] and lse as of it. Raises ValueError where shapes or types do not fit.
    """
    return _call_latent(q, latents, *given)


def _paged_attention_torch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    max_kv_len: int,
    causal: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_pages(q, k_pages, v_pages, query_indptr, page_indptr, page_ids, kv_lens, max_query, partial_out, partial_lse)
    _check_extras(q, max_query, causal, drafted, sinks)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "k_scale": k_scale, "v_scale": v_scale}
    options |= {"window": window, "drafted": drafted, "sinks": sinks}
    if query_indptr is None:
        assert page_indptr is None, "a CSR plan has an indptr of its queries too"
        pages = (page_ids, kv_lens)
        return block_table_attention(q, k_pages, v_pages, *pages, width=max_query, max_kv_len=max_kv_len, **options)
    if page_indptr is None:
        given = (query_indptr, page_ids, kv_lens)
        return page_table_attention(q, k_pages, v_pages, *given, max_seqlen_q=max_query, **options)
    lists = (query_indptr, page_indptr, page_ids, kv_lens)
    return csr_attention(q, k_pages, v_pages, *lists, max_query=max_query, max_kv_len=max_kv_len, **options)


@on_its_device
def _paged_attention_cuda(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    max_kv_len: int,
    causal: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    keys = (q, k_pages, v_pages, query_indptr, page_indptr, page_ids, kv_lens)
    scales, scratch = (scale, k_scale, v_scale), (partial_out, partial_lse)
    extras: dict[str, Any] = {"window": window, "drafted": drafted, "sinks": sinks}
    if torch.float64 in (q.dtype, k_pages.dtype):
        return _paged_attention_torch(*keys, max_query, max_kv_len, causal, *scales, *scratch, **extras)
    check_pages(*keys, max_query, *scratch)
    _check_extras(q, max_query, causal, drafted, sinks)
    if max_query > MAX_DIVIDED_WIDTH:
        from attn_backends.kernels import triton_prefill

        return triton_prefill.paged_attention(*keys, max_query, causal, *scales, **extras)
    from attn_backends.kernels import triton_decode

    return triton_decode.paged_attention(*keys, max_query, max_kv_len, causal, *scales, *scratch, **extras)


def _latent_attention_paged(q: Tensor, latents: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """As `paged_attention`, and so as Triton on CUDA."""
    _check_latents(q, latents)
    entries = latents.unsqueeze(2)
    return paged_attention(q, entries, entries[..., :RANK], *given)


@on_its_device
def _latent_attention_cuda(
    q: Tensor,
    latents: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    max_kv_len: int,
    causal: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    lists, scratch = (query_indptr, page_indptr, page_ids, kv_lens), (partial_out, partial_lse)
    given = (*lists, max_query, max_kv_len, causal, scale, k_scale, v_scale, *scratch)
    if max_query * q.shape[1] <= FEW_ROWS:
        return _latent_attention_paged(q, latents, *given)
    from attn_backends.kernels import gluon_mla

    _check_latents(q, latents)
    entries = latents.unsqueeze(2)
    check_pages(q, entries, entries[..., :RANK], *lists, max_query, *scratch)
    return gluon_mla.latent_attention(q, latents, *given)


def _latent_attention_fake(q: Tensor, latents: Tensor, *given: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], RANK), q.new_empty(q.shape[:2], dtype=torch.float32)


def _paged_attention_fake(q: Tensor, k_pages: Tensor, v_pages: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:2], v_pages.shape[3])
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(shape), q.new_empty(shape[:2], dtype=lse_dtype)


def check_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    partial_out: Tensor,
    partial_lse: Tensor,
) -> None:
    """Refuse what a kernel would read out of bounds or misread."""
    num_tokens, num_heads, dim = q.shape
    (bs,) = kv_lens.shape
    indices = {"page_ids": page_ids, "kv_lens": kv_lens, "query_indptr": query_indptr, "page_indptr": page_indptr}
    lists = {name: tensor for name, tensor in indices.items() if tensor is not None}
    starts = [tensor for tensor in (query_indptr, page_indptr) if tensor is not None]
    if (
        num_heads % v_pages.shape[2]
        or k_pages.shape != (*v_pages.shape[:3], dim)
        or v_pages.dtype is not k_pages.dtype
        or any(tensor.dtype is not torch.int32 or tensor.stride(-1) != 1 for tensor in lists.values())
        or any(tensor.shape != (bs + 1,) for tensor in starts)
        or (query_indptr is None and (num_tokens != bs * max_query or page_indptr is not None))
        or page_ids.dim() != (2 if page_indptr is None else 1)
        or (page_indptr is None and page_ids.shape[0] != bs)
        or any(tensor.dtype is not torch.float32 or tensor.dim() != 1 for tensor in (partial_out, partial_lse))
    ):
        given = {"q": q, "k_pages": k_pages, "v_pages": v_pages, **lists, "partial_out": partial_out}
        raise ValueError(
            f"paged_attention: {', '.join(f'{name} {list(t.shape)} {t.dtype}' for name, t in given.items())} for "
            f"{max_query} rows per request do not fit together. Needed are q [num_tokens, num_heads, dim], pages "
            "[num_pages, page_size, num_kv_heads, dim or v_dim] of one dtype, dense int32 lists, each indptr [bs + 1], "
            "page_ids [num] with a page_indptr or [bs, max_pages] without, and float32 scratch [num]"
        )


def _check_extras(q: Tensor, max_query: int, causal: bool, drafted: Tensor | None, sinks: Tensor | None) -> None:
    num_tokens, num_heads = q.shape[:2]
    if drafted is not None and (
        drafted.shape != (num_tokens,) or drafted.dtype is not torch.int32 or causal or num_tokens % max_query
    ):
        raise ValueError(
            f"paged_attention: drafted {list(drafted.shape)} {drafted.dtype} for {num_tokens} rows, {max_query} a "
            "request, do not fit together; needed is [num_tokens] int32, of requests that have max_query rows each and "
            "are not causal"
        )
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype not in SINK_TYPES):
        raise ValueError(
            f"paged_attention: sinks {list(sinks.shape)} {sinks.dtype}; needed are [{num_heads}] of float32, bfloat16 "
            "or float16"
        )


def _check_latents(q: Tensor, latents: Tensor) -> None:
    """Refuse what the Gluon kernel would misread."""
    if (
        any(each.dim() != 3 or each.shape[2] != LATENT or each.stride(2) != 1 for each in (q, latents))
        or any(stride % _ALIGNED for each in (q, latents) for stride in each.stride()[:2])
        or any(each.data_ptr() % _ALIGNED for each in (q, latents))
        or latents.dtype not in (q.dtype, torch.float8_e4m3fn)
        or q.dtype not in (torch.bfloat16, torch.float16)
    ):
        given = " and ".join(f"{list(each.shape)} {each.dtype} of strides {each.stride()}" for each in (q, latents))
        raise ValueError(
            f"latent_attention: {given} do not fit together; needed are q [num_tokens, num_heads, {LATENT}] and "
            f"latents [num_pages, page_size, {LATENT}], both bfloat16 or float16, or latents float8_e4m3fn, elements "
            f"dense, other strides multiples of {_ALIGNED}, at addresses that are multiples of {_ALIGNED}"
        )


_library.impl("paged_attention", _paged_attention_torch, "CPU")
_library.impl("paged_attention", _paged_attention_cuda, "CUDA")
torch.library.register_fake("attn_backends::paged_attention", _paged_attention_fake, lib=_library)
_call = undispatched(torch.ops.attn_backends.paged_attention.default, _paged_attention_cuda)

_library.impl("latent_attention", _latent_attention_paged, "CPU")
_library.impl("latent_attention", _latent_attention_cuda, "CUDA")
torch.library.register_fake("attn_backends::latent_attention", _latent_attention_fake, lib=_library)
_call_latent = undispatched(torch.ops.attn_backends.latent_attention.default, _latent_attention_cuda)
