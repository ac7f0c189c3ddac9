"""Reads of a step by planners: from its own tensors, or from the buffers of an engine that it is bound to.

Of a bound step every value is brought within the capacity and the pool as it is read, and entries after the real
requests are padding, as `spec_metadata.bound_inputs` defines. The launch that plans it also writes the captured step
(`store_step`). Every program looks up itself what it needs, of a ragged step the cut by all widths: none waits.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.plan_operators import BoundSizes, StepInputs
from attn_backends.kernels.triton_launch import opaque
from attn_backends.kernels.triton_requests import count_real, number


class StepSizes(NamedTuple):
    """Strides and sizes of a step. num_columns: of its table. unseen: rows of a real request whose keys its last row
    does not see in forward 0, such as all of a tree's. advance: keys that it sees more in each further. known_real:
    real requests where the host knows how many.
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
    unseen: int
    advance: int
    page_size: int
    reserved_page: int
    known_real: int
    num_forwards: int
    max_pages: int


class CapturedStep(NamedTuple):
    """Tensors of a captured step. paging: its rows, or its pages. tree_mask: of bytes. starts: of a ragged step."""

    seq_lens: Tensor
    num_real: Tensor
    out_cache_loc: Tensor
    paging: Tensor
    tree_mask: Tensor
    starts: Tensor


@triton.jit
def row_number(rows, real, step, bound, request):
    """The row of a request in a table of slots."""
    at = rows + request * number(step.rows_stride)
    if bound is None:
        return tl.load(at, mask=request < number(step.bs), other=0).to(tl.int64)
    else:
        row = tl.load(at, mask=request < tl.where(real, number(step.bs), 0), other=0).to(tl.int64)
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
def store_step(
    captured,
    seq_lens,
    num_real,
    out_cache_loc,
    row,
    rows,
    tree_mask,
    widths,
    cut,
    committed,
    real,
    begin,
    num_rows,
    step,
    bound,
    request,
    part,
    num_parts,
    BLOCK: tl.constexpr,
):
    """Write a request's part of a bound step. row: as of `page_ids`. committed to num_rows: as of `request_at`. part,
    num_parts: programs that share the request; after the last one is how many are real.
    """
    is_request, num_writes = request < number(step.bs), num_rows * number(step.num_steps)
    if part == 0:
        if widths is not None:
            tl.store(captured.starts + request, begin)
        if is_request:
            tl.store(captured.seq_lens + request, committed)
            if rows is not None:
                tl.store(captured.paging + request, row_number(rows, real, step, bound, request))
            if tree_mask is not None:
                strides = (number(bound.mask_stride), number(bound.mask_row_stride), number(bound.mask_column_stride))
                copy_mask(tree_mask, *strides, captured.tree_mask, real, number(step.width), BLOCK)
        elif widths is None:
            tl.store(captured.num_real, count_real(seq_lens, num_real, rows, step, bound, BLOCK))
        else:
            tl.store(captured.num_real, cut[0])
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
    """The sizes of a step as kernels take them. counts: those after `bs`."""
    given, table = (inputs.query_starts, inputs.out_cache_loc, inputs.rows), inputs.table
    starts_stride, loc_stride, rows_stride = [0 if each is None else each.stride(0) for each in given]
    strides = (inputs.seq_lens.stride(0), starts_stride, loc_stride, table.stride(0), table.stride(1), rows_stride)
    return opaque(StepSizes(*strides, table.shape[1], inputs.bs, *counts))


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
