"""Rows of the requests of a ragged step, in whatever kernel packs them: `spec_metadata.fit_widths`, without a sort.

Every program finds where requests begin by sums over all widths, so that there is no second launch. Widths that fit, as
they mostly do, are read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wanted(widths, stride, request, count, width):
    """Rows that requests ask for, 1 to `width`; 0 of those that are not real, which begin at `count`."""
    live = request < count
    given = tl.load(widths + request * stride, mask=live, other=0)
    return tl.where(live, tl.minimum(tl.maximum(given, 1), width).to(tl.int32), 0)


@triton.jit
def _rows_through(widths, stride, count, width, depth, BLOCK: tl.constexpr):
    """Rows of all requests down to a depth."""
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        wanted = _wanted(widths, stride, start + tl.arange(0, BLOCK), count, width)
        found += tl.minimum(wanted, depth)
    return tl.sum(found, axis=0)


@triton.jit
def _fitting_depth(widths, stride, count, width, room, BLOCK: tl.constexpr):
    """The depth down to which all rows stay, and how many there are."""
    whole = width
    through = _rows_through(widths, stride, count, width, whole, BLOCK)
    while through > room:
        whole -= 1
        through = _rows_through(widths, stride, count, width, whole, BLOCK)
    return whole, through


@triton.jit
def fitted_rows(widths, stride, count, request, width, room, BLOCK: tl.constexpr):
    """First and end row of a request, and the end of all real ones' rows, after a cut to `room` rows. The
    deepest go first, of equally deep ones those of the later requests. count: real requests.
    """
    whole, through = _fitting_depth(widths, stride, count, width, room, BLOCK)
    before, further = tl.zeros((BLOCK,), dtype=tl.int32), tl.zeros((BLOCK,), dtype=tl.int32)
    own, own_further, all_further = tl.zeros_like(before), tl.zeros_like(before), tl.zeros_like(before)
    for start in range(0, count, BLOCK):
        other = start + tl.arange(0, BLOCK)
        wanted = _wanted(widths, stride, other, count, width)
        kept, is_further = tl.minimum(wanted, whole), (wanted > whole).to(tl.int32)
        before += tl.where(other < request, kept, 0)
        own += tl.where(other == request, kept, 0)
        further += tl.where(other < request, is_further, 0)
        own_further += tl.where(other == request, is_further, 0)
        all_further += is_further
    left, num_before = room - through, tl.sum(further, axis=0)
    begin = tl.sum(before, axis=0) + tl.minimum(left, num_before)
    end = tl.sum(before + own, axis=0) + tl.minimum(left, num_before + tl.sum(own_further, axis=0))
    return begin, end, through + tl.minimum(left, tl.sum(all_further, axis=0))


@triton.jit
def store_fitted(widths, stride, count, width, room, num_given, bs, starts, BLOCK: tl.constexpr):
    """Write [bs + 1] first rows of all requests, and the end, after a cut to `room` rows. Requests from `num_given` on
    have what is left, up to `width` rows each. The rest as of `fitted_rows`.
    """
    whole, through = _fitting_depth(widths, stride, count, width, room, BLOCK)
    begin, num_further = tl.zeros((), dtype=tl.int32), tl.zeros((), dtype=tl.int32)
    for start in range(0, bs + 1, BLOCK):
        request = start + tl.arange(0, BLOCK)
        wanted = _wanted(widths, stride, request, count, width)
        is_further = (wanted > whole).to(tl.int32)
        place = num_further + tl.cumsum(is_further, axis=0) - is_further
        kept = tl.minimum(wanted, whole) + tl.where(place < room - through, is_further, 0)
        first = begin + tl.cumsum(kept, axis=0) - kept
        left_over = tl.maximum(request - num_given, 0) * width
        tl.store(starts + request, tl.minimum(first + left_over, room), mask=request <= bs)
        begin += tl.sum(kept, axis=0)
        num_further += tl.sum(is_further, axis=0)
