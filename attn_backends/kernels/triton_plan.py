"""The plans of dense attention as one Triton launch: page lists, lengths, row starts and write slots of all forwards.

A request is shared by a few programs, a number that follows from sizes alone, so that a graph may hold the launch. Each
takes every n-th block of the request's pages and stops behind what is visible and what a kernel may read past it; the
last also writes the request's write slots, the first its lengths. One program more than there are requests writes the
ends. Compact lists begin where those of the requests before end: every program adds up their lengths itself, which are
few, so that there is no second launch.

Sizes and strides are not specialized on: no batch compiles anything anew, and `triton_launch` can skip Triton's checks.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import Launch, Prepared, opaque, unspecialized

_BLOCK = 1024
_MOST_PROGRAMS = 2048


class StepSizes(NamedTuple):
    """Strides and sizes of a step. first, advance: keys that the last row of a uniform step sees beside the committed
    ones in forward 0, and more in each further.
    """

    seq_stride: int
    starts_stride: int
    loc_stride: int
    table_stride: int
    column_stride: int
    rows_stride: int
    bs: int
    width: int
    num_steps: int
    num_forwards: int
    first: int
    advance: int
    page_size: int
    max_pages: int


class PageSizes(NamedTuple):
    """Strides and sizes of page lists. num_lens: forwards that have lengths. num_columns: of a row; of a compact list,
    its entries.
    """

    lens_stride: int
    pages_stride: int
    writes_stride: int
    num_lens: int
    num_columns: int
    reserved_page: int
    over_read: int


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
def visible_keys(seq_lens, num_real, given_starts, step, request, forward):
    """Keys that the last row of requests sees in a forward, 0 from `bs` on: `spec_metadata.dense_part`."""
    live = request < number(step.bs)
    committed = tl.load(seq_lens + request * number(step.seq_stride), mask=live, other=0).to(tl.int32)
    if given_starts is None:
        is_real = request < tl.load(num_real)
        added = number(step.first) + forward * number(step.advance)
        keys = tl.where(is_real, committed + added, number(step.width))
    else:
        keys = committed + first_row(given_starts, step, request + 1) - first_row(given_starts, step, request)
    return tl.where(live, keys, 0)


@triton.jit
def page_row(table, rows, step, request):
    """Where the row of a request's table begins. rows: of a table of slots, None of one of pages."""
    live = request < number(step.bs)
    if rows is None:
        row = tl.where(live, request, 0)
    else:
        row = tl.load(rows + request * number(step.rows_stride), mask=live, other=0)
    return table + row.to(tl.int64) * number(step.table_stride)


@triton.jit
def page_ids(row, rows, step, page, mask):
    """The pages of a row, read from a table of pages, or of slots if there are `rows`."""
    stride, page_size = number(step.column_stride), number(step.page_size)
    if rows is None:
        return tl.load(row + page * stride, mask=mask, other=0).to(tl.int32)
    else:
        first_slot = tl.load(row + (page * page_size).to(tl.int64) * stride, mask=mask, other=0)
        return (first_slot // page_size).to(tl.int32)


@triton.jit
def _copy_slots(out_cache_loc, write_slots, writes_stride, begin, count, step, BLOCK: tl.constexpr):
    """The write slots of a request's rows in all forwards: out_cache_loc is (row, step), write_slots (forward, row)."""
    num_slots = count * number(step.num_forwards)
    for start in range(0, num_slots, BLOCK):
        place = start + tl.arange(0, BLOCK)
        forward, row = place // tl.maximum(count, 1), begin + place % tl.maximum(count, 1)
        given = (row * number(step.num_steps) + forward).to(tl.int64) * number(step.loc_stride)
        slots = tl.load(out_cache_loc + given, mask=place < num_slots, other=0).to(tl.int64)
        tl.store(write_slots + forward * writes_stride + row, slots, mask=place < num_slots)


@triton.jit
def _pages_before(seq_lens, num_real, given_starts, step, request, forward, BLOCK: tl.constexpr):
    """Pages that the requests before one see."""
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, request, BLOCK):
        other = start + tl.arange(0, BLOCK)
        keys = visible_keys(seq_lens, num_real, given_starts, step, other, forward)
        before += tl.where(other < request, tl.cdiv(keys, number(step.page_size)), 0)
    return tl.sum(before, axis=0)


@unspecialized
def _plan_pages(
    seq_lens,
    num_real,
    given_starts,
    out_cache_loc,
    table,
    rows,
    starts,
    page_starts,
    lens,
    pages,
    write_slots,
    step,
    sizes,
    BLOCK: tl.constexpr,
):
    """All metadata of a request, or behind the last one the ends.

    starts, page_starts: of query rows and of compact page lists, None if the form has none. pages: a table, or the
    compact list where there are page_starts.
    """
    request, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    is_request, num_lens, over_read = request < number(step.bs), number(sizes.num_lens), number(sizes.over_read)
    last = visible_keys(seq_lens, num_real, given_starts, step, request, num_lens - 1)
    live = tl.cdiv(last, number(step.page_size))
    begin = first_row(given_starts, step, request)
    if page_starts is None:
        into = pages + request.to(tl.int64) * number(sizes.pages_stride)
        end = tl.minimum(tl.where(is_request, live + over_read, 0), number(sizes.num_columns))
    else:
        first_entry = _pages_before(seq_lens, num_real, given_starts, step, request, num_lens - 1, BLOCK)
        into = pages + first_entry
        end = tl.minimum(tl.where(is_request, live, over_read), number(sizes.num_columns) - first_entry)
        if part == 0:
            tl.store(page_starts + request, first_entry)
    if part == 0:
        if starts is not None:
            tl.store(starts + request, begin)
        for forward in range(0, num_lens):
            keys = visible_keys(seq_lens, num_real, given_starts, step, request, forward)
            tl.store(lens + forward * number(sizes.lens_stride) + request, keys, mask=is_request)
    if part == num_parts - 1:
        count = first_row(given_starts, step, request + 1) - begin
        _copy_slots(out_cache_loc, write_slots, number(sizes.writes_stride), begin, count, step, BLOCK)
    row = page_row(table, rows, step, request)
    for start in range(part * BLOCK, end, num_parts * BLOCK):
        page = start + tl.arange(0, BLOCK)
        ids = page_ids(row, rows, step, page, page < tl.minimum(live, number(step.max_pages)))
        tl.store(into + page, tl.where(page < live, ids, number(sizes.reserved_page)), mask=page < end)


def plan_pages(
    seq_lens: Tensor,
    num_real: Tensor,
    query_starts: Tensor | None,
    out_cache_loc: Tensor,
    table: Tensor,
    rows: Tensor | None,
    starts: Tensor | None,
    page_starts: Tensor | None,
    lens: Tensor,
    pages: Tensor,
    write_slots: Tensor,
    width: int,
    num_steps: int,
    first: int,
    advance: int,
    page_size: int,
    max_pages: int,
    reserved_page: int,
    over_read: int,
) -> Prepared:
    """The launch; arguments as of the operator (`plan_operators`)."""
    bs, num_forwards = seq_lens.shape[0], write_slots.shape[0]
    inputs = (seq_lens, num_real, query_starts, out_cache_loc, table, rows)
    step = step_sizes(*inputs, width, num_steps, num_forwards, first, advance, page_size, max_pages)
    strides = (lens.stride(0), pages.stride(0), write_slots.stride(0))
    sizes = opaque(PageSizes(*strides, lens.shape[0], pages.shape[-1], reserved_page, over_read))
    variant = (*types(*inputs), starts is None, page_starts is None)
    launch = _launch(seq_lens.device, (bs + 1, num_parts(bs + 1, max_pages + over_read), 1))
    return Prepared(launch, variant, (*inputs, starts, page_starts, lens, pages, write_slots, step, sizes, _BLOCK))


@cache
def _launch(device: torch.device, grid: tuple[int, int, int]) -> Launch:
    return Launch(_plan_pages, device, grid)


def step_sizes(
    seq_lens: Tensor,
    num_real: Tensor,
    query_starts: Tensor | None,
    out_cache_loc: Tensor,
    table: Tensor,
    rows: Tensor | None,
    *counts: int,
) -> StepSizes:
    """The sizes of a step as kernels take them. counts: those behind `bs`."""
    starts_stride, rows_stride = (0 if each is None else each.stride(0) for each in (query_starts, rows))
    strides = (seq_lens.stride(0), starts_stride, out_cache_loc.stride(0), table.stride(0), table.stride(1))
    return opaque(StepSizes(*strides, rows_stride, seq_lens.shape[0], *counts))


def types(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """What compilation depends on of tensors."""
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def num_parts(num_rows: int, num_columns: int) -> int:
    """Programs that share a row of so many columns, of which there are `num_rows`."""
    return max(1, min(triton.cdiv(num_columns, _BLOCK), _MOST_PROGRAMS // num_rows))
