"""The plans of dense attention as one Triton launch: page lists, lengths, row starts and write slots of all forwards.

A request is shared by a few programs, a number that follows from sizes alone, so that a graph may hold the launch. Each
takes every n-th block of the request's pages and stops after what is visible; the last also writes the request's write
slots, the first its lengths. One program more than there are requests writes the ends. If FlashMLA's share-outs are
asked for, one program more for each forward writes them, by lengths that it finds itself, so that none waits for
another. A step that is bound to an engine's buffers is read from those and written by the same launch (`triton_step`).

Sizes and strides are not specialized on: no batch compiles anything anew, and `triton_launch` can skip Triton's checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.plan_operators import StepInputs
from attn_backends.kernels.triton_launch import Launch, Prepared, opaque, unspecialized
from attn_backends.kernels.triton_requests import cut_of, number, request_at, requests_at, visible_keys
from attn_backends.kernels.triton_share_out import constants, share_blocks
from attn_backends.kernels.triton_step import (
    StepSizes,
    arguments_of,
    given_slots,
    page_ids,
    page_row,
    step_sizes,
    store_step,
)

BLOCK_PAGES = 1024
_MOST_PROGRAMS = 2048


class PageSizes(NamedTuple):
    """Strides and sizes of page lists. num_lens: forwards that have lengths. num_columns: of a row. Of share-outs, one
    a forward, the strides between forwards, num_parts, and search_steps among requests.
    """

    lens_stride: int
    pages_stride: int
    writes_stride: int
    num_lens: int
    num_columns: int
    parts_stride: int
    splits_stride: int
    marks_stride: int
    num_parts: int
    search_steps: int


@triton.jit
def _write_slots(
    out_cache_loc, committed, row, rows, real, step, bound, write_slots, stride, begin, count, BLOCK: tl.constexpr
):
    """The write slots of a request's rows in all forwards: out_cache_loc is (row, step), write_slots (forward, row)."""
    num_slots = count * number(step.num_forwards)
    for start in range(0, num_slots, BLOCK):
        place = start + tl.arange(0, BLOCK)
        forward, into = place // tl.maximum(count, 1), begin + place % tl.maximum(count, 1)
        given, live = into * number(step.num_steps) + forward, place < num_slots
        slots = given_slots(out_cache_loc, committed, row, rows, real, step, bound, begin, given, live)
        tl.store(write_slots + forward * stride + into, slots, mask=live)


@triton.jit
def _share_forward(
    seq_lens,
    num_real,
    given_starts,
    rows,
    widths,
    bound,
    lens,
    parts,
    splits,
    marks,
    step,
    sizes,
    forward,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """The share-out of a forward, by lengths that its one program writes, as those of its requests do."""
    n, lens, longer = number(step.bs), lens + forward * number(sizes.lens_stride), tl.zeros((), dtype=tl.int32)
    cut = cut_of(seq_lens, num_real, rows, widths, step, bound, 0, REQUESTS)
    source = (seq_lens, num_real, given_starts, rows, widths, cut, step, bound)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        real, committed, num_rows, longer = requests_at(*source, request, longer)
        keys = visible_keys(committed, real, num_rows, step, request, forward)
        tl.store(lens + request, keys, mask=request < n)
    tl.debug_barrier()  # the lengths are there for all threads
    parts += forward * number(sizes.parts_stride)
    splits += forward * number(sizes.splits_stride)
    marks += forward * number(sizes.marks_stride)
    numbers = (1, 0, n, number(sizes.num_parts), 0, number(sizes.search_steps))
    share_blocks(lens, None, parts, splits, marks, None, *numbers, KEYS, COST, PARTS, REQUESTS)


@triton.jit
def plan_request(
    seq_lens,
    num_real,
    given_starts,
    out_cache_loc,
    table,
    rows,
    tree_mask,
    widths,
    captured,
    bound,
    starts,
    page_starts,
    lens,
    pages,
    write_slots,
    step,
    sizes,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """All metadata of a request, or after the last one the ends.

    starts, page_starts: of query rows and of page lists, None if the form has none. pages: a row
    of them a request.
    """
    request, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    is_request, num_lens = request < number(step.bs), number(sizes.num_lens)
    given = (seq_lens, num_real, given_starts, rows, widths, step, bound)
    real, committed, begin, num_rows, cut = request_at(*given, request, REQUESTS)
    live = tl.cdiv(visible_keys(committed, real, num_rows, step, request, num_lens - 1), number(step.page_size))
    into = pages + request.to(tl.int64) * number(sizes.pages_stride)
    end = tl.minimum(live, number(sizes.num_columns))
    if part == 0:
        if page_starts is not None:
            tl.store(page_starts + request, request * number(sizes.pages_stride))
        if starts is not None:
            tl.store(starts + request, begin)
        for forward in range(0, num_lens):
            keys = visible_keys(committed, real, num_rows, step, request, forward)
            tl.store(lens + forward * number(sizes.lens_stride) + request, keys, mask=is_request)
    row = page_row(table, rows, real, step, bound, request)
    if part == num_parts - 1:
        source = (out_cache_loc, committed, row, rows, real, step, bound)
        _write_slots(*source, write_slots, number(sizes.writes_stride), begin, num_rows, BLOCK)
    if captured is not None:
        engine = (seq_lens, num_real, out_cache_loc, row, rows, tree_mask, widths, cut)
        store_step(captured, *engine, committed, real, begin, num_rows, step, bound, request, part, num_parts, BLOCK)
    for start in range(part * BLOCK, end, num_parts * BLOCK):
        page = start + tl.arange(0, BLOCK)
        known = page < tl.minimum(end, number(step.max_pages))
        ids = page_ids(row, rows, real, step, bound, page, known)
        tl.store(into + page, ids, mask=page < end)


@unspecialized
def _plan_pages(
    seq_lens,
    num_real,
    given_starts,
    out_cache_loc,
    table,
    rows,
    tree_mask,
    widths,
    captured,
    bound,
    starts,
    page_starts,
    lens,
    pages,
    write_slots,
    parts,
    splits,
    marks,
    step,
    sizes,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """A request, the ends, or a share-out. parts, splits, marks: of all forwards, None where none is asked for."""
    given = (seq_lens, num_real, given_starts, out_cache_loc, table, rows, tree_mask, widths, captured, bound)
    outputs = (starts, page_starts, lens, pages, write_slots, step, sizes)
    if parts is None:
        plan_request(*given, *outputs, BLOCK, REQUESTS)
    else:
        forward = tl.program_id(0) - number(step.bs) - 1
        if forward < 0:
            plan_request(*given, *outputs, BLOCK, REQUESTS)
        elif tl.program_id(1) == 0:
            read = (seq_lens, num_real, given_starts, rows, widths, bound, lens, parts, splits, marks, step, sizes)
            _share_forward(*read, forward, PARTS, KEYS, COST, REQUESTS)


def plan_pages(
    inputs: StepInputs,
    starts: Tensor | None,
    page_starts: Tensor | None,
    lens: Tensor,
    pages: Tensor,
    write_slots: Tensor,
    share_out: Sequence[Tensor],
    *counts: int,
) -> Prepared:
    """The launch; arguments as of the operator (`plan_operators`), the counts from `width` on."""
    given, variant = arguments_of(inputs)
    shared, max_pages = share_out[0].shape[1] if share_out else 0, counts[-1]
    num_programs = lens.shape[1] + 1 + (lens.shape[0] if shared else 0)
    launch = _launch(lens.device, (num_programs, num_parts(lens.shape[1] + 1, max_pages), 1))
    sizes = sizes_of(inputs, lens, pages, write_slots, share_out, *counts)
    outputs = (starts, page_starts, lens, pages, write_slots, *(share_out or (None, None, None)), *sizes)
    compiled_for = (BLOCK_PAGES, *constants(shared or 1))
    variant = (*variant, starts is None, page_starts is None, not shared, *compiled_for)
    return Prepared(launch, variant, (*given, *outputs, *compiled_for))


def sizes_of(
    inputs: StepInputs, lens: Tensor, pages: Tensor, write_slots: Tensor, share_out: Sequence[Tensor], *counts: int
) -> tuple[StepSizes, PageSizes]:
    """The sizes of a step and of its page lists, as kernels take them."""
    *of_step, max_pages = counts
    shared = share_out[0].shape[1] if share_out else 0
    strides = [each.stride(0) for each in (lens, pages, write_slots)]
    share_strides = [each.stride(0) for each in share_out] or [0, 0, 0]
    steps = lens.shape[1].bit_length()
    sizes = PageSizes._make([*strides, lens.shape[0], pages.shape[-1], *share_strides, shared, steps])
    return step_sizes(inputs, *of_step, write_slots.shape[0], max_pages), opaque(sizes)


@cache
def _launch(device: torch.device, grid: tuple[int, int, int]) -> Launch:
    return Launch(_plan_pages, device, grid)


@cache
def num_parts(num_rows: int, num_columns: int) -> int:
    """Programs that share a row of so many columns, of which there are `num_rows`."""
    return max(1, min(triton.cdiv(num_columns, BLOCK_PAGES), _MOST_PROGRAMS // num_rows))
