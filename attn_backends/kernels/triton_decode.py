"""Attention over paged keys in Triton for few query rows per request: decode, drafts, verifies, draft extends.

A program takes the rows of one request that share a KV head (query rows times the heads of its group, up to a tile of
them) and a part of the request's keys. Where requests are too few to fill the GPU, several programs divide the keys and
a second launch merges their outputs by the log-sum-exp. Nothing is read on the host. How many parts there are follows
from the sizes of the batch, their keys from the length on the device. Where programs fill the GPU, a request much
longer than the others is divided into pieces (`triton_pieces`). In a sliding window the parts begin at the
block of the request's first window, a tile of rows at that of its own. Sinks are counted by the merge, or by the one
part. Keys past those that a request's last row sees are not read. Partial outputs are the kernel's scratch
(`attn_backends.vendors.ours`).

MLA's latent is loaded once: its first elements, as many as a value has, are a tile that serves the scores and then the
values; the rotated rest is a tile of its own. Arithmetic is float32, matrix products too for float32 inputs (no TF32).

On an H200 (bfloat16, pages of 64 tokens, caches that L2 does not hold, CUDA graphs). "At least" is the time by the 4.29
TB/s of a copy and the 806 TFLOP/s of a matrix product, measured in the same run. The last column is the vendor's kernel
(docs/results/h200/{kernels_gluon,kernels_fa3}.json, summed up in docs/kernels.md):

    MLA, 16 heads, batch 128 x 4096        608 MB, 18 GFLOP      at least 142 us    165 us  (FlashMLA 156)
    the same, width 4                      622 MB, 73 GFLOP      at least 145 us    325 us  (FlashMLA 159)
    MLA, 128 heads, batch 128 x 4096       640 MB, 146 GFLOP     at least 181 us    602 us  (FlashMLA 235)
    32 heads of 128 over 8, 64 x 8192      2.1 GB, 9 GFLOP       at least 501 us    492 us  (FA3 492)
    64 heads over 8, width 16, 64 x 8192   2.2 GB, 275 GFLOP     at least 509 us    812 us  (FA3 532)

It stops at three places. MLA of 16 heads and one row reaches 0.86 to 0.89 of a copy, FlashMLA 0.91: the kernel takes
152 us there, FlashMLA's 147, pieces 4 (docs/results/h200/profiles_latents.json), and the merge 4. Grouped queries
take up to 1.3 times FA3's time where a batch makes fewer programs than the GPU could hold, and 64 heads over 8 with 16
rows 1.1 to 1.9 times. 64 heads with 4 rows take 1.2 times over caches of 17 GB.

And it stops at 216 to 256 TFLOP/s for more rows of MLA at 128 requests, where FlashMLA does up to 717. A tile of 64
rows and two blocks of latents fill the shared memory, and Triton 3.6 leaves no say in two things then. It lays all
warps along the rows, so that both warp groups compute the same scores. And it loads the next block after the products
of this one, to wait for it at once. Gluon has that say: on Hopper `gluon_mla` runs instead, where it was tried with the
Triton that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.triton_launch import LISTS, Call, DirectLaunch, strided
from attn_backends.kernels.triton_merge import Parts, merge, part_of, query_rows
from attn_backends.kernels.triton_pieces import deal_out, most_pieces, rows_before, share_of
from attn_backends.kernels.triton_rows import elements, load_queries, write_rows
from attn_backends.kernels.triton_tiles import (
    Tiles,
    choose_num_splits,
    choose_tiles,
    is_crowded,
    is_one_latent,
    sizes_of,
    tile_bytes,
)
from attn_backends.kernels.triton_windows import dense, first_keys, window_start

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_LOG2_E = 1.4426950408889634
Dims = tuple[int, int, bool]
"""Elements of a key and of a value, and whether values are the first elements of keys."""
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _page_list(indptr, ids, request, table_stride):
    """The first page id of a request. indptr: None where ids are a table."""
    first = request * table_stride if indptr is None else tl.load(indptr + request).to(tl.int64)
    return ids + first


@triton.jit
def _pages(ids, begin, end, page_size, BLOCK_KEYS: tl.constexpr, WHOLE_PAGES: tl.constexpr):
    """The page of each key of a block; of the whole block, where no page ends within one."""
    if WHOLE_PAGES:
        page = tl.load(ids + begin // page_size, mask=begin < end, other=0)
    else:
        key = begin + tl.arange(0, BLOCK_KEYS)
        page = tl.load(ids + key // page_size, mask=key < end, other=0)
    return page.to(tl.int64)


@triton.jit
def _keys(begin, page_size, BLOCK_KEYS: tl.constexpr, WHOLE_PAGES: tl.constexpr):
    """The keys of a block, and their places in their pages."""
    offset = tl.arange(0, BLOCK_KEYS)
    place = begin % page_size + offset if WHOLE_PAGES else (begin + offset) % page_size
    return begin + offset, place


@triton.jit
def _softmax_step(scores, seen, values, state, DOT: tl.constexpr):
    """The running softmax over one more block of keys. scores: base 2. state: sums of values, of weights, and peaks."""
    summed, total, peak = state
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.maximum(new_peak, _LOWEST)
    weights, fading = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
    total = total * fading + tl.sum(weights, axis=1)
    summed = tl.dot(weights.to(DOT), values, summed * fading[:, None], input_precision="ieee")
    return summed, total, new_peak


@triton.jit
def _over_keys(
    queries,
    ids,
    k_pages,
    v_pages,
    kv_head,
    keys_of,
    visible,
    score_scale,
    LATENT: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    """The softmax of rows over a part of their keys. queries: the elements that are multiplied with the main ones of a
    key, and with its rest. keys_of: the first key, the one past the last, and the page size. visible: each row's first
    key, None for 0, and the one past its last.
    """
    main, rest = queries
    start, end, page_size = keys_of
    first_seen, end_seen = visible
    least = start if first_seen is None else tl.min(first_seen, axis=0)  # what lies before may be freed memory
    k_head, v_head = k_pages[0] + kv_head * k_pages[1][2], v_pages[0] + kv_head * v_pages[1][2]
    state = (
        tl.zeros((main.shape[0], BLOCK_V_DIM), dtype=tl.float32),
        tl.zeros((main.shape[0],), dtype=tl.float32),
        tl.full((main.shape[0],), float("-inf"), dtype=tl.float32),
    )
    page = _pages(ids, start, end, page_size, BLOCK_KEYS, WHOLE_PAGES)
    for begin in range(start, end, BLOCK_KEYS):
        key, place = _keys(begin, page_size, BLOCK_KEYS, WHOLE_PAGES)
        live, seen = key < end, key[None, :] < end_seen[:, None]
        if first_seen is not None:
            live, seen = live & (key >= least), seen & (key[None, :] >= first_seen[:, None])
        entry = k_head + page * k_pages[1][0] + place * k_pages[1][1]
        keys = elements(entry, k_pages[1][3], live, 0, DIM, main.shape[1]).to(DOT)
        scores = tl.dot(main, tl.trans(keys), input_precision="ieee")
        if REST > 0:
            rest_keys = elements(entry, k_pages[1][3], live, DIM, REST, BLOCK_REST).to(DOT)
            scores = tl.dot(rest, tl.trans(rest_keys), scores, input_precision="ieee")
        values = keys
        if not LATENT:
            entry = v_head + page * v_pages[1][0] + place * v_pages[1][1]
            values = elements(entry, v_pages[1][3], live, 0, V_DIM, BLOCK_V_DIM).to(DOT)
        # Here and not at the loop's head, where every load of keys would wait for it.
        page = _pages(ids, begin + BLOCK_KEYS, end, page_size, BLOCK_KEYS, WHOLE_PAGES)
        state = _softmax_step(scores * score_scale, seen, values, state, DOT)
    return state


@triton.jit
def _part(lists, numbers, window, drafted, CAUSAL: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """What a program takes: a request's page ids, first query row, rows, keys, first key of a part and the one past its
    last, how many parts there are, and where the part's outputs are. numbers: unit, requests, their splits, width,
    heads, and rows times heads from a split to the next.
    """
    query_indptr, page_indptr, page_ids, kv_lens, table_stride, shares = lists
    unit, bs, num_splits, width, num_heads, split_stride = numbers
    request, split, num_parts, piece = share_of(unit, bs, num_splits, shares)
    request = request.to(tl.int64)
    first, num_rows = query_rows(query_indptr, request, width)
    ids, num_keys = _page_list(page_indptr, page_ids, request, table_stride), tl.load(kv_lens + request)
    least = window_start(num_keys, num_rows, window, drafted, CAUSAL, BLOCK_KEYS)
    start, end, _ = part_of(split, least, num_keys, tl.maximum(num_parts, 1), BLOCK_KEYS)
    before = rows_before(split, piece, num_splits, split_stride, first, width, num_heads)
    return ids, first, num_rows, num_keys, start, tl.where(num_parts == 0, start, end), num_parts, before


_SHARES = ("shares", "bs", "num_splits", "split_stride")


@triton.jit(do_not_specialize=[*LISTS, "lse", "partial_lse", "width", "num_tiles", *_SHARES])
def _attend(
    q,
    k_pages,
    v_pages,
    query_indptr,
    page_indptr,
    page_ids,
    kv_lens,
    out,
    lse,
    partial_out,
    partial_lse,
    shares,
    width,
    shape,
    table_stride,
    num_tiles,
    bs,
    num_splits,
    split_stride,
    scales,
    window,
    drafted,
    sinks,
    CAUSAL: tl.constexpr,
    LATENT: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    """q, pages: (pointer, strides). shape: heads of a KV head, KV heads, page size. shares: of `share_of`."""
    group, num_kv_heads, page_size = shape
    unit, heads = tl.program_id(0) // (num_tiles * num_kv_heads), num_kv_heads * group
    tile, kv_head = tl.program_id(0) % num_tiles, (tl.program_id(0) // num_tiles % num_kv_heads).to(tl.int64)
    lists = (query_indptr, page_indptr, page_ids, kv_lens, table_stride, shares)
    part = _part(lists, (unit, bs, num_splits, width, heads, split_stride), window, drafted, CAUSAL, BLOCK_KEYS)
    ids, first, num_rows, num_keys, start, end, num_parts, before = part
    if (tile * BLOCK_ROWS >= num_rows * group) | ((num_parts != 1) & (start >= end)):
        return
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real, token, head = row < num_rows * group, first + row // group, kv_head * group + row % group
    num_seen, first_seen = num_keys - (num_rows - 1 - row // group) * CAUSAL, None
    if window is not None:  # a tile of later rows may begin later than its request
        first_seen = first_keys(num_seen, token, real, num_keys, window, drafted)
        start = tl.maximum(start, tl.min(first_seen, axis=0) // BLOCK_KEYS * BLOCK_KEYS)
    visible = (first_seen, tl.minimum(num_seen, end))
    queries = load_queries(q, token, head, real, DIM, REST, BLOCK_DIM, BLOCK_REST, DOT)
    given = (queries, ids, k_pages, v_pages, kv_head, (start, end, page_size), visible, scales[0])
    state = _over_keys(*given, LATENT, WHOLE_PAGES, DIM, REST, V_DIM, BLOCK_REST, BLOCK_V_DIM, BLOCK_KEYS, DOT)
    into, place = (out, lse, partial_out, partial_lse), (token * heads + head, num_parts, before)
    write_rows(state, into, place, head, real, sinks, scales[1], V_DIM, BLOCK_V_DIM)


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
    """`paged_operators.paged_attention` for types up to 32 bits."""
    num_tokens, num_heads, dim = q.shape
    page_size, num_kv_heads, v_dim = v_pages.shape[1:]
    bs, group = kv_lens.shape[0], num_heads // num_kv_heads
    heads, dims = (group, num_kv_heads, page_size), (dim, v_dim, is_one_latent(k_pages, v_pages))
    dot = q.dtype if k_pages.dtype is q.dtype or k_pages.dtype.itemsize == 1 else torch.float32
    tiles, num_tiles, num_slots, num_held = _shares(max_query * group, dims, dot, q.device)
    split_rows, most_rows = num_tokens * num_heads, min(partial_lse.numel(), partial_out.numel() // v_dim)
    per_request = num_kv_heads * num_tiles
    most_keys = max_kv_len if window is None else min(max_kv_len, window + max_query + tiles.keys)
    num_blocks = -(-most_keys // tiles.keys)
    num_splits = choose_num_splits(bs * per_request, num_slots, min(most_rows // max(split_rows, 1), num_blocks))
    split_stride, most = split_rows if num_splits > 1 else 0, 0
    if window is None and is_crowded(bs * num_splits * per_request, num_slots, num_held):
        room, at_once = most_rows - num_splits * split_stride, num_slots // max(per_request, 1)
        most = most_pieces(bs, num_blocks, at_once, max_query * num_heads, room)
    out, lse = q.new_empty(num_tokens, num_heads, v_dim), q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    shares = deal_out(kv_lens, num_splits, most, tiles.keys) if most else None
    lists, drafted, sinks = (query_indptr, page_indptr, page_ids, kv_lens), dense(drafted), dense(sinks)
    shape = (max_query, heads, page_ids.stride(0), num_tiles, bs, num_splits, split_stride)
    scales, num_programs = (scale * k_scale * _LOG2_E, v_scale), (most + bs * num_splits) * per_request
    tensors = (q, k_pages, v_pages, *lists, out, lse, partial_out, partial_lse, shares, drafted, sinks)
    if num_programs:
        _launch(tensors, num_programs, shape, scales, window, causal, dims, dot, tiles)
    if num_splits > 1 or most:
        parts = Parts(
            partial_out, partial_lse, 0, num_splits, split_stride, most, kv_lens if shares is None else shares
        )
        extras = (window, drafted, sinks)
        merge(parts, query_indptr, kv_lens, (out, lse), max_query, tiles.keys, causal, extras)
    return out, lse


@lru_cache(1024)
def _shares(num_rows: int, dims: Dims, dot: torch.dtype, device: torch.device) -> tuple[Tiles, int, int, int]:
    """Tiles for so many rows of a request, how many there are, how many the GPU works on at once as keys are divided
    for, and how many its shared memory holds.
    """
    sizes, gpu = sizes_of(*dims), gpu_of(device)
    tiles = choose_tiles(num_rows, sizes, dot, gpu)
    held = max(1, gpu.shared // tile_bytes(tiles, sizes, dot, gpu))
    return tiles, triton.cdiv(num_rows, tiles.rows), gpu.num_processors * min(2, held), gpu.num_processors * held


def _call(
    tensors: Sequence[Any],
    num_programs: int,
    shape: tuple[Any, ...],
    scales: tuple[float, float],
    window: int | None,
    causal: bool,
    dims: Dims,
    dot: torch.dtype,
    tiles: Tiles,
) -> Call:
    *given, drafted, sinks = tensors
    page_size = shape[1][2]
    constants: dict[str, Any] = {"CAUSAL": causal, "WHOLE_PAGES": page_size % tiles.keys == 0}
    constants |= {**sizes_of(*dims), "BLOCK_ROWS": tiles.rows, "BLOCK_KEYS": tiles.keys, "DOT": _DOT_TYPES[dot]}
    options = {**constants, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    options |= {"maxnreg": tiles.registers} if tiles.registers else {}
    arguments = (*strided(given[:3]), *given[3:], *shape, scales, window, drafted, sinks)
    return Call((num_programs,), arguments, options)


_launch = DirectLaunch(_attend, _call)
