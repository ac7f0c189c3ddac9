"""Operators that read the pools of compressed layers: a CPU implementation in torch, a CUDA one in Triton.

    select_entries     the entries of the highest scores of an indexer, for each row
    sparse_attention   attention over a window of rows and over entries, one softmax and one sink over both
    sparse_attention_sm90   the same on Hopper, in Gluon (`gluon_sparse`), of 16-bit queries and rows of 512 elements

As `attn_backends.kernels.operators`: each is one node of a graph and has a fake, the CPU implementation is the
definition (`torch_compressed`, where pools are described), and float64 goes to it on a GPU too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels import torch_compressed
from attn_backends.kernels.compressor_operators import check_pool
from attn_backends.kernels.devices import on_its_device
from attn_backends.kernels.fp8_pages import ROW_DIM
from attn_backends.kernels.torch_attention import SINK_TYPES
from attn_backends.kernels.torch_compressed import Keys

_ALIGNED = 16  # bytes that the Gluon kernel reads at once

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "select_entries(Tensor q, Tensor weights, Tensor keys, Tensor page_table, Tensor qo_indptr, Tensor request, "
    "Tensor num_visible, int max_query, int topk) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _name in ("sparse_attention", "sparse_attention_sm90"):
    _library.define(
        f"{_name}(Tensor q, Tensor rows, int rows_of_page, Tensor row_slots, Tensor row_lens, Tensor? entries, "
        "int entries_of_page, Tensor? entry_slots, Tensor? entry_lens, float scale, Tensor? sinks) -> (Tensor out, "
        "Tensor lse)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )


def select_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    request: Tensor,
    num_visible: Tensor,
    max_query: int,
    topk: int,
) -> Tensor:
    """[num_tokens, topk] int32: slots of the visible entries of each row's request with the highest scores, then -1.

    An entry's score is the sum over heads of weights * relu(q · key), in float32. Of equal scores the lower entry is
    taken: the contract promises it, so a row selects the same entries in every batch. In which order the slots of a
    row come is not said.

    q: [num_tokens, heads, dim]. weights: [num_tokens, heads]. keys: [num_pages, num_rows, dim], pages of the entries'
    keys. page_table: [bs, max_pages]. qo_indptr: [bs + 1], first query row of each request. request, num_visible:
    [num_tokens]. max_query: most rows of a request, a host bound. Raises ValueError where shapes do not fit together.
    """
    return torch.ops.attn_backends.select_entries.default(
        q, weights, keys, page_table, qo_indptr, request, num_visible, max_query, topk
    )


def sparse_attention(
    q: Tensor, rows: Keys, entries: Keys | None, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of each query row over rows, and entries if there are any, each of which is key and value at once.

    q: [num_tokens, num_heads, dim]. sinks: [num_heads] of `SINK_TYPES`, logits of a key without value. Returns out
    [num_tokens, num_heads, dim] in q's dtype, sinks included, and natural lse [num_tokens, num_heads] without them; a
    row that sees nothing gets 0 and -inf. Memory that no row sees may hold NaN. Raises ValueError where shapes or types
    do not fit together.
    """
    more = (None, 0, None, None) if entries is None else entries
    return torch.ops.attn_backends.sparse_attention.default(q, *rows, *more, scale, sinks)


def sparse_attention_sm90(
    q: Tensor, rows: Keys, entries: Keys | None, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` of queries [num_tokens, num_heads, 512] in bfloat16, over rows of bfloat16 or in the 8-bit
    page format, pages of which begin at multiples of 16 bytes. Raises ValueError for others.
    """
    more = (None, 0, None, None) if entries is None else entries
    return torch.ops.attn_backends.sparse_attention_sm90.default(q, *rows, *more, scale, sinks)


def _select_torch(*arguments: Any) -> Tensor:
    _check_select(*arguments)
    return torch_compressed.select_entries(*arguments)


@on_its_device
def _select_cuda(q: Tensor, *arguments: Any) -> Tensor:
    if any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in (q, *arguments)):
        return _select_torch(q, *arguments)
    from attn_backends.kernels import triton_indexer

    _check_select(q, *arguments)
    return triton_indexer.select_entries(q, *arguments)


def _select_fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], rest[-1], dtype=torch.int32)


def _attention_torch(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    sources, scale, sinks = _sources(q, *arguments)
    out, lse = torch_compressed.attend_rows(q, sources, scale, sinks)
    return out.contiguous(), lse.contiguous()


@on_its_device
def _attention_cuda(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    sources, scale, sinks = _sources(q, *arguments)
    if torch.float64 in (q.dtype, *(source.pages.dtype for source in sources)):
        return _attention_torch(q, *arguments)
    from attn_backends.kernels import triton_sparse

    return triton_sparse.sparse_attention(q, sources, scale, sinks)


def _sm90_torch(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    _check_sm90(q, _sources(q, *arguments)[0])
    return _attention_torch(q, *arguments)


@on_its_device
def _sm90_cuda(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    sources, scale, sinks = _sources(q, *arguments)
    _check_sm90(q, sources)
    from attn_backends.kernels import gluon_sparse

    return gluon_sparse.sparse_attention(q, sources, scale, sinks)


def _attention_fake(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype)


def _check_select(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    request: Tensor,
    num_visible: Tensor,
    max_query: int,
    topk: int,
) -> None:
    """Refuse what a kernel would read out of bounds or misread."""
    rows = q.shape[:1]
    if (
        weights.shape != q.shape[:2]
        or q.shape[2] != check_pool(keys, keys.shape[1])
        or qo_indptr.shape != (page_table.shape[0] + 1,)
        or request.shape != rows
        or num_visible.shape != rows
    ):
        names = ("q", "weights", "keys", "page_table", "qo_indptr", "request", "num_visible")
        given = zip(names, (q, weights, keys, page_table, qo_indptr, request, num_visible), strict=True)
        raise ValueError(
            f"select_entries: {', '.join(f'{name} {list(t.shape)}' for name, t in given)} do not fit together; needed "
            "are q [num_tokens, heads, dim], weights [num_tokens, heads], keys [num_pages, num_rows, dim], page_table "
            "[bs, max_pages], qo_indptr [bs + 1], request and num_visible [num_tokens]"
        )


def _sources(
    q: Tensor,
    rows: Tensor,
    rows_of_page: int,
    row_slots: Tensor,
    row_lens: Tensor,
    entries: Tensor | None,
    entries_of_page: int,
    entry_slots: Tensor | None,
    entry_lens: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> tuple[list[Keys], float, Tensor | None]:
    """What attention reads, or a ValueError where it would read out of bounds or misread."""
    sources = [Keys(rows, rows_of_page, row_slots, row_lens)]
    if entries is not None and entry_slots is not None and entry_lens is not None:
        sources.append(Keys(entries, entries_of_page, entry_slots, entry_lens))
    num_tokens, num_heads, dim = q.shape
    wrong = [source for source in sources if check_pool(source.pages, source.num_rows) != dim]
    wrong += [source for source in sources if source.lens.shape != (num_tokens,) or source.slots.ndim != 2]
    wrong += [source for source in sources if source.slots.shape[0] != num_tokens]
    wrong += [source for source in sources if _kind(source.pages) != _kind(rows)]
    if wrong or (sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype not in SINK_TYPES)):
        given = ", ".join(
            f"pages {list(source.pages.shape)} with slots {list(source.slots.shape)} and lens {list(source.lens.shape)}"
            for source in sources
        )
        given += "" if sinks is None else f", sinks {list(sinks.shape)} {sinks.dtype}"
        raise ValueError(
            f"sparse_attention: q {list(q.shape)}, {given} do not fit together; needed are q [num_tokens, num_heads, "
            "dim], pools of rows of dim, of one type and one stride between elements, slots [num_tokens, n] and lens "
            "[num_tokens]. Sinks, if any, are [num_heads] of float32, bfloat16 or float16"
        )
    return sources, scale, sinks


def _check_sm90(q: Tensor, sources: list[Keys]) -> None:
    """Refuse what the Gluon kernel would misread."""
    pools = [source.pages for source in sources]
    bytes = [pool for pool in pools if pool.dtype is torch.uint8]
    if (
        q.dtype is not torch.bfloat16
        or q.shape[2] != ROW_DIM
        or any(pool.dtype not in (torch.bfloat16, torch.uint8) for pool in pools)
        or any(pool.stride(0) % _ALIGNED or pool.data_ptr() % _ALIGNED for pool in bytes)
    ):
        given = ", ".join(f"pages {list(p.shape)} {p.dtype} of strides {p.stride()}" for p in pools)
        raise ValueError(
            f"sparse_attention_sm90: q {list(q.shape)} {q.dtype} and {given} do not fit together; needed are q "
            f"[num_tokens, num_heads, {ROW_DIM}] bfloat16 and pages of bfloat16, or of bytes that begin at multiples "
            f"of {_ALIGNED}"
        )


def _kind(pages: Tensor) -> tuple[torch.dtype, int]:
    return pages.dtype, pages.stride(-1)


_library.impl("select_entries", _select_torch, "CPU")
_library.impl("select_entries", _select_cuda, "CUDA")
_library.impl("sparse_attention", _attention_torch, "CPU")
_library.impl("sparse_attention", _attention_cuda, "CUDA")
_library.impl("sparse_attention_sm90", _sm90_torch, "CPU")
_library.impl("sparse_attention_sm90", _sm90_cuda, "CUDA")
torch.library.register_fake("attn_backends::select_entries", _select_fake, lib=_library)
torch.library.register_fake("attn_backends::sparse_attention", _attention_fake, lib=_library)
torch.library.register_fake("attn_backends::sparse_attention_sm90", _attention_fake, lib=_library)
