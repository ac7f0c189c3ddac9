"""Attention of many query rows over paged keys and values as an operator of `torch.library`, for Hopper.

`paged_attention` is the definition. It runs on the CPU, and on CUDA for requests of few rows, whose keys it divides
among programs. Other requests are Gluon's (`gluon_prefill`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels.devices import on_its_device, undispatched
from attn_backends.kernels.paged_operators import MAX_DIVIDED_WIDTH, check_pages, paged_attention

HEAD_SIZES = frozenset({(64, 64), (128, 128), (192, 128), (256, 256)})
"""Elements of a query and a key, and of a value of a head."""

_ALIGNED = 16  # elements that strides of the copies are multiples of

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "prefill_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor? query_indptr, Tensor? page_indptr, "
    "Tensor page_ids, Tensor kv_lens, int max_query, int max_kv_len, bool causal, float scale, float k_scale, "
    "float v_scale, Tensor(a!) partial_out, Tensor(b!) partial_lse) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def prefill_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Attention of each request's query rows over the keys in its pages.

    q: [num_tokens, num_heads, dim] bfloat16 or float16. k_pages, v_pages: [num_pages, page_size, num_kv_heads, dim or
    v_dim] of q's type or float8_e4m3fn; (dim, v_dim) as of `HEAD_SIZES`. Elements of all three are dense, other strides
    multiples of 16, and all begin at a multiple of 16 bytes. given: what follows in `paged_attention`, up to
    partial_lse; this is the same without windows and sinks. Up to 64 rows of a request are left to
    `paged_attention`, which divides keys; scratch is for that alone.

    Returns out [num_tokens, num_heads, v_dim] and lse as of it. Raises ValueError where shapes or types do not fit.
    """
    return _call(q, k_pages, v_pages, *given)


@on_its_device
def _prefill_attention_cuda(
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
) -> tuple[Tensor, Tensor]:
    keys, scratch = (q, k_pages, v_pages, query_indptr, page_indptr, page_ids, kv_lens), (partial_out, partial_lse)
    scales = (scale, k_scale, v_scale)
    _check(q, k_pages, v_pages)
    if max_query <= MAX_DIVIDED_WIDTH:
        return paged_attention(*keys, max_query, max_kv_len, causal, *scales, *scratch)
    from attn_backends.kernels import gluon_prefill

    check_pages(*keys, max_query, *scratch)
    return gluon_prefill.paged_attention(*keys, max_query, causal, *scales)


def _prefill_attention_torch(q: Tensor, k_pages: Tensor, v_pages: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    _check(q, k_pages, v_pages)
    return paged_attention(q, k_pages, v_pages, *given)


def _prefill_attention_fake(q: Tensor, k: Tensor, v: Tensor, *given: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Refuse what the Gluon kernel would misread."""
    given = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    if (
        (k_pages.shape[-1], v_pages.shape[-1]) not in HEAD_SIZES
        or k_pages.shape[-1] != q.shape[-1]
        or any(each.stride(-1) != 1 or each.data_ptr() % _ALIGNED for each in given.values())
        or any(stride % _ALIGNED for each in given.values() for stride in each.stride()[:-1])
        or any(each.dtype not in (q.dtype, torch.float8_e4m3fn) for each in (k_pages, v_pages))
        or k_pages.dtype is not v_pages.dtype
        or q.dtype not in (torch.bfloat16, torch.float16)
    ):
        said = ", ".join(f"{name} {list(t.shape)} {t.dtype} of strides {t.stride()}" for name, t in given.items())
        raise ValueError(
            f"prefill_attention: {said} do not fit together; needed are q [num_tokens, num_heads, dim], bfloat16 or "
            f"float16, and pages [num_pages, page_size, num_kv_heads, dim or v_dim], alike or float8_e4m3fn. (dim, "
            f"v_dim) is one of {sorted(HEAD_SIZES)}, elements are dense, other strides multiples of {_ALIGNED}, and "
            f"addresses, too"
        )


_library.impl("prefill_attention", _prefill_attention_torch, "CPU")
_library.impl("prefill_attention", _prefill_attention_cuda, "CUDA")
torch.library.register_fake("attn_backends::prefill_attention", _prefill_attention_fake, lib=_library)
_call = undispatched(torch.ops.attn_backends.prefill_attention.default, _prefill_attention_cuda)
