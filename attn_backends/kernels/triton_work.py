"""FlashInfer's work lists as one Triton launch of one program: `work_operators.list_work`. The launch that plans a
captured step writes them too (`triton_plan_work`).

Four passes over tiles, a block of them at a time: their keys, the length of a chunk, what is left beside chunks, and
the lists. Tiles that fit one block are found once. Every word is written once, so that no thread waits for another's.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_cuts import COUNT_BITS, block_of_tiles, chunk_of, cut_of, tiles_of
from attn_backends.kernels.triton_launch import Launch, unspecialized
from attn_backends.kernels.triton_packed import pack, unpack
from attn_backends.kernels.work_operators import BLOCK_KEYS, OVERHEAD, WorkLists, num_slots, spare_rows

_MOST_SLOTS = 1024  # of a block


@triton.jit
def _before(high, low, high_before, low_before):
    """Sums of all earlier elements of two counts, and of those before them."""
    packed = pack(high, 0 * low, low, COUNT_BITS)
    more_high, _, more_low = unpack(tl.cumsum(packed, axis=0) - packed, COUNT_BITS)
    return high_before + more_high, low_before + more_low


@triton.jit
def _store_items(items, stride, at, live, tile, partial, begin, end):
    """Write items. tile: what all items of a tile have alike."""
    q_indptr, kv_indptr, q_len, kv_len, q_start = tile
    tl.store(items + at, q_indptr, mask=live)
    tl.store(items + stride + at, kv_indptr, mask=live)
    tl.store(items + 2 * stride + at, partial, mask=live)
    tl.store(items + 3 * stride + at, q_len, mask=live)
    tl.store(items + 4 * stride + at, kv_len, mask=live)
    tl.store(items + 5 * stride + at, q_start, mask=live)
    tl.store(items + 6 * stride + at, begin, mask=live)
    tl.store(items + 7 * stride + at, end, mask=live)


@triton.jit
def _store_merges(merges, stride, at, live, row, end_row, partial, end_partial, size):
    """Write what thread blocks merge."""
    tl.store(merges + at, row, mask=live)
    tl.store(merges + stride + at, end_row, mask=live)
    tl.store(merges + 2 * stride + at, partial, mask=live)
    tl.store(merges + 3 * stride + at, end_partial, mask=live)
    tl.store(merges + 4 * stride + at, size, mask=live)


@triton.jit
def _list_merges(merges, stride, num_blocks, pieces, partial, partials, row, num_rows, SIZE: tl.constexpr):
    """Write what thread blocks merge of tiles: each a tile's share of all partial results, in whole rows of it."""
    first = partial * num_blocks // pieces
    num_shares = (partial + partials) * num_blocks // pieces - first
    share = tl.cdiv(num_rows, tl.maximum(num_shares, 1))
    end = (partial + partials) * SIZE
    for k in range(tl.max(num_shares, axis=0)):
        low = tl.minimum(k * share, num_rows)
        high = tl.minimum(low + share, num_rows)
        live = k < num_shares
        _store_merges(merges, stride, first + k, live, row + low, row + high, partial * SIZE + low, end, SIZE)


@triton.jit
def _first_dealt(turn, dealt, spare):
    """How much is dealt to the clusters before one of `spare`."""
    return turn * (dealt // spare) + tl.minimum(turn, dealt % spare)


@triton.jit
def _list_tiles(
    batch,
    items,
    item_stride,
    work_indptr,
    num_clusters,
    tiles,
    cut,
    before,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
):
    """Write the items of a block of tiles, and where clusters begin that begin with these or after them."""
    qo_indptr, kv_indptr, kv_len, _, _, _, heads, _ = batch
    chunk, longest, dealt, num_chunks = cut
    chunks_before, line_before, items_before, partials_before = before
    request, q_len, first_row, num_rows, is_real, end = tiles
    q_indptr = tl.load(qo_indptr + request)
    tile = (q_indptr, tl.load(kv_indptr + request), q_len, tl.load(kv_len + request), first_row)
    blocks = tl.cdiv(end, KEYS)
    whole, left = blocks // chunk, blocks % chunk
    is_left = is_real & ((left > 0) | (blocks == 0))
    taken = tl.where(is_left, left + COST, 0)
    line, at = _before(taken, whole, line_before, chunks_before)
    last = (line + tl.maximum(left - 1, 0)) // chunk
    is_cut = is_left & (last > tl.where(dealt > 0, last, line // chunk))
    left_items = is_left.to(tl.int32) + is_cut.to(tl.int32)
    partials = tl.where(whole + left_items > 1, whole + left_items, 0)
    partial, left_at = _before(partials, left_items, partials_before, items_before)
    row, step = tl.where(partials > 0, partial * SIZE, -1), tl.where(partials > 0, SIZE, 0)

    for k in range(longest // chunk):
        until = tl.minimum((k + 1) * chunk * KEYS, end)
        _store_items(items, item_stride, at + k, k < whole, tile, row + k * step, k * chunk * KEYS, until)
    spare = tl.maximum(num_clusters - num_chunks, 1)
    in_turn = _first_dealt(left_at % spare, dealt, spare) + left_at // spare
    at = num_chunks + tl.where(dealt > 0, in_turn, left_at)
    row, begin = row + whole * step, whole * chunk * KEYS
    until = tl.where(is_cut, begin + (last * chunk - line) * KEYS, end)
    _store_items(items, item_stride, at, is_left, tile, row, begin, until)
    _store_items(items, item_stride, at + 1, is_cut, tile, row + step, until, end)

    cluster = num_chunks + last
    tl.store(work_indptr + cluster, at + 1, mask=is_cut)
    following = tl.where(dealt > 0, 0, tl.minimum(num_chunks + (line + taken) // chunk, num_clusters))
    for ahead in tl.static_range(1, COST + 2):
        here = is_left & (cluster + ahead <= following)
        tl.store(work_indptr + cluster + ahead, at + left_items, mask=here)
    return partial, partials, q_indptr * heads + first_row, num_rows, whole, taken, left_items


@triton.jit
def write_lists(
    batch,
    items,
    merges,
    work_indptr,
    item_stride,
    merge_stride,
    num_clusters,
    SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """All lists. batch: qo_indptr, kv_indptr, kv_len, and of `ListSizes` n to spare_rows. IS_BLOCK: slots are no more
    than `SLOTS`.
    """
    _, _, _, _, slots, _, _, _ = batch
    held = None
    if IS_BLOCK:
        held = tiles_of(batch, tl.arange(0, SLOTS), SIZE, CAUSAL)
    chunk, longest = chunk_of(batch, held, slots, num_clusters, SIZE, CAUSAL, KEYS, COST, SLOTS)
    dealt, num_chunks, pieces = cut_of(batch, held, slots, chunk, num_clusters, SIZE, CAUSAL, KEYS, COST, SLOTS)
    cut = (chunk, longest, dealt, num_chunks)
    num_blocks = num_clusters * (SIZE // 64)
    num_whole, length, num_items, num_partials = 0, 0, 0, 0
    for begin in range(0, slots, SLOTS):
        tiles = block_of_tiles(batch, held, begin, SIZE, CAUSAL, SLOTS)
        before = (num_whole, length, num_items, num_partials)
        partial, partials, row, num_rows, whole, taken, left_items = _list_tiles(
            batch, items, item_stride, work_indptr, num_clusters, tiles, cut, before, SIZE, KEYS, COST
        )
        _list_merges(merges, merge_stride, num_blocks, pieces, partial, partials, row, num_rows, SIZE)
        more, more_items, more_partials = unpack(
            tl.sum(pack(taken, left_items, partials, COUNT_BITS), axis=0), COUNT_BITS
        )
        length, num_items, num_partials = length + more, num_items + more_items, num_partials + more_partials
        if not IS_BLOCK:
            num_whole += tl.sum(whole, axis=0)

    block = tl.arange(0, BLOCKS)
    tl.store(work_indptr + block, block, mask=block <= num_chunks)
    first_dealt = _first_dealt(block - num_chunks, dealt, tl.maximum(num_clusters - num_chunks, 1))
    rest = num_chunks + tl.where(dealt > 0, first_dealt, num_items)
    is_behind = block > num_chunks + tl.where(dealt > 0, 0, length // chunk)
    tl.store(work_indptr + block, rest, mask=is_behind & (block <= num_clusters))
    idle, none = (block >= num_partials * num_blocks // pieces) & (block < num_blocks), tl.zeros_like(block)
    _store_merges(merges, merge_stride, block, idle, none, none, none, none, 0)


@unspecialized
def _list_work(
    qo_indptr,
    kv_indptr,
    kv_len,
    items,
    merges,
    work_indptr,
    item_stride,
    merge_stride,
    n,
    slots,
    steps,
    heads,
    spare_rows,
    num_clusters,
    SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    batch, into = (qo_indptr, kv_indptr, kv_len, n, slots, steps, heads, spare_rows), (items, merges, work_indptr)
    sizes = (item_stride, merge_stride, num_clusters)
    write_lists(batch, *into, *sizes, SIZE, CAUSAL, KEYS, COST, SLOTS, IS_BLOCK, BLOCKS)


class ListSizes(NamedTuple):
    """Strides and sizes of lists. n: requests. slots: places for tiles. steps: of a search among requests. spare_rows:
    of a request's last tile (`work_operators.spare_rows`).
    """

    item_stride: int
    merge_stride: int
    n: int
    slots: int
    steps: int
    heads: int
    spare_rows: int
    num_clusters: int


def sizes_of(lists: WorkLists, n: int, num_tokens: int, num_heads: int) -> ListSizes:
    """The sizes of n requests' lists."""
    rows = lists.tile_rows
    slots, spare = num_slots(num_tokens, num_heads, n, rows), spare_rows(num_heads, rows)
    of_tiles = (n, slots, n.bit_length(), num_heads, spare)
    return ListSizes(lists.items.stride(0), lists.merges.stride(0), *of_tiles, lists.work_indptr.shape[0] - 1)


def constants_of(lists: WorkLists, sizes: ListSizes, causal: bool) -> tuple[int | bool, ...]:
    """Constants that kernels are compiled for, from `SIZE` on."""
    block = min(triton.next_power_of_2(sizes.slots), _MOST_SLOTS)
    num_blocks = triton.next_power_of_2(lists.merges.shape[1] + 1)
    return lists.tile_rows, causal, BLOCK_KEYS, OVERHEAD, block, sizes.slots <= block, num_blocks


def num_warps(sizes: ListSizes) -> int:
    """Warps of the program that writes lists: sums of few tiles are slower among more warps."""
    return 2 if sizes.slots <= 64 else 4 if sizes.slots <= 256 else 8


def list_work(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_len: Tensor,
    lists: WorkLists,
    num_tokens: int,
    num_heads: int,
    causal: bool,
) -> None:
    """`work_operators.list_work`."""
    sizes = sizes_of(lists, kv_len.shape[0], num_tokens, num_heads)
    constants = constants_of(lists, sizes, causal)
    _launch(kv_len.device, num_warps(sizes))(constants, qo_indptr, kv_indptr, kv_len, *lists, *sizes, *constants)


@cache
def _launch(device: torch.device, num_warps: int) -> Launch:
    return Launch(_list_work, device, (1, 1, 1), num_warps)
