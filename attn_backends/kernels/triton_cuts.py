"""Cuts of the tiles of FlashInfer's work lists: passes over tiles, a block of them at a time (`triton_work`).

Counts are packed into one int64, so that one reduction sums three or four of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.triton_packed import pack, unpack
from attn_backends.kernels.work_operators import TRIES

assert TRIES == 8, "`chunk_of` tries twice four"

COUNT_BITS = tl.constexpr(15)  # of a count of tiles, of items or of partial results: there are fewer than 2 ** 15
_MOST = tl.constexpr(2**15 - 1)


@triton.jit
def tiles_of(batch, slot, SIZE: tl.constexpr, CAUSAL: tl.constexpr):
    """Tiles of slots: request, its rows, first and number of rows of the tile, whether it is real, the end of keys."""
    qo_indptr, _, kv_len, n, slots, steps, heads, spare_rows = batch
    request, behind = tl.zeros_like(slot), tl.zeros_like(slot) + n
    for _ in range(steps):
        middle = (request + behind) // 2
        starts = (tl.load(qo_indptr + middle) * heads + middle * spare_rows) // SIZE
        request = tl.where(starts <= slot, middle, request)
        behind = tl.where(starts <= slot, behind, middle)
    row = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - row
    first = (slot - (row * heads + request * spare_rows) // SIZE) * SIZE
    is_real = (slot < slots) & (first < q_len * heads)
    end = tl.load(kv_len + request)
    if CAUSAL:
        end = tl.maximum(tl.minimum(end - q_len + tl.cdiv(first + SIZE, heads), end), 0)
    num_rows = tl.minimum(tl.maximum(q_len * heads - first, 0), SIZE)
    return request, q_len, first, num_rows, is_real, tl.where(is_real, end, 0)


@triton.jit
def block_of_tiles(batch, held, begin, SIZE: tl.constexpr, CAUSAL: tl.constexpr, SLOTS: tl.constexpr):
    """Tiles of the slots from `begin` on. held: of all slots, None if they are more than a block."""
    if held is not None:
        return held
    else:
        return tiles_of(batch, begin + tl.arange(0, SLOTS), SIZE, CAUSAL)


@triton.jit
def _blocks(batch, held, begin, SIZE: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr):
    """Blocks of keys of the tiles in slots, and whether there are tiles."""
    _, _, _, _, is_real, end = block_of_tiles(batch, held, begin, SIZE, CAUSAL, SLOTS)
    return tl.cdiv(end, KEYS), is_real


@triton.jit
def _left(blocks, is_real, chunk):
    """Whether something of tiles is left beside whole chunks; all of one without keys, whose rows are written too."""
    return (is_real & ((blocks % chunk != 0) | (blocks == 0))).to(tl.int64)


@triton.jit
def _left_by_four(blocks, is_real, chunk):
    """How many tiles have something left, of four chunks, each a block longer, in one number."""
    packed = _left(blocks, is_real, chunk)
    for i in tl.static_range(1, 4):
        packed += _left(blocks, is_real, chunk + i) << i * COUNT_BITS
    return tl.sum(packed, axis=0)


@triton.jit
def _shortest(found, chunk, left, total, num_clusters, COST: tl.constexpr):
    """The first of four chunks that fits, if it is shorter than one that was found. left: as of `_left_by_four`."""
    for i in tl.static_range(4):
        num_left = ((left >> i * COUNT_BITS) & _MOST).to(tl.int32)
        fits = total + COST * num_left <= num_clusters * (chunk + i)
        found = tl.where(fits, tl.minimum(found, chunk + i), found)
    return found


@triton.jit
def chunk_of(
    batch,
    held,
    slots,
    num_clusters,
    SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Blocks of a chunk, and of the longest tile. `TRIES` chunks are tried, four at a time."""
    total, num_tiles, longest = 0, 0, 0
    for begin in range(0, slots, SLOTS):
        blocks, is_real = _blocks(batch, held, begin, SIZE, CAUSAL, KEYS, SLOTS)
        more, _, tiles = unpack(tl.sum(pack(blocks, 0 * blocks, is_real, COUNT_BITS), axis=0), COUNT_BITS)
        total, num_tiles, longest = total + more, num_tiles + tiles, tl.maximum(longest, tl.max(blocks, axis=0))
    few = tl.where(total <= num_clusters, 1, 0)  # blocks than clusters: many pieces cost more to merge than they save
    floor = 1 + few * ((4 * total > num_clusters).to(tl.int32) + (2 * total > num_clusters).to(tl.int32))
    chunk = tl.maximum(tl.cdiv(total + COST * num_tiles, num_clusters), floor)
    least = tl.maximum(tl.cdiv(total, num_clusters), floor)
    if longest >= least:  # else something of every tile is left, and `chunk` is the first that fits
        shorter, longer = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        for begin in range(0, slots, SLOTS):
            blocks, is_real = _blocks(batch, held, begin, SIZE, CAUSAL, KEYS, SLOTS)
            shorter += _left_by_four(blocks, is_real, least)
            longer += _left_by_four(blocks, is_real, least + 4)
        chunk = _shortest(chunk, least, shorter, total, num_clusters, COST)
        chunk = _shortest(chunk, least + 4, longer, total, num_clusters, COST)
    return tl.maximum(chunk, 1), longest


@triton.jit
def cut_of(
    batch,
    held,
    slots,
    chunk,
    num_clusters,
    SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Returns `dealt`, `num_chunks` and `pieces` of `work_operators._Cut`."""
    num_chunks, num_left, longest, split = 0, 0, 0, 0
    for begin in range(0, slots, SLOTS):
        blocks, is_real = _blocks(batch, held, begin, SIZE, CAUSAL, KEYS, SLOTS)
        whole, left = blocks // chunk, blocks % chunk
        pieces = tl.where(blocks > chunk, whole + (left > 0).to(tl.int32), 0)
        packed = tl.sum(pack(pieces, whole, _left(blocks, is_real, chunk), COUNT_BITS), axis=0)
        more_pieces, more_chunks, more_left = unpack(packed, COUNT_BITS)
        num_chunks, num_left, split = num_chunks + more_chunks, num_left + more_left, split + more_pieces
        longest = tl.maximum(longest, tl.max(left, axis=0))
    spare = num_clusters - num_chunks
    is_level = tl.cdiv(num_left, tl.maximum(spare, 1)) * (longest + COST) <= chunk + chunk // 32 + COST
    pieces = tl.maximum(split + tl.where(is_level, 0, 2 * tl.maximum(spare - 1, 0)), 1)
    return tl.where(is_level, num_left, 0), num_chunks, pieces
