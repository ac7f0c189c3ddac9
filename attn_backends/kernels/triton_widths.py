"""Rows of the requests of a ragged step, in whatever kernel packs them: `spec_metadata.fit_widths`, without a sort.

Every program finds where requests begin by sums over all widths, so that there is no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_wanted(widths, stride, request, count, width):
    """Rows that requests ask for, 1 to `width`; 0 of those that are not real, which begin at `count`."""
    live = request < count
    given = tl.load(widths + request * stride, mask=live, other=0)
    return tl.where(live, tl.minimum(tl.maximum(given, 1), width).to(tl.int32), 0)


@triton.jit
def _rows_through(widths, stride, count, width, depth, BLOCK: tl.constexpr):
    """Rows of all requests down to a depth."""
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        wanted = rows_wanted(widths, stride, start + tl.arange(0, BLOCK), count, width)
        found += tl.minimum(wanted, depth)
    return tl.sum(found, axis=0)


@triton.jit
def cut_rows(widths, stride, count, width, room, BLOCK: tl.constexpr):
    """The depth down to which all rows stay, how many stay of those right below it, and rows of all requests, after a
    cut to `room` rows. count: real requests.
    """
    depth, through = width, _rows_through(widths, stride, count, width, width, BLOCK)
    num_rows = tl.minimum(through, room)
    while through > room:
        depth -= 1
        through = _rows_through(widths, stride, count, width, depth, BLOCK)
    return depth, room - through, num_rows


@triton.jit
def rows_of(widths, stride, count, width, depth, left, request, num_before):
    """Rows that stay of adjacent requests, and num_before of those after them. depth, left: as of `cut_rows`.
    num_before: requests before the first that ask for more than `depth`.
    """
    num_rows = rows_wanted(widths, stride, request, count, width)
    if depth < width:
        is_longer = (num_rows > depth).to(tl.int32)
        place = num_before + tl.cumsum(is_longer, axis=0) - is_longer
        num_rows = tl.minimum(num_rows, depth) + tl.where(place < left, is_longer, 0)
        num_before += tl.sum(is_longer, axis=0)
    return num_rows, num_before


@triton.jit
def row_range(widths, stride, count, width, depth, left, request, BLOCK: tl.constexpr):
    """First and end row of a request. depth, left: as of `cut_rows`."""
    before, longer = tl.zeros((BLOCK,), dtype=tl.int32), tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, tl.minimum(request, count), BLOCK):
        other = start + tl.arange(0, BLOCK)
        wanted = rows_wanted(widths, stride, other, count, width)
        before += tl.where(other < request, tl.minimum(wanted, depth), 0)
        longer += ((other < request) & (wanted > depth)).to(tl.int32)
    num_longer, own = tl.sum(longer, axis=0), rows_wanted(widths, stride, request, count, width)
    begin = tl.sum(before, axis=0) + tl.minimum(left, num_longer)
    return begin, begin + tl.minimum(own, tl.where(num_longer < left, depth + 1, depth))


@triton.jit
def fitted_rows(widths, stride, count, request, width, room, BLOCK: tl.constexpr):
    """First and end row of a request, and the end of all real ones' rows, after a cut to `room` rows. The
    deepest go first, of equally deep ones those of the later requests. count: real requests.
    """
    depth, left, num_rows = cut_rows(widths, stride, count, width, room, BLOCK)
    begin, end = row_range(widths, stride, count, width, depth, left, request, BLOCK)
    return begin, end, num_rows
