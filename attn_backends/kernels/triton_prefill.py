"""Attention of packed queries over paged keys as one Triton launch: prefill, in whole or in chunks.

A program takes one KV head and a block of query rows of one request. The block's rows are tokens times the query heads
that share the KV head, so that MLA's 16 heads fill a block with 4 tokens. It passes over the keys that its rows see
with a running softmax (FlashAttention-2, Dao 2023), first the blocks that every row sees whole, then those at the
causal edge. Of a sliding window the blocks at its lower edge come before these, and blocks before it are skipped. MLA's
latents are read once, for scores and for values. Requests are found in cu_seqlens, so the grid is as large as the
packed rows and the batch, whatever their lengths; the blocks with most keys start first.

On an H200 in bfloat16, causal; at least what the 786 TFLOP/s of a matrix product (796 beside 32 heads) in the same run
would take, for bytes are few. From kernels_prefill_fa3 and kernels_prefill in docs/results/h200:

    8192 tokens, 32 heads of 128 over 8    550 GFLOP     at least  699 us    1552 us            (FlashAttention-3 854)
    8 x 1024 tokens of the same             69 GFLOP     at least   87 us     268 us            (175)
    8192 tokens, MLA of 16 heads          1170 GFLOP     at least 1487 us    3643 to 3731 us    (1746, FlashInfer 1842)

Keys and values take 1.4 to 2.0 times FlashAttention-3's time, MLA 1.6 to 2.4 times, the more the longer the context.
What is left is what `triton_decode` says of MLA's products, and that softmax and products take turns, which
FlashAttention-3's two warp groups do beside each other. Tiles of 128 rows or keys, and a third stage, are slower (timed
apart at 4096 tokens, not committed: 415 us and more instead of 405, of MLA 1445 and 1569 instead of 927).

Keys past a request's length are never read: unowned memory may hold NaN. Sums are float32, matrix products too for
float32 queries (no TF32). The order of all sums is fixed by the query's own request: no output depends on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.triton_launch import LISTS, Call, DirectLaunch, strided
from attn_backends.kernels.triton_tiles import Tiles, is_one_latent, sizes_of
from attn_backends.kernels.triton_windows import dense, first_keys, sink_weights

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_LEAST = tl.constexpr(2.0**-63)  # below the weights of a row that sees a key; the largest scale over it is finite
_LN_2 = tl.constexpr(math.log(2))
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _rows_of(block, query_indptr, bs, width, group, BLOCK_ROWS: tl.constexpr):
    """The request of a block of rows, its first query row, its query rows, and which of its blocks it is.

    Packed, request i has the blocks from query_indptr[i] * group // BLOCK_ROWS + i on: at least as many as its rows
    fill, and all requests together no more than a grid has that knows the sum of their rows and their number.
    """
    if query_indptr is None:
        num_blocks = tl.cdiv(width * group, BLOCK_ROWS)
        request, block = block // num_blocks, block % num_blocks
        first = request * width
    else:
        request, end = block * 0, block * 0 + bs
        while end - request > 1:
            middle = (request + end) // 2
            is_before = tl.load(query_indptr + middle) * group // BLOCK_ROWS + middle <= block
            request, end = tl.where(is_before, middle, request), tl.where(is_before, end, middle)
        first = tl.load(query_indptr + request)
        width = tl.load(query_indptr + request + 1) - first
        block -= first * group // BLOCK_ROWS + request
    return request, first, width, block


@triton.jit
def _load(row, live, stride, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Elements FIRST to FIRST + DIM of rows; 0 past them, and where masked in rows that are not live."""
    dim = tl.arange(0, BLOCK)
    place = row[:, None] + (FIRST + dim)[None, :] * stride
    if MASKED:
        return tl.load(place, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)
    if BLOCK == DIM:
        return tl.load(place)
    return tl.load(place, mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def _places(pages, start, num_keys, least, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Keys start to start + BLOCK_KEYS of a request: which are read, their pages, and their places there. least: the
    first that any row sees, None for 0; what lies before may be freed memory.
    """
    key = start + tl.arange(0, BLOCK_KEYS)
    live = key < num_keys
    if least is not None:
        live = live & (key >= least)
    if PAGE_SIZE % BLOCK_KEYS == 0:
        page = tl.load(pages + start // PAGE_SIZE) + tl.zeros((BLOCK_KEYS,), dtype=tl.int32)
    else:
        page = tl.load(pages + key // PAGE_SIZE, mask=live, other=0)
    return key, live, page.to(tl.int64), key % PAGE_SIZE


@triton.jit
def _pass_over(
    state,
    queries,
    cache,
    seen,
    start,
    end,
    score_scale,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    REST: tl.constexpr,
    LATENT: tl.constexpr,
    DOT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax over keys start to end. state: sums of values, peaks (base 2) and sums of weights. MASKED:
    rows see keys from first_key (None for 0) up to last_key, not all of them.
    """
    acc, peak, total = state
    k_pages, v_pages, kv_head, pages = cache
    num_keys, last_key, first_key, least = seen
    for first in range(start, end, BLOCK_KEYS):
        key, live, page, offset = _places(pages, first, num_keys, least, PAGE_SIZE, BLOCK_KEYS)
        k_entry = k_pages[0] + page * k_pages[1][0] + offset * k_pages[1][1] + kv_head * k_pages[1][2]
        keys = _load(k_entry, live, k_pages[1][3], 0, DIM, queries[0].shape[1], MASKED).to(DOT)
        scores = tl.dot(queries[0], tl.trans(keys), input_precision="ieee")
        if REST > 0:
            rest = _load(k_entry, live, k_pages[1][3], DIM, REST, queries[1].shape[1], MASKED).to(DOT)
            scores = tl.dot(queries[1], tl.trans(rest), scores, input_precision="ieee")
        values = keys
        if not LATENT:
            v_entry = v_pages[0] + page * v_pages[1][0] + offset * v_pages[1][1] + kv_head * v_pages[1][2]
            values = _load(v_entry, live, v_pages[1][3], 0, V_DIM, acc.shape[1], MASKED).to(DOT)
        scores = scores * score_scale
        if MASKED:
            visible = key[None, :] <= last_key[:, None]
            if first_key is not None:
                visible = visible & (key[None, :] >= first_key[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights, kept = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(DOT), values, acc * kept[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total


@triton.jit
def _over_keys(
    queries,
    cache,
    seen,
    bounds,
    score_scale,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    REST: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    DOT: tl.constexpr,
):
    """The softmax of rows over their keys: where windows begin, where every row sees all, and at the causal edge."""
    total = tl.zeros((queries[0].shape[0],), dtype=tl.float32)
    state = (tl.zeros((queries[0].shape[0], BLOCK_V_DIM), dtype=tl.float32), total + _LOWEST, total)
    start, begun, whole, end = bounds
    for PART in tl.static_range(1 if seen[2] is None else 0, 3):
        begin, stop = (start, begun) if PART == 0 else (begun, whole) if PART == 1 else (whole, end)
        state = _pass_over(
            *(state, queries, cache, seen, begin, stop, score_scale),
            *(PAGE_SIZE, BLOCK_KEYS, DIM, V_DIM, REST, LATENT, DOT, PART != 1),
        )
    return state


@triton.jit
def _window(first_key, real, whole, BLOCK_KEYS: tl.constexpr):
    """The first key of any row, its block, the block from which on all windows have begun, and that from which on some
    row does not see all keys: `whole`, or the first.
    """
    least = tl.min(first_key, axis=0)
    start = least // BLOCK_KEYS * BLOCK_KEYS
    whole = tl.maximum(whole, start)
    begun = tl.minimum(tl.cdiv(tl.max(tl.where(real, first_key, 0), axis=0), BLOCK_KEYS) * BLOCK_KEYS, whole)
    return least, start, begun, whole


@triton.jit
def _store(out, lse, state, flat, head, real, sinks, v_scale, V_DIM: tl.constexpr):
    """Write the rows of a block to places `flat`, in rows of out and lse."""
    acc, peak, total = state
    tl.store(lse + flat, (peak + tl.log2(total)) * _LN_2, mask=real)
    if sinks is not None:
        total += sink_weights(sinks, head, real, peak * _LN_2)
    dim = tl.arange(0, acc.shape[1])
    acc = acc * (v_scale / tl.maximum(total, _LEAST))[:, None]
    place = out + flat[:, None] * V_DIM + dim[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & (dim < V_DIM)[None, :])


@triton.jit(do_not_specialize=[*LISTS, "lse", "bs", "width"])
def _paged_attention(
    q,
    k_pages,
    v_pages,
    out,
    lse,
    query_indptr,
    page_indptr,
    page_ids,
    kv_lens,
    bs,
    width,
    table_stride,
    group,
    scales,
    window,
    drafted,
    sinks,
    CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    DOT: tl.constexpr,
):
    """q, k_pages, v_pages are (pointer, strides), out and lse dense. bs: requests. width: rows of each if query_indptr
    is None. group: query heads of a KV head. Sizes and extras: `triton_tiles`, `triton_windows`.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    request, first, width, block = _rows_of(block, query_indptr, bs, width, group, BLOCK_ROWS)
    if block * BLOCK_ROWS >= width * group:
        return
    kv_head, row = tl.program_id(1).to(tl.int64), block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < width * group
    token, head = (first + row // group).to(tl.int64), kv_head * group + row % group
    q_row = q[0] + token * q[1][0] + head * q[1][1]
    query = _load(q_row, real, q[1][2], 0, DIM, BLOCK_DIM, True).to(DOT)
    rest = _load(q_row, real, q[1][2], DIM, REST, BLOCK_REST, True).to(DOT) if REST > 0 else query
    num_keys, pages = tl.load(kv_lens + request), page_ids
    pages += request.to(tl.int64) * table_stride if page_indptr is None else tl.load(page_indptr + request)
    hidden = width - 1 if CAUSAL else 0  # the first row sees all keys but so many, each other one more
    last_key = num_keys - 1 - hidden + (row // group if CAUSAL else row * 0)
    whole = tl.maximum(tl.min(last_key, axis=0) + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    end = tl.minimum(tl.max(last_key, axis=0) + 1, num_keys)
    first_key, least, start, begun = None, None, 0, 0
    if window is not None:
        first_key = first_keys(last_key + 1, token, real, num_keys, window, drafted)
        least, start, begun, whole = _window(first_key, real, whole, BLOCK_KEYS)
    state = _over_keys(
        *((query, rest), (k_pages, v_pages, kv_head, pages), (num_keys, last_key, first_key, least)),
        *((start, begun, whole, end), scales[0]),
        *(PAGE_SIZE, BLOCK_KEYS, DIM, V_DIM, REST, LATENT, BLOCK_V_DIM, DOT),
    )
    _store(out, lse, state, token * (tl.num_programs(1) * group) + head, head, real, sinks, scales[1], V_DIM)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    causal: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_operators.paged_attention` for types up to 32 bits, without its scratch."""
    num_tokens, num_heads, dim = q.shape
    page_size, num_kv_heads, v_dim = v_pages.shape[1:]
    group, bs = num_heads // num_kv_heads, kv_lens.shape[0]
    dims = (dim, v_dim, is_one_latent(k_pages, v_pages))
    out, lse = q.new_empty(num_tokens, num_heads, v_dim), q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    shape, scales = (bs, max_query, page_ids.stride(0), group), (scale * k_scale * math.log2(math.e), v_scale)
    lists = (query_indptr, page_indptr, page_ids, kv_lens)
    tensors = (q, k_pages, v_pages, out, lse, *lists, dense(drafted), dense(sinks))
    _launch(tensors, num_tokens, num_kv_heads, page_size, shape, scales, window, causal, dims)
    return out, lse


def _call(
    tensors: Sequence[Tensor],
    num_tokens: int,
    num_kv_heads: int,
    page_size: int,
    shape: tuple[int, int, int, int],
    scales: tuple[float, float],
    window: int | None,
    causal: bool,
    dims: tuple[int, int, bool],
) -> Call:
    (bs, max_query, _, group), q, query_indptr = shape, tensors[0], tensors[5]
    sizes = sizes_of(*dims)
    tile = choose_tiles(sizes, q.dtype, gpu_of(q.device).shared)
    if query_indptr is None:
        num_blocks = triton.cdiv(max_query * group, tile.rows) * bs
    else:
        num_blocks = num_tokens * group // tile.rows + bs
    *given, drafted, sinks = tensors
    constants = {"CAUSAL": causal, "PAGE_SIZE": page_size, "BLOCK_ROWS": tile.rows, "BLOCK_KEYS": tile.keys}
    options = {"DOT": _DOT_TYPES[q.dtype], "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    arguments = (*strided(given[:3]), *given[3:], *shape, scales, window, drafted, sinks)
    return Call((num_blocks, num_kv_heads), arguments, {**constants, **sizes, **options})


_launch = DirectLaunch(_paged_attention, _call)

# Best first; the first of each line measured on an H200, the others for less shared memory. Wide: of more than 128
# elements.
_LATENT_TILES = (Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(16, 16, 4, 1))
_TILES = (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(16, 16, 4, 1))
_WIDE_TILES = (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(16, 16, 4, 1))


def choose_tiles(sizes: dict[str, int], dtype: torch.dtype, shared: int) -> Tiles:
    """The best tiles for sizes and a type of queries that fit so many bytes of shared memory."""
    if dtype is torch.float32:  # no tensor cores: products are done element by element
        return Tiles(16, 16, 4, 1) if sizes["BLOCK_DIM"] > 256 else Tiles(32, 32, 4, 1)
    is_wide = max(sizes["DIM"], sizes["V_DIM"]) > 128
    tiles = _LATENT_TILES if sizes["LATENT"] else _WIDE_TILES if is_wide else _TILES
    return next((each for each in tiles if tile_bytes(each, sizes, dtype) <= shared), tiles[-1])


def tile_bytes(tiles: Tiles, sizes: dict[str, int], dtype: torch.dtype) -> int:
    """Shared memory of tiles: queries, and keys and values of each stage."""
    row = sizes["BLOCK_DIM"] + (sizes["BLOCK_REST"] if sizes["REST"] else 0)
    entry = row if sizes["LATENT"] else row + sizes["BLOCK_V_DIM"]
    return (tiles.rows * row + tiles.num_stages * tiles.keys * entry) * dtype.itemsize
