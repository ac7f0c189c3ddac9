"""FlashMLA's share-out as one Triton program: `schedule_operators.share_out`, or a part of a planner's launch.

Where requests lie on the axis of costs is a sum; where a part begins and ends on it is a search, of all parts at once.
FlashMLA's own scheduler goes over requests and parts on one thread.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.schedule_operators import BLOCK_KEYS, OVERHEAD
from attn_backends.kernels.triton_launch import Launch, unspecialized

_REQUESTS = 256  # of a block
_WARPS = 4


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
def _sizes(
    lens, more_lens, lens_stride, more_stride, n, most, KEYS: tl.constexpr, COST: tl.constexpr, REQUESTS: tl.constexpr
):
    """The cost of all requests, and the blocks of the longest."""
    total, longest = tl.zeros((REQUESTS,), dtype=tl.int32), tl.zeros((REQUESTS,), dtype=tl.int32)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        blocks = tl.maximum(_blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS), 1)
        total += tl.where(request < n, blocks + COST, 0)
        longest = tl.maximum(longest, blocks)
    return tl.sum(total, axis=0), tl.max(longest, axis=0)


@triton.jit
def _axis(total, longest, n, num_parts, COST: tl.constexpr):
    """A part's share of the axis, whether requests lie on it evenly, and the distance of two that do."""
    share = tl.cdiv(total, num_parts)
    if n <= num_parts:
        pieces = num_parts // n
        even_share = tl.maximum(tl.cdiv(longest, pieces), share)
        stride, is_even = pieces * even_share, even_share <= share + COST
    else:
        each = tl.cdiv(n, num_parts)
        stride, even_share, is_even = longest, each * longest, each * (longest + COST) <= share + 2 * COST
    return tl.where(is_even, even_share, share), is_even, stride


@triton.jit
def _search(marks, n, bound, steps):
    """How many of n rising marks lie at or before a bound."""
    low, high = bound * 0, bound * 0 + n
    for _ in range(steps):
        middle = (low + high) // 2
        is_before = (low < high) & (tl.load(marks + 2 * middle, mask=low < high, other=0) <= bound)
        high = tl.where(is_before, high, middle)
        low = tl.where(is_before, middle + 1, low)
    return low


@triton.jit
def _store_part(parts, part, begin, end, used, n, begin_block, end_block, piece, is_begin_split, is_end_split):
    """Write the words of all parts; an unused one begins after the last request."""
    row = parts + part * 8
    tl.store(row, tl.where(used, begin, n), mask=part >= 0)
    tl.store(row + 1, tl.where(used, end, n - 1), mask=part >= 0)
    tl.store(row + 2, tl.where(used, begin_block, 0), mask=part >= 0)
    tl.store(row + 3, tl.where(used, end_block, 0), mask=part >= 0)
    tl.store(row + 4, tl.where(used, piece, 0), mask=part >= 0)
    tl.store(row + 5, tl.where(used, is_begin_split, 0), mask=part >= 0)
    tl.store(row + 6, tl.where(used, is_end_split, 0), mask=part >= 0)
    tl.store(row + 7, part * 0, mask=part >= 0)


@triton.jit
def share_blocks(
    lens,
    more_lens,
    parts,
    splits,
    marks,
    read_lens,
    lens_stride,
    more_stride,
    n,
    num_parts,
    most,
    steps,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    PARTS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """A whole share-out by one program. steps: of a search among n."""
    total, longest = _sizes(lens, more_lens, lens_stride, more_stride, n, most, KEYS, COST, REQUESTS)
    share, is_even, stride = _axis(total, longest, n, num_parts, COST)
    cost, piece = 0, 0
    tl.store(splits, 0)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        live = request < n
        blocks = tl.maximum(_blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS), 1)
        own = tl.where(live, blocks + COST, 0)
        starts = tl.where(is_even, request * stride, cost + tl.cumsum(own, axis=0) - own)
        ends = starts + blocks
        pieces = tl.where(live, (ends - 1) // share - starts // share + 1, 0)
        tl.store(marks + 2 * request, starts, mask=live)
        tl.store(marks + 2 * request + 1, ends, mask=live)
        tl.store(splits + 1 + request, piece + tl.cumsum(pieces, axis=0), mask=live)
        cost, piece = cost + tl.sum(own, axis=0), piece + tl.sum(pieces, axis=0)
        if read_lens is not None:
            more = tl.load(more_lens + request * more_stride, mask=live, other=0).to(tl.int32)
            tl.store(read_lens + request, tl.minimum(more, most), mask=live)
    tl.debug_barrier()  # the marks are there for all threads
    part = tl.arange(0, PARTS)
    first_cost = part * share
    begin, end = _search(marks + 1, n, first_cost, steps), _search(marks, n, first_cost + share - 1, steps) - 1
    used, begin = begin <= end, tl.minimum(begin, n - 1)
    start, stop = tl.load(marks + 2 * begin), tl.load(marks + 2 * begin + 1)
    end_start = tl.load(marks + 2 * end)
    end_stop = tl.load(marks + 2 * end + 1)
    end_block = _blocks(lens, more_lens, lens_stride, more_stride, n, most, end, KEYS)
    _store_part(
        parts,
        tl.where(part < num_parts, part, -1),
        begin,
        end,
        used,
        n,
        tl.maximum(first_cost - start, 0),
        tl.minimum(first_cost + share - end_start, end_block),
        part - start // share,
        ((stop - 1) // share > start // share).to(tl.int32),
        ((end_stop - 1) // share > end_start // share).to(tl.int32),
    )


@unspecialized
def _share_out(
    lens,
    more_lens,
    parts,
    splits,
    marks,
    read_lens,
    lens_stride,
    more_stride,
    n,
    num_parts,
    most,
    steps,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    given = (lens, more_lens, parts, splits, marks, read_lens, lens_stride, more_stride)
    share_blocks(*given, n, num_parts, most, steps, KEYS, COST, PARTS, REQUESTS)


@cache
def constants(num_parts: int) -> tuple[int, int, int, int]:
    """PARTS, KEYS, COST and REQUESTS, which kernels compile for."""
    return triton.next_power_of_2(num_parts), BLOCK_KEYS, OVERHEAD, _REQUESTS


def share_out(
    lens: Tensor,
    more_lens: Tensor | None,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    read_lens: Tensor | None,
    most: int,
) -> None:
    """`schedule_operators.share_out`."""
    num_parts = parts.shape[0]
    strides = (lens.stride(0), 0 if more_lens is None else more_lens.stride(0))
    numbers = (lens.shape[0], num_parts, most, lens.shape[0].bit_length())
    variant = (lens.dtype, more_lens is None, read_lens is None, constants(num_parts))
    outputs = (parts, splits, marks, read_lens)
    _launch(lens.device)(variant, lens, more_lens, *outputs, *strides, *numbers, *constants(num_parts))


@cache
def _launch(device: torch.device) -> Launch:
    return Launch(_share_out, device, (1, 1, 1), _WARPS)
