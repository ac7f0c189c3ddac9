"""Attention over a window of rows and over compressed entries for Hopper, in Gluon: the warp groups of `gluon_mla`.

A program takes one query row, 64 of its heads and a share of its keys, two blocks of 64 at a time: the window's blocks
first, then the entries'. A key is value, too, 512 elements of both. Two groups of `gluon_groups` multiply. A third one
gathers the rows of a block's slots, in any order, through registers. There it makes the queries' type of 8-bit pages
(`fp8_pages`), once a program and block, and says which keys count: no slot of -1, and none past a row's last. While it
converts half a block of bytes, it has begun to read the next half. The others load queries meanwhile.

    shared memory   queries 64 x 512, two blocks of 64 x 512, weights 2 x 64 x 64: 213,000 of 232,448 bytes
    registers       200 a thread for the two groups that multiply, 104 for the third

Where rows and heads give too few programs for the GPU, a row's blocks are divided into splits, by host bounds, and
`triton_sparse` merges them in their order. One compilation serves layers with and without entries, of all ratios. With
128 heads two programs gather the same rows. FlashMLA divides them between two multiprocessors instead (a cluster,
"crossover" in its notes on 8-bit decode), which this does not do.

Queries are bfloat16, of any strides; pages are bfloat16, of any strides, or bytes. Weights are rounded to bfloat16
before their product, sums are float32.

On an H200 it reaches 0.87 to 1.01 of FlashMLA's speed with 64 heads, 0.93 in the median, and 0.72 to 0.93 with 128
(docs/results/h200/kernels_dsv4.json). Splits of one request are merged by a launch more.
A profile of 128 rows of 128 heads (ncu, H100, docs/results/h100/profiles.json) has warps wait longest for loads of
rows: 6.9 cycles between two instructions, in FlashMLA's kernel 3.2. Memory is at 0.21 and L1 at 0.37 of what they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn_backends.kernels import fp8_pages, triton_pages
from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.gluon_groups import (
    COPIED,
    NUMBERS,
    TILE,
    barriers_of_groups,
    even,
    filled,
    halves,
    odd,
)
from attn_backends.kernels.torch_compressed import Keys
from attn_backends.kernels.triton_launch import Call, DirectLaunch
from attn_backends.kernels.triton_sparse import Blocks, merge, num_splits

_LOG2_E = 1.4426950408889634
_BLOCKS = Blocks(heads=64, keys=128, warps=12, stages=2)
_NOPE = gl.constexpr(fp8_pages.NOPE)
_DATA_BYTES = gl.constexpr(fp8_pages.DATA_BYTES)
_SCALE_BYTES = gl.constexpr(fp8_pages.SCALE_BYTES)
_GROUP = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))  # a group of 64 elements, 16 of a row a thread
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))  # the same of four bytes each
_KEYS_OF_WORDS = gl.constexpr(gl.SliceLayout(1, _WORDS.value))
_KEYS = gl.constexpr(gl.SliceLayout(1, _GROUP.value))


@gluon.jit
def _slots(block, lists):
    """The slots of a block, -1 for those that do not count, and whether they are of the window."""
    slots, num_rows, entry_slots, num_entries = lists
    offset = gl.arange(0, 64, layout=_KEYS)
    row_blocks = gl.cdiv(num_rows, 64)
    is_row, key = block < row_blocks, block * 64 + offset
    entry = key - row_blocks * 64
    slot = gl.load(slots + key, mask=key < num_rows, other=-1)
    return gl.maximum(slot, gl.load(entry_slots + entry, mask=(entry >= 0) & (entry < num_entries), other=-1)), is_row


@gluon.jit
def _begin(pool, slot):
    """Where the rows of slots begin, and where their scales do in pages of bytes."""
    pages, num_rows, page_stride, row_stride, _ = pool
    page, offset = slot // num_rows, slot % num_rows
    begin = pages + page.to(gl.int64) * page_stride
    if pages.dtype.element_ty == gl.uint8:
        return begin + offset * _DATA_BYTES, begin + num_rows * _DATA_BYTES + offset * _SCALE_BYTES
    else:
        return begin + offset * row_stride, begin


@gluon.jit
def _find(block, pools, lists):
    """The rows of a block: where they and their scales begin, and which count."""
    slot, is_row = _slots(block, lists)
    live = slot >= 0
    row, scales = _begin(pools[0], gl.maximum(slot, 0))
    entry, entry_scales = _begin(pools[1], gl.maximum(slot, 0))
    return gl.where(is_row, row, entry), gl.where(is_row, scales, entry_scales), live


@gluon.jit
def _read(begin, live, stride, GROUP: gl.constexpr):
    """A group of 64 elements of live rows, 0 for the others. Of bytes four in a word, but for the last group, which is
    rotated: single bytes that a loop keeps would take a register each.
    """
    element = gl.arange(0, 64, layout=gl.SliceLayout(0, _GROUP))[None, :]
    if begin.dtype.element_ty != gl.uint8:
        return gl.load(begin[:, None] + (GROUP * 64 + element) * stride, mask=live[:, None], other=0.0)
    elif GROUP * 64 == _NOPE:
        tail = (begin + _NOPE).to(gl.pointer_type(gl.bfloat16))
        return gl.load(tail[:, None] + element, mask=live[:, None], other=0.0)
    else:
        words = gl.convert_layout((begin + GROUP * 64).to(gl.pointer_type(gl.int32)), _KEYS_OF_WORDS)
        word, real = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS)), gl.convert_layout(live, _KEYS_OF_WORDS)
        return gl.load(words[:, None] + word[None, :], mask=real[:, None], other=0)


@gluon.jit
def _read_half(found, stride, HALF: gl.constexpr):
    begin, _, live = found
    one, two = _read(begin, live, stride, 4 * HALF), _read(begin, live, stride, 4 * HALF + 1)
    return one, two, _read(begin, live, stride, 4 * HALF + 2), _read(begin, live, stride, 4 * HALF + 3)


@gluon.jit
def _read_scales(found):
    """The bytes of rows' scales, as one number each."""
    _, scales, live = found
    return gl.load(scales.to(gl.pointer_type(gl.int64)), mask=live, other=0)


@gluon.jit
def _codes(words):
    """The bytes of words [64, 16], of each the lowest first."""
    even, odd = gl.join(words, words >> 16), gl.join(words >> 8, words >> 24)
    return gl.convert_layout(gl.join(even, odd).reshape([64, 64]), _GROUP)


@gluon.jit
def _write_half(groups, scales, place, HALF: gl.constexpr):
    """Half of a block's elements. scales: None if they have none."""
    for i in gl.static_range(4):
        group = groups[i]
        if group.dtype == gl.int32:
            exponent = ((scales >> (8 * (4 * HALF + i))) & 0xFF).to(gl.int32)
            scale = (exponent << 23).to(gl.float32, bitcast=True).to(place.dtype)
            codes = _codes(group).to(gl.uint8).to(gl.float8e4nv, bitcast=True)
            group = codes.to(place.dtype) * scale[:, None]
        place.slice(64 * i, 64, dim=1).store(group)


@gluon.jit
def _gather_bytes(blocks, full, free, live, pools, lists, first, pairs):
    """The third group, of pages of bytes. first: block. full, free: as of `gluon_groups.gather`."""
    left, right, _ = blocks
    found = _find(first, pools, lists)
    groups = _read_half(found, 1, 0)
    for i in range(pairs * 2):
        odd, phase = i & 1, ((i >> 1) & 1) ^ 1
        scales, others = _read_scales(found), _read_half(found, 1, 1)
        mbarrier.wait(free[0].index(odd), phase)
        live.index(odd).store(found[2].to(gl.int32))
        _write_half(groups, scales, left.index(odd), 0)
        filled(full[0].index(odd))
        found = _find(first + i + 1, pools, lists)
        groups = _read_half(found, 1, 0)
        mbarrier.wait(free[1].index(odd), phase)
        _write_half(others, scales, right.index(odd), 1)
        filled(full[1].index(odd))


@gluon.jit
def _gather_floats(blocks, full, free, live, pools, lists, first, pairs):
    """The same of rows as they are, whose halves are twice as large: one is read at a time."""
    left, right, _ = blocks
    stride = pools[0][4]
    for i in range(pairs * 2):
        odd, phase = i & 1, ((i >> 1) & 1) ^ 1
        found = _find(first + i, pools, lists)
        groups = _read_half(found, stride, 0)
        mbarrier.wait(free[0].index(odd), phase)
        live.index(odd).store(found[2].to(gl.int32))
        _write_half(groups, None, left.index(odd), 0)
        filled(full[0].index(odd))
        groups = _read_half(found, stride, 1)
        mbarrier.wait(free[1].index(odd), phase)
        _write_half(groups, None, right.index(odd), 1)
        filled(full[1].index(odd))


@gluon.jit
def _gather(blocks, full, free, live, pools, lists, first, pairs):
    if pools[0][0].dtype.element_ty == gl.uint8:
        _gather_bytes(blocks, full, free, live, pools, lists, first, pairs)
    else:
        _gather_floats(blocks, full, free, live, pools, lists, first, pairs)


@gluon.jit
def _load_queries(q, given, HALF: gl.constexpr):
    """Half of the elements of a tile's heads, 0 past the last head."""
    queries, _, full, _, _, _, rows, _, _, _, _, _ = given
    tile, num_heads, token, _, _ = rows
    head = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, COPIED))
    element = 256 * HALF + gl.arange(0, 256, layout=gl.SliceLayout(0, COPIED))
    row = q[0] + token.to(gl.int64) * q[1][0] + head.to(gl.int64) * q[1][1]
    loaded = gl.load(row[:, None] + (element * q[1][2])[None, :], mask=(head < num_heads)[:, None], other=0.0)
    queries[HALF].index(0).store(loaded)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full[2].index(0), count=64)


@gluon.jit
def _even(q, given, outputs, lse):
    _load_queries(q, given, 0)
    even(given, outputs, lse, False)


@gluon.jit
def _odd(q, given, outputs):
    _load_queries(q, given, 1)
    odd(given, outputs, False)


@gluon.jit
def _lists(token, num_rows, row_stride, slots, lens):
    """Where the slots of a query row begin, and how many it sees."""
    return slots + token.to(gl.int64) * row_stride, gl.minimum(gl.load(lens + token), num_rows).to(gl.int32)


@gluon.jit
def _pool(pages, per_page):
    """As `_begin` takes it: Triton 3.6 loses constants of a tuple in a tuple."""
    strides = pages[1]
    return pages[0], per_page, strides[0], strides[1], strides[2]


_NUMBERS_OF_A_LAUNCH = ["slots_stride", "width", "entry_slots_stride", "entry_width", "per_page", "entries_per_page"]
_PLAIN = ["slots", "lens", "entry_slots", "entry_lens", "sinks", "lse", "partial_lse"]


@gluon.jit(do_not_specialize=[*_PLAIN, *_NUMBERS_OF_A_LAUNCH, "num_tokens", "num_heads", "num_splits"])
def _attend(
    q,
    pages,
    slots,
    lens,
    entries,
    entry_slots,
    entry_lens,
    sinks,
    out,
    lse,
    partial_out,
    partial_lse,
    per_page,
    slots_stride,
    width,
    entries_per_page,
    entry_slots_stride,
    entry_width,
    num_tokens,
    num_heads,
    num_splits,
    score_scale,
):
    """q, pages and entries are (pointer, strides). per_page: rows. width: slots of a query row, at the most. out, lse:
    dense. partial_out, partial_lse: likewise, [num_splits, num_tokens, num_heads], of several splits alone.
    """
    program, split, tiles = gl.program_id(0), gl.program_id(1), gl.cdiv(num_heads, 64)
    tile, token = program % tiles, program // tiles
    first_slot, num_rows = _lists(token, width, slots_stride, slots, lens)
    first_entry, num_entries = _lists(token, entry_width, entry_slots_stride, entry_slots, entry_lens)
    num_blocks = gl.cdiv(num_rows, 64) + gl.cdiv(num_entries, 64)
    share = gl.cdiv(gl.cdiv(num_blocks, 2), num_splits)
    pairs = gl.maximum(gl.minimum(share, gl.cdiv(num_blocks, 2) - split * share), 0)

    queries = halves(q[0].dtype.element_ty, 1)
    left, right = halves(q[0].dtype.element_ty, 2)
    weights = gl.allocate_shared_memory(q[0].dtype.element_ty, [2, 64, 64], TILE)
    peaks = gl.allocate_shared_memory(gl.float32, [4, 64], NUMBERS)
    live = gl.allocate_shared_memory(gl.int32, [2, 64], NUMBERS)
    full, free, handed = barriers_of_groups()
    gl.thread_barrier()

    is_part, offset = num_splits > 1, (split * num_tokens).to(gl.int64) * num_heads
    outputs = (out, partial_out + offset * 512, is_part)
    if is_part:
        lse = partial_lse + offset
    blocks, rows = (left, right, weights), (tile, num_heads, token, 1, 0)
    given = (queries, blocks, full, free, peaks, handed, rows, (0, 0, pairs), score_scale, 1.0, live, sinks)
    pools = (_pool(pages, per_page), _pool(entries, entries_per_page))
    lists = (first_slot, num_rows, first_entry, num_entries)
    gl.warp_specialize(
        [
            (_gather, (blocks, full, free, live, pools, lists, split * share * 2, pairs)),
            (_even, (q, given, outputs, lse)),
            (_odd, (q, given, outputs)),
        ],
        [4, 4],
        [200, 200],
    )


def sparse_attention(q: Tensor, sources: Sequence[Keys], scale: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """`sparse_operators.sparse_attention` on SM90, of bfloat16 queries and rows of 512 elements."""
    num_tokens, num_heads, _ = q.shape
    tiles = triton.cdiv(num_heads, _BLOCKS.heads)
    num_keys = sum(source.slots.shape[1] for source in sources)
    splits = num_splits(num_tokens * tiles, _BLOCKS, num_keys, gpu_of(q.device).num_processors)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    parts = (lse, lse)
    if splits > 1:
        parts = (lse.new_empty(splits, *q.shape), lse.new_empty(splits, *lse.shape))
    sinks = None if sinks is None else sinks.contiguous()
    rows, entries = _source(sources[0]), _source(sources[-1])
    width, entry_width = (source.slots.shape[1] for source in (rows, entries))
    if len(sources) == 1:
        entry_width = 0  # rows stand in for entries, and none of them is seen
    lists = (rows.pages, rows.slots, rows.lens, entries.pages, entries.slots, entries.lens)
    numbers = (rows.num_rows, rows.slots.stride(0), width, entries.num_rows, entries.slots.stride(0), entry_width)
    shape = (*numbers, num_tokens, num_heads, splits)
    _launch((q, *lists, sinks, out, lse, *parts), tiles, shape, scale * _LOG2_E)
    if splits > 1:
        merge(parts, sinks, (out, lse))
    return out, lse


def _source(keys: Keys) -> Keys:
    """The same with neighbouring slots and lengths."""
    slots = keys.slots if keys.slots.stride(1) == 1 else keys.slots.contiguous()
    return keys._replace(slots=slots, lens=keys.lens.contiguous())


def _call(tensors: Sequence[Any], tiles: int, shape: tuple[int, ...], score_scale: float) -> Call:
    q, pages, slots, lens, entries, *rest = tensors
    strides = [triton_pages.pool(pool, 0)[2:] for pool in (pages, entries)]
    pools = ((pages, strides[0]), slots, lens, (entries, strides[1]))
    *_, num_tokens, _, splits = shape
    return Call((num_tokens * tiles, splits), ((q, q.stride()), *pools, *rest, *shape, score_scale), {"num_warps": 4})


_launch = DirectLaunch(_attend, _call)
