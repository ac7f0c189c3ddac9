"""Requests of a step, as planners read them: whether each is real, its committed tokens, its query rows.

Of a bound ragged step every program looks at all widths. One pass finds what it needs where they fit, as they mostly
do; a cut takes more of them (`triton_widths`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.triton_packed import pack, unpack
from attn_backends.kernels.triton_widths import cut_rows, row_range, rows_of, rows_wanted

_BITS = tl.constexpr(21)  # of all rows, and of all requests, of a step


@triton.jit
def number(hidden):
    """A number that was made `opaque` (`triton_launch`)."""
    return (hidden - 3) >> 1


@triton.jit
def _first_row(given_starts, step, request):
    """First query row of requests, and from `bs` on the end. given_starts: of a packed query, else None."""
    place = tl.minimum(request, number(step.bs))
    if given_starts is None:
        return place * number(step.width)
    else:
        return tl.load(given_starts + place * number(step.starts_stride))


@triton.jit
def _is_real(seq_lens, num_real, given_starts, rows, step, bound, request):
    """Whether requests are real, as all of packed rows are that are not bound: padding has lengths and rows of its own.
    num_real: None where the host knows how many, or, if bound, padding tells.
    """
    live = request < (number(step.bs) if bound is None else number(bound.num_requests))
    if given_starts is not None:
        return live
    elif num_real is not None:
        return live & (request < tl.load(num_real))
    elif bound is None:
        return live & (request < number(step.known_real))
    elif rows is not None:
        row = tl.load(rows + request * number(step.rows_stride), mask=live, other=0)
        return live & (row != number(bound.reserved_row))
    else:
        return live & (tl.load(seq_lens + request * number(step.seq_stride), mask=live, other=0) > 0)


@triton.jit
def _committed_tokens(seq_lens, widths, real, step, bound, request):
    """Committed tokens of requests; 0 from `bs` on, and of a bound step where they are not real."""
    live = request < (number(step.bs) if widths is None else number(bound.num_requests))
    given = tl.load(seq_lens + request * number(step.seq_stride), mask=live, other=0)
    if bound is None:
        return given.to(tl.int32)
    else:
        included = number(bound.included)
        if widths is not None:
            included *= tl.load(widths + request * number(bound.widths_stride), mask=live, other=0).to(tl.int64)
        within = tl.maximum(given.to(tl.int64) - included, 0)
        return tl.where(real, tl.minimum(within, number(bound.most)), 0).to(tl.int32)


@triton.jit
def count_real(seq_lens, num_real, rows, step, bound, BLOCK: tl.constexpr):
    """Number of real requests of a bound step."""
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, number(bound.num_requests), BLOCK):
        request = start + tl.arange(0, BLOCK)
        found += _is_real(seq_lens, num_real, None, rows, step, bound, request).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def cut_of(seq_lens, num_real, rows, widths, step, bound, request, BLOCK: tl.constexpr):
    """The cut of a bound ragged step: real requests, then as of `cut_rows`, then the rows before a request where none
    are cut. Zeros of any other step.
    """
    if widths is None:
        nothing = tl.zeros((), dtype=tl.int32)
        return nothing, nothing, nothing, nothing, nothing
    else:
        packed, stride, room = tl.zeros((BLOCK,), dtype=tl.int64), number(bound.widths_stride), number(bound.num_tokens)
        for start in range(0, number(bound.num_requests), BLOCK):
            other = start + tl.arange(0, BLOCK)
            real = _is_real(seq_lens, num_real, None, rows, step, bound, other)
            given = tl.load(widths + other * stride, mask=other < number(bound.num_requests), other=0)
            wanted = tl.where(real, tl.minimum(tl.maximum(given, 1), number(step.width)), 0)
            packed += pack(real, tl.where(other < request, wanted, 0), wanted, _BITS)
        count, before, num_rows = unpack(tl.sum(packed, axis=0), _BITS)
        depth, left = number(step.width), room - num_rows
        if num_rows > room:
            depth, left, num_rows = cut_rows(widths, stride, count, number(step.width), room, BLOCK)
        return count, depth, left, num_rows, before


@triton.jit
def _with_padding(row, request, step, bound):
    """A row of a ragged step, after those of padding that are left to the requests before it."""
    left_over = tl.maximum(request - number(bound.num_requests), 0) * number(step.width)
    return tl.minimum(row + left_over, number(bound.num_tokens))


@triton.jit
def request_at(seq_lens, num_real, given_starts, rows, widths, step, bound, request, BLOCK: tl.constexpr):
    """A request: whether it is real, committed tokens, its first query row and how many it has; from `bs` on the ends.
    Then the cut, as of `cut_of`, whose sums wait for all threads: what a request reads of its own is on its way before.
    given_starts: of a packed query that is not bound, else None.
    """
    real = _is_real(seq_lens, num_real, given_starts, rows, step, bound, request)
    committed = _committed_tokens(seq_lens, widths, real, step, bound, request)
    if widths is None:
        cut = cut_of(seq_lens, num_real, rows, widths, step, bound, request, BLOCK)
        begin, end = _first_row(given_starts, step, request), _first_row(given_starts, step, request + 1)
    else:
        stride, width = number(bound.widths_stride), number(step.width)
        own = rows_wanted(widths, stride, request, tl.where(real, request + 1, 0), width)
        cut = cut_of(seq_lens, num_real, rows, widths, step, bound, request, BLOCK)
        count, depth, left, _, begin = cut
        end = begin + own
        if depth < width:
            begin, end = row_range(widths, stride, count, width, depth, left, request, BLOCK)
        begin, end = _with_padding(begin, request, step, bound), _with_padding(end, request + 1, step, bound)
    return real, committed, begin, end - begin, cut


@triton.jit
def requests_at(seq_lens, num_real, given_starts, rows, widths, cut, step, bound, request, num_longer):
    """Adjacent requests: as `request_at`, but for first rows, and num_longer of the next ones; the first have 0."""
    if widths is None:
        real = _is_real(seq_lens, num_real, given_starts, rows, step, bound, request)
        num_rows = _first_row(given_starts, step, request + 1) - _first_row(given_starts, step, request)
    else:
        count, depth, left, end, _ = cut
        of_widths = (widths, number(bound.widths_stride), count, number(step.width), depth, left)
        real = request < count
        num_rows, num_longer = rows_of(*of_widths, request, num_longer)
        num_rows += _with_padding(end, request + 1, step, bound) - _with_padding(end, request, step, bound)
        num_rows = tl.where(request < number(step.bs), num_rows, 0)
    committed = _committed_tokens(seq_lens, widths, real, step, bound, request)
    return real, committed, num_rows, num_longer


@triton.jit
def visible_keys(committed, real, num_rows, step, request, forward):
    """Keys that the last row of requests sees in a forward, 0 from `bs` on: `spec_metadata.dense_part`."""
    others = tl.where(real, committed + forward * number(step.advance) - number(step.unseen), 0)
    return tl.where(request < number(step.bs), others + num_rows, 0)
