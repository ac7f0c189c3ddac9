"""FlashMLA's share-out as one Triton launch of one program: `schedule_operators.share_out`.

FlashMLA's own scheduler walks requests and parts one after the other, on one thread. Here every cut finds its request
by comparing itself with all of them, a block of requests at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.schedule_operators import BLOCK_KEYS, OVERHEAD
from attn_backends.kernels.triton_launch import Launch, unspecialized

_REQUESTS = 64  # of a block
_WARPS = 8


@triton.jit
def _blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS: tl.constexpr):
    """Blocks of keys of requests, 0 from n on."""
    live = request < n
    blocks = tl.cdiv(tl.load(lens + request * lens_stride, mask=live, other=0).to(tl.int32), KEYS)
    if more_lens is not None:
        more = tl.load(more_lens + request * more_stride, mask=live, other=0).to(tl.int32)
        blocks += tl.cdiv(tl.minimum(more, most), KEYS)
    return blocks


@triton.jit
def _total(lens, more_lens, lens_stride, more_stride, n, most, KEYS: tl.constexpr, REQUESTS: tl.constexpr):
    """Blocks of keys of all requests, at least one of each."""
    total = tl.zeros((REQUESTS,), dtype=tl.int32)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        blocks = _blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS)
        total += tl.where(request < n, tl.maximum(blocks, 1), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _passed(live, ends, cut, passed, begin_of_next, starts):
    """Which of a block of requests end before a cut; how many end before it so far, and where the next one begins."""
    is_passed = live[None, :] & (ends[None, :] <= cut[:, None])
    is_next = live[None, :] & (ends[None, :] > cut[:, None])
    begins = tl.min(tl.where(is_next, starts[None, :], 2**30), axis=1)
    return is_passed, passed + tl.sum(is_passed.to(tl.int32), axis=1), tl.minimum(begin_of_next, begins)


@triton.jit
def _store_parts(parts, part, num_parts, distance, first, first_start, after, after_start, whole):
    """Write parts, each from one cut to the next. whole: blocks of the last request that ends in a part."""
    first_block = tl.maximum(part * distance - first_start, 0)
    last_block = tl.maximum((part + 1) * distance - after_start, 0)
    is_first_split, is_last_split = first_block > 0, last_block > 0
    last = tl.where(is_last_split, after, after - 1)
    either = (first == last) & (is_first_split | is_last_split)
    here, row = part < num_parts, parts + part * 8
    tl.store(row, first, mask=here)
    tl.store(row + 1, last, mask=here)
    tl.store(row + 2, first_block, mask=here)
    tl.store(row + 3, tl.where(is_last_split, last_block, whole), mask=here)
    tl.store(row + 4, tl.where(is_first_split, part - first_start // distance, 0), mask=here)
    tl.store(row + 5, (is_first_split | either).to(tl.int32), mask=here)
    tl.store(row + 6, (is_last_split | either).to(tl.int32), mask=here)
    tl.store(row + 7, tl.zeros_like(part), mask=here)


@unspecialized
def _share_out(
    lens,
    more_lens,
    parts,
    splits,
    read_lens,
    lens_stride,
    more_stride,
    n,
    num_parts,
    most,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    PARTS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    num_blocks = _total(lens, more_lens, lens_stride, more_stride, n, most, KEYS, REQUESTS)
    close = tl.minimum(tl.maximum(tl.cdiv(num_blocks - n, tl.maximum(num_parts - n, 1)), 1), COST)
    even = tl.cdiv(num_blocks + n * COST, num_parts)
    distance = tl.where(even > COST, even, close)
    overhead = tl.minimum(distance - 1, COST)

    part = tl.arange(0, PARTS)
    first, after = tl.zeros((PARTS,), dtype=tl.int32), tl.zeros((PARTS,), dtype=tl.int32)
    first_start, after_start = first + 2**30, after + 2**30
    whole_end, whole_code = first, after  # of the last request that ends in a part; twice its start, and 1 if empty
    start, piece = 0, 0
    tl.store(splits, 0)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        live = request < n
        blocks = _blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS)
        is_empty = (blocks == 0).to(tl.int32)
        cost = tl.where(live, tl.maximum(blocks, 1) + overhead, 0)
        starts = start + tl.cumsum(cost, axis=0) - cost
        ends = starts + tl.maximum(blocks, 1)
        pieces = tl.where(live, (ends - 1) // distance - starts // distance + 1, 0)
        tl.store(splits + 1 + request, piece + tl.cumsum(pieces, axis=0), mask=live)
        if read_lens is not None:
            more = tl.load(more_lens + request * more_stride, mask=live, other=0).to(tl.int32)
            tl.store(read_lens + request, tl.minimum(more, most), mask=live)
        _, first, first_start = _passed(live, ends, part * distance, first, first_start, starts)
        is_whole, after, after_start = _passed(live, ends, (part + 1) * distance, after, after_start, starts)
        whole_end = tl.maximum(whole_end, tl.max(tl.where(is_whole, ends[None, :], 0), axis=1))
        code = 2 * starts + is_empty
        whole_code = tl.maximum(whole_code, tl.max(tl.where(is_whole, code[None, :], 0), axis=1))
        start += tl.sum(cost, axis=0)
        piece += tl.sum(pieces, axis=0)
    whole = tl.where(whole_code % 2 == 1, 0, whole_end - whole_code // 2)
    _store_parts(parts, part, num_parts, distance, first, first_start, after, after_start, whole)


def share_out(
    lens: Tensor, more_lens: Tensor | None, parts: Tensor, splits: Tensor, read_lens: Tensor | None, most: int
) -> None:
    """`schedule_operators.share_out`."""
    num_parts = parts.shape[0]
    strides = (lens.stride(0), 0 if more_lens is None else more_lens.stride(0))
    constants = (BLOCK_KEYS, OVERHEAD, triton.next_power_of_2(num_parts), _REQUESTS)
    launch = Launch(_share_out, lens.device, (1, 1, 1), _WARPS)
    variant = (lens.dtype, more_lens is None, read_lens is None, constants)
    launch(variant, lens, more_lens, parts, splits, read_lens, *strides, lens.shape[0], num_parts, most, *constants)
