"""Reads of a step by planners: from its own tensors, or from the buffers of an engine that it is bound to.

Of a bound step every value is brought within the capacity and the pool as it is read, and entries after the real
requests are padding; `spec_metadata.bound_inputs` has the definition. The launch that plans it also writes the captured
step (`store_step`): every program looks up itself what it needs, so that none waits for another. Of a ragged step that
is where the rows of all requests begin (`store_requests`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.plan_operators import BoundSizes, StepInputs
from attn_backends.kernels.triton_launch import opaque
from attn_backends.kernels.triton_widths import store_fitted


class StepSizes(NamedTuple):
    """Strides and sizes of a step. num_columns: of its table. first, advance: keys that the last row of a uniform step
    sees beside the committed ones in forward 0, and more in each further. known_real: real requests where the host
    knows how many.
    """

    seq_stride: int
    starts_stride: int
    loc_stride: int
    table_stride: int
    column_stride: int
    rows_stride: int
    num_columns: int
    bs: int
    width: int
    num_steps: int
    first: int
    advance: int
    page_size: int
    reserved_page: int
    known_real: int
    num_forwards: int
    max_pages: int


class CapturedStep(NamedTuple):
    """Tensors of a captured step. paging: its rows, or its pages. tree_mask: of bytes. starts: of a ragged one's rows.
    What it has not is any other tensor.
    """

    seq_lens: Tensor
    num_real: Tensor
    out_cache_loc: Tensor
    paging: Tensor
    tree_mask: Tensor
    starts: Tensor


@triton.jit
def number(hidden):
    """A number that was made `opaque`."""
    return (hidden - 3) >> 1


@triton.jit
def first_row(given_starts, step, request):
    """First query row of requests, and from `bs` on the end. given_starts: of a packed query, else None."""
    place = tl.minimum(request, number(step.bs))
    if given_starts is None:
        return place * number(step.width)
    else:
        return tl.load(given_starts + place * number(step.starts_stride))


@triton.jit
def is_real(seq_lens, num_real, rows, step, bound, request):
    """Whether requests are real. num_real: None where the host knows how many, or, if bound, padding tells."""
    live = request < number(step.bs)
    if num_real is not None:
        return live & (request < tl.load(num_real))
    elif bound is None:
        return live & (request < number(step.known_real))
    elif rows is not None:
        row = tl.load(rows + request * number(step.rows_stride), mask=live, other=0)
        return live & (row != number(bound.reserved_row))
    else:
        return live & (tl.load(seq_lens + request * number(step.seq_stride), mask=live, other=0) > 0)


@triton.jit
def committed_tokens(seq_lens, real, step, bound, request):
    """Committed tokens of requests; 0 from `bs` on, and of a bound step where they are not real."""
    given = tl.load(seq_lens + request * number(step.seq_stride), mask=request < number(step.bs), other=0)
    if bound is None:
        return given.to(tl.int32)
    else:
        within = tl.maximum(given.to(tl.int64) - number(bound.included), 0)
        return tl.where(real, tl.minimum(within, number(bound.most)), 0).to(tl.int32)


@triton.jit
def visible_keys(committed, real, given_starts, step, request, forward):
    """Keys that the last row of requests sees in a forward, 0 from `bs` on: `spec_metadata.dense_part`."""
    if given_starts is None:
        added = number(step.first) + forward * number(step.advance)
        keys = tl.where(real, committed + added, number(step.width))
    else:
        keys = committed + first_row(given_starts, step, request + 1) - first_row(given_starts, step, request)
    return tl.where(request < number(step.bs), keys, 0)


@triton.jit
def row_number(rows, real, step, bound, request):
    """The row of a request in a table of slots."""
    row = tl.load(rows + request * number(step.rows_stride), mask=request < number(step.bs), other=0).to(tl.int64)
    if bound is None:
        return row
    else:
        inside = real & (row >= 0) & (row < number(bound.num_rows))
        return tl.where(inside, row, number(bound.reserved_row))


@triton.jit
def page_row(table, rows, real, step, bound, request):
    """Address of the row of a request's table. rows: of a table of slots, None of one of pages."""
    if rows is None:
        row = tl.where(request < number(step.bs), request, 0).to(tl.int64)
    else:
        row = row_number(rows, real, step, bound, request)
    return table + row * number(step.table_stride)


@triton.jit
def page_ids(row, rows, real, step, bound, page, mask):
    """The pages of a row, read from a page table, or of slots if there are `rows`. Of a bound page table those of no
    real request, and those outside the pool, are the reserved one.
    """
    stride, page_size = number(step.column_stride), number(step.page_size)
    if rows is not None:
        first_slot = tl.load(row + (page * page_size).to(tl.int64) * stride, mask=mask, other=0)
        return (first_slot // page_size).to(tl.int32)
    elif bound is None:
        return tl.load(row + page * stride, mask=mask, other=0).to(tl.int32)
    else:
        live = mask & (page < tl.where(real, number(step.num_columns), 0))
        ids = tl.load(row + page.to(tl.int64) * stride, mask=live, other=-1)
        inside = (ids >= 0) & (ids < number(bound.num_pages))
        return tl.where(inside, ids.to(tl.int32), number(step.reserved_page))


@triton.jit
def slots_at(row, position, live, column_stride, num_columns, page_size, reserved_page, OF_PAGES: tl.constexpr):
    """The slots of positions in a row of a table, of pages or of slots; outside of it one of the reserved page."""
    if OF_PAGES:
        column = position // page_size
        inside = live & (position >= 0) & (column < num_columns)
        page = tl.load(row + column.to(tl.int64) * column_stride, mask=inside, other=0).to(tl.int64)
        found = page * page_size + position % page_size
    else:
        inside = live & (position >= 0) & (position < num_columns)
        found = tl.load(row + position.to(tl.int64) * column_stride, mask=inside, other=0).to(tl.int64)
    return tl.where(inside, found, reserved_page.to(tl.int64) * page_size)


@triton.jit
def given_slots(out_cache_loc, committed, row, rows, real, step, bound, begin, place, live):
    """Write slots of a request, at their places in out_cache_loc; where it was left out those after what is committed,
    as `spec_metadata.next_slots` has them. Those of padding of a bound step, or outside the pool, walk round the
    reserved page. begin: first row of the request. row, rows: as of `page_ids`.
    """
    page_size, reserved_page = number(step.page_size), number(step.reserved_page)
    if out_cache_loc is None:
        position = committed + place - begin * number(step.num_steps)
        if (bound is not None) & (rows is None):
            page = page_ids(row, rows, real, step, bound, position // page_size, live)
            slots = page.to(tl.int64) * page_size + position % page_size
        else:
            sizes = (number(step.column_stride), number(step.num_columns), page_size)
            slots = slots_at(row, position, live, *sizes, reserved_page, rows is None)
    else:
        given, is_given = place, live
        if bound is not None:  # an engine has slots for the longest query of each request
            given += (tl.program_id(0) * number(step.width) - begin) * number(step.num_steps)
            is_given = live & (given < tl.where(real, given + 1, 0))
        at = out_cache_loc + given.to(tl.int64) * number(step.loc_stride)
        slots = tl.load(at, mask=is_given, other=0).to(tl.int64)
    if bound is None:
        return slots
    else:
        inside = real & (slots >= 0) & (slots < number(bound.num_pages).to(tl.int64) * page_size)
        return tl.where(inside, slots, reserved_page.to(tl.int64) * page_size + place % page_size)


@triton.jit
def copy_mask(given, stride, row_stride, column_stride, into, real, width, BLOCK: tl.constexpr):
    """Copy the tree mask of a request; nodes of a padded one see themselves. given, into: of all requests."""
    given += tl.program_id(0).to(tl.int64) * stride
    into += tl.program_id(0) * width * width
    for start in range(0, width * width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        row, column = place // width, place % width
        is_given = place < tl.where(real, width * width, 0)
        sees = tl.load(given + row * row_stride + column * column_stride, mask=is_given, other=0) != 0
        seen = tl.where(is_given, sees, row == column)
        tl.store(into + place, seen.to(tl.uint8), mask=place < width * width)


@triton.jit
def _count_real(seq_lens, num_real, rows, step, bound, BLOCK: tl.constexpr):
    """How many requests are real."""
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, number(step.bs), BLOCK):
        request = start + tl.arange(0, BLOCK)
        found += is_real(seq_lens, num_real, rows, step, bound, request).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _count_given(seq_lens, num_real, rows, bound, BLOCK: tl.constexpr):
    """How many requests of a ragged step's engine are real."""
    n = number(bound.num_requests)
    if num_real is not None:
        return tl.minimum(tl.maximum(tl.load(num_real).to(tl.int32), 0), n)
    else:
        found = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, n, BLOCK):
            request = start + tl.arange(0, BLOCK)
            if rows is not None:
                row = tl.load(rows + request * number(bound.rows_stride), mask=request < n, other=0)
                found += ((request < n) & (row != number(bound.reserved_row))).to(tl.int32)
            else:
                lens = tl.load(seq_lens + request * number(bound.seq_stride), mask=request < n, other=0)
                found += (lens > 0).to(tl.int32)
        return tl.sum(found, axis=0)


@triton.jit
def store_requests(seq_lens, num_real, rows, widths, captured, step, bound, BLOCK: tl.constexpr):
    """Write what a ragged step has of all requests: committed tokens, rows in a table of slots, first query rows. Each
    program writes the same, and may read it from then on.
    """
    count, n = _count_given(seq_lens, num_real, rows, bound, BLOCK), number(step.bs)
    stride = number(bound.widths_stride)
    sizes = (number(step.width), number(bound.num_tokens), number(bound.num_requests), n)
    store_fitted(widths, stride, count, *sizes, captured.starts, BLOCK)
    tl.store(captured.num_real, count)
    for start in range(0, n, BLOCK):
        request = start + tl.arange(0, BLOCK)
        real, live = request < count, request < n
        given = tl.load(seq_lens + request * number(bound.seq_stride), mask=real, other=0).to(tl.int64)
        asked = tl.load(widths + request * stride, mask=real, other=0).to(tl.int64)
        within = tl.maximum(given - asked * number(bound.widths_included), 0)
        tl.store(captured.seq_lens + request, tl.minimum(within, number(bound.most)).to(tl.int32), mask=live)
        if rows is not None:
            row = tl.load(rows + request * number(bound.rows_stride), mask=real, other=-1).to(tl.int64)
            inside = (row >= 0) & (row < number(bound.num_rows))
            tl.store(captured.paging + request, tl.where(inside, row, number(bound.reserved_row)), mask=live)
    tl.debug_barrier()  # it is there for all threads


@triton.jit
def store_step(
    captured,
    seq_lens,
    num_real,
    out_cache_loc,
    row,
    rows,
    tree_mask,
    committed,
    real,
    step,
    bound,
    request,
    begin,
    count,
    part,
    num_parts,
    BLOCK: tl.constexpr,
):
    """Write a request's part of a bound step. row: as of `page_ids`. begin, count: of its query rows. part, num_parts:
    programs that share the request; after the last one is how many are real.
    """
    is_request, num_writes = request < number(step.bs), count * number(step.num_steps)
    if part == 0:
        if is_request:
            tl.store(captured.seq_lens + request, committed)
            if rows is not None:
                tl.store(captured.paging + request, row_number(rows, real, step, bound, request))
            if tree_mask is not None:
                strides = (number(bound.mask_stride), number(bound.mask_row_stride), number(bound.mask_column_stride))
                copy_mask(tree_mask, *strides, captured.tree_mask, real, number(step.width), BLOCK)
        else:
            tl.store(captured.num_real, _count_real(seq_lens, num_real, rows, step, bound, BLOCK))
    for start in range(part * BLOCK, tl.where(is_request, num_writes, 0), num_parts * BLOCK):
        place = start + tl.arange(0, BLOCK)
        write, live = begin * number(step.num_steps) + place, place < num_writes
        slots = given_slots(out_cache_loc, committed, row, rows, real, step, bound, begin, write, live)
        tl.store(captured.out_cache_loc + write, slots, mask=live)
    if rows is None:
        end = tl.minimum(tl.cdiv(committed + num_writes, number(step.page_size)), number(bound.num_columns))
        into = captured.paging + request.to(tl.int64) * number(bound.paging_stride)
        for start in range(part * BLOCK, tl.where(is_request, end, 0), num_parts * BLOCK):
            page = start + tl.arange(0, BLOCK)
            live = page < end
            tl.store(into + page, page_ids(row, rows, real, step, bound, page, live), mask=live)


def step_sizes(inputs: StepInputs, *counts: int) -> StepSizes:
    """The sizes of a step as kernels take them, of a bound ragged one once it is written. counts: those after `bs`."""
    seq_lens, starts, rows, table = inputs.seq_lens, inputs.query_starts, inputs.rows, inputs.table
    if inputs.widths is not None:
        captured = CapturedStep(*inputs.captured)
        seq_lens, starts, rows = captured.seq_lens, captured.starts, rows if rows is None else captured.paging
    starts_stride, loc_stride, rows_stride = map(_stride, (starts, inputs.out_cache_loc, rows))
    strides = (seq_lens.stride(0), starts_stride, loc_stride, table.stride(0), table.stride(1), rows_stride)
    return opaque(StepSizes(*strides, table.shape[1], seq_lens.shape[0], *counts))


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def arguments_of(inputs: StepInputs) -> tuple[tuple[Any, ...], tuple[Hashable, ...]]:
    """The first arguments of a planner, and what compilation depends on of them."""
    tensors, captured, bound = inputs[:8], None, None
    if inputs.captured:
        captured, bound = CapturedStep(*inputs.captured), opaque(BoundSizes(*inputs.bound))
    types = [None if each is None else each.dtype for each in tensors]
    return (*tensors, captured, bound), (*types, *map(is_aligned, inputs.captured))


def is_aligned(tensor: Tensor) -> bool:
    """The properties of a pointer in a tuple, besides its type, for which Triton compiles."""
    return tensor.data_ptr() % 16 == 0
