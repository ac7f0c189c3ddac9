"""The plans of dense attention as one Triton launch: page lists, lengths, row starts and write slots of all forwards.

A request is shared by a few programs, a number that follows from sizes alone, so that a graph may hold the launch. Each
takes every n-th block of the request's pages and stops behind what is visible; the last also writes the request's write
slots, the first its lengths. One program more than there are requests writes the ends.

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


class PageSizes(NamedTuple):
    """Strides and sizes of page lists. num_lens: forwards that have lengths. num_columns: of a row."""

    lens_stride: int
    pages_stride: int
    writes_stride: int
    num_lens: int
    num_columns: int


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
def _real_requests(num_real, step):
    """How many there are. num_real: None where the host knows."""
    if num_real is None:
        return number(step.known_real)
    else:
        return tl.load(num_real)


@triton.jit
def visible_keys(seq_lens, num_real, given_starts, step, request, forward):
    """Keys that the last row of requests sees in a forward, 0 from `bs` on: `spec_metadata.dense_part`."""
    live = request < number(step.bs)
    committed = tl.load(seq_lens + request * number(step.seq_stride), mask=live, other=0).to(tl.int32)
    if given_starts is None:
        is_real = request < _real_requests(num_real, step)
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
    """The pages of a row, read from a page table, or of slots if there are `rows`."""
    stride, page_size = number(step.column_stride), number(step.page_size)
    if rows is None:
        return tl.load(row + page * stride, mask=mask, other=0).to(tl.int32)
    else:
        first_slot = tl.load(row + (page * page_size).to(tl.int64) * stride, mask=mask, other=0)
        return (first_slot // page_size).to(tl.int32)


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
def given_slots(out_cache_loc, seq_lens, row, rows, step, request, begin, place, live):
    """Write slots of a request, at their places in out_cache_loc; where it was left out those behind what is committed,
    as `spec_metadata.next_slots` has them. begin: first row of the request. row, rows: as of `page_ids`.
    """
    if out_cache_loc is None:
        committed = tl.load(seq_lens + request * number(step.seq_stride), mask=request < number(step.bs), other=0)
        position = committed.to(tl.int32) + place - begin * number(step.num_steps)
        sizes = (number(step.column_stride), number(step.num_columns), number(step.page_size))
        return slots_at(row, position, live, *sizes, number(step.reserved_page), rows is None)
    else:
        at = out_cache_loc + place.to(tl.int64) * number(step.loc_stride)
        return tl.load(at, mask=live, other=0).to(tl.int64)


@triton.jit
def _write_slots(out_cache_loc, seq_lens, row, rows, step, write_slots, stride, begin, count, BLOCK: tl.constexpr):
    """The write slots of a request's rows in all forwards: out_cache_loc is (row, step), write_slots (forward, row)."""
    request = tl.program_id(0)
    num_slots = count * number(step.num_forwards)
    for start in range(0, num_slots, BLOCK):
        place = start + tl.arange(0, BLOCK)
        forward, into = place // tl.maximum(count, 1), begin + place % tl.maximum(count, 1)
        given, live = into * number(step.num_steps) + forward, place < num_slots
        slots = given_slots(out_cache_loc, seq_lens, row, rows, step, request, begin, given, live)
        tl.store(write_slots + forward * stride + into, slots, mask=live)


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
    """All metadata of a request, or after the last one the ends.

    starts, page_starts: of query rows and of page lists, None if the form has none. pages: a row of them a request.
    """
    request, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    is_request, num_lens = request < number(step.bs), number(sizes.num_lens)
    last = visible_keys(seq_lens, num_real, given_starts, step, request, num_lens - 1)
    live = tl.cdiv(last, number(step.page_size))
    begin = first_row(given_starts, step, request)
    into = pages + request.to(tl.int64) * number(sizes.pages_stride)
    end = tl.minimum(live, number(sizes.num_columns))
    if part == 0:
        if page_starts is not None:
            tl.store(page_starts + request, request * number(sizes.pages_stride))
        if starts is not None:
            tl.store(starts + request, begin)
        for forward in range(0, num_lens):
            keys = visible_keys(seq_lens, num_real, given_starts, step, request, forward)
            tl.store(lens + forward * number(sizes.lens_stride) + request, keys, mask=is_request)
    row = page_row(table, rows, step, request)
    if part == num_parts - 1:
        count, stride = first_row(given_starts, step, request + 1) - begin, number(sizes.writes_stride)
        _write_slots(out_cache_loc, seq_lens, row, rows, step, write_slots, stride, begin, count, BLOCK)
    for start in range(part * BLOCK, end, num_parts * BLOCK):
        page = start + tl.arange(0, BLOCK)
        ids = page_ids(row, rows, step, page, page < tl.minimum(end, number(step.max_pages)))
        tl.store(into + page, ids, mask=page < end)


def plan_pages(
    seq_lens: Tensor,
    num_real: Tensor | None,
    query_starts: Tensor | None,
    out_cache_loc: Tensor | None,
    table: Tensor,
    rows: Tensor | None,
    starts: Tensor | None,
    page_starts: Tensor | None,
    lens: Tensor,
    pages: Tensor,
    write_slots: Tensor,
    *counts: int,
) -> Prepared:
    """The launch; arguments as of the operator (`plan_operators`), the counts from `width` on."""
    bs, num_forwards = seq_lens.shape[0], write_slots.shape[0]
    inputs = (seq_lens, num_real, query_starts, out_cache_loc, table, rows)
    *of_step, max_pages = counts
    step = step_sizes(*inputs, *of_step, num_forwards, max_pages)
    strides = (lens.stride(0), pages.stride(0), write_slots.stride(0))
    sizes = opaque(PageSizes(*strides, lens.shape[0], pages.shape[-1]))
    variant = (*types(*inputs), starts is None, page_starts is None)
    launch = _launch(seq_lens.device, (bs + 1, num_parts(bs + 1, max_pages), 1))
    return Prepared(launch, variant, (*inputs, starts, page_starts, lens, pages, write_slots, step, sizes, _BLOCK))


@cache
def _launch(device: torch.device, grid: tuple[int, int, int]) -> Launch:
    return Launch(_plan_pages, device, grid)


def step_sizes(
    seq_lens: Tensor,
    num_real: Tensor | None,
    query_starts: Tensor | None,
    out_cache_loc: Tensor | None,
    table: Tensor,
    rows: Tensor | None,
    *counts: int,
) -> StepSizes:
    """The sizes of a step as kernels take them. counts: those behind `bs`."""
    given = (query_starts, out_cache_loc, rows)
    starts_stride, loc_stride, rows_stride = (0 if each is None else each.stride(0) for each in given)
    strides = (seq_lens.stride(0), starts_stride, loc_stride, table.stride(0), table.stride(1), rows_stride)
    return opaque(StepSizes(*strides, table.shape[1], seq_lens.shape[0], *counts))


def types(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """What compilation depends on of tensors."""
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def num_parts(num_rows: int, num_columns: int) -> int:
    """Programs that share a row of so many columns, of which there are `num_rows`."""
    return max(1, min(triton.cdiv(num_columns, _BLOCK), _MOST_PROGRAMS // num_rows))
