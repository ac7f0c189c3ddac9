"""The plan of compressed attention as one Triton launch: windows, entries and compressor rows of all forwards.

A program takes a request in a forward, or shares it with a few others: some go row by row, some entry by entry, since
either waits for memory again and again. Entries that close in a forward lie one after the other, request after request,
so every program for them adds up the lengths of all requests itself. What is left of those lists is padded by all of
them together.
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
from attn_backends.kernels.triton_plan_entries import Entries, plan_made, plan_row, sizes_of
from attn_backends.kernels.triton_requests import number, request_at, visible_keys
from attn_backends.kernels.triton_step import (
    arguments_of,
    given_slots,
    is_aligned,
    page_ids,
    page_row,
    step_sizes,
    store_step,
)

_BLOCK = 128
_MOST_PROGRAMS, _MOST_RAGGED = 2048, 320  # each of a ragged step looks at all widths


class WindowSizes(NamedTuple):
    """The window, whether rows are those of draft blocks, slots of a row, and strides."""

    window: int
    is_block: int
    num_slots: int
    window_forward_stride: int
    window_stride: int
    lens_stride: int
    page_table_stride: int
    writes_stride: int


@triton.jit
def _plan_request(
    starts,
    request_of_rows,
    into,
    begin,
    count,
    last,
    row,
    rows,
    real,
    step,
    bound,
    request,
    part,
    num_parts,
    BLOCK: tl.constexpr,
):
    """A request's first row, the request of its rows, and its pages. last: keys that its last forward sees."""
    num_pages = tl.minimum(tl.cdiv(last, number(step.page_size)), number(step.max_pages))
    if part == 0:
        tl.store(starts + request, begin)
    for start in range(part * BLOCK, count, num_parts * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(request_of_rows + begin + place, request, mask=place < count)
    for start in range(part * BLOCK, num_pages, num_parts * BLOCK):
        page = start + tl.arange(0, BLOCK)
        ids = page_ids(row, rows, real, step, bound, page, page < num_pages)
        tl.store(into + page, ids, mask=page < num_pages)


@triton.jit
def _plan_window(into, lens, position, start, end, row, rows, real, step, bound, shared, BLOCK: tl.constexpr):
    """Slots of the tokens that a row sees, the last first, and their number. start, end: of its request's rows."""
    page_size, is_block = number(step.page_size), number(shared.is_block) > 0
    last = tl.where(is_block, end - 1, position)
    num_seen = last + 1 - tl.maximum(tl.where(is_block, start, position + 1) - number(shared.window), 0)
    tl.store(lens, num_seen)
    for first in range(0, number(shared.num_slots), BLOCK):
        back = first + tl.arange(0, BLOCK)
        token, live = last - back, back < num_seen
        page = page_ids(row, rows, real, step, bound, token // page_size, live)
        slots = tl.where(live, page * page_size + token % page_size, -1)
        tl.store(into + back, slots, mask=back < number(shared.num_slots))


@triton.jit
def _plan_rows(
    entries,
    sizes,
    window_slots,
    window_lens,
    write_slots,
    out_cache_loc,
    begin,
    count,
    end,
    committed,
    row,
    rows,
    real,
    step,
    bound,
    shared,
    part,
    num_parts,
    NUM_RATIOS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Windows, entries and write slots of a request's rows in a forward. end: keys that the last one sees."""
    forward = tl.program_id(2)
    windows = window_slots + forward.to(tl.int64) * number(shared.window_forward_stride)
    lens_of_rows = window_lens + forward * number(shared.lens_stride)
    for index in range(part, count, num_parts):
        into, position = begin + index, end - count + index
        place, live = into * number(step.num_steps) + forward, index < count
        slot = given_slots(out_cache_loc, committed, row, rows, real, step, bound, begin, place, live)
        tl.store(write_slots + forward * number(shared.writes_stride) + into, slot)
        slots, lens = windows + into.to(tl.int64) * number(shared.window_stride), lens_of_rows + into
        _plan_window(slots, lens, position, end - count, end, row, rows, real, step, bound, shared, BLOCK)
        for i in tl.static_range(NUM_RATIOS):
            at = (forward, into, position, end, slot, row, rows, real, step, bound)
            plan_row(entries[i], sizes[i], *at, BLOCK)


@unspecialized
def _plan_compressed(
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
    request_of_rows,
    page_table,
    window_slots,
    window_lens,
    write_slots,
    step,
    shared,
    entries,
    sizes,
    NUM_RATIOS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All metadata of a request in a forward, or after the last request the end. entries, sizes: of each ratio.

    A request's programs are as many parts for its rows and for the entries of each ratio.
    """
    request, forward, num_parts = tl.program_id(0), tl.program_id(2), tl.num_programs(1) // (NUM_RATIOS + 1)
    part, role, num_forwards = tl.program_id(1) % num_parts, tl.program_id(1) // num_parts, number(step.num_forwards)
    given = (seq_lens, num_real, given_starts, rows, widths, step, bound)
    real, committed, begin, count, cut = request_at(*given, request, BLOCK)
    row = page_row(table, rows, real, step, bound, request)
    if (forward == 0) & (role == 0):
        if captured is not None:
            engine = (seq_lens, num_real, out_cache_loc, row, rows, tree_mask, widths, cut)
            store_step(captured, *engine, committed, real, begin, count, step, bound, request, part, num_parts, BLOCK)
        last = visible_keys(committed, real, count, step, request, num_forwards - 1)
        into = page_table + request.to(tl.int64) * number(shared.page_table_stride)
        of_request = (begin, count, last, row, rows, real, step, bound, request, part, num_parts)
        _plan_request(starts, request_of_rows, into, *of_request, BLOCK)
    if (forward < num_forwards) & (role == 0):
        end = visible_keys(committed, real, count, step, request, forward)
        of_rows = (window_slots, window_lens, write_slots, out_cache_loc, begin, count, end, committed)
        at = (row, rows, real, step, bound, shared, part, num_parts)
        _plan_rows(entries, sizes, *of_rows, *at, NUM_RATIOS, BLOCK)
    for i in tl.static_range(NUM_RATIOS):
        if (forward < num_forwards) & (role == i + 1):
            own = (widths, cut, committed, real, begin, count, step, bound, part, num_parts)
            plan_made(
                entries[i], sizes[i], forward, seq_lens, num_real, given_starts, out_cache_loc, row, rows, *own, BLOCK
            )


def plan_compressed(
    inputs: StepInputs,
    starts: Tensor,
    request_of_rows: Tensor,
    page_table: Tensor,
    window_slots: Tensor,
    window_lens: Tensor,
    write_slots: Tensor,
    entries: Sequence[Entries],
    compressions: Sequence[tuple[int, int, int]],
    over_read: int,
    window: int,
    is_block: int,
    width: int,
    *counts: int,
) -> Prepared:
    """The launch; arguments as of the operator (`plan_operators`), `counts` those after `width`. compressions: ratio,
    ring, read window of each.
    """
    bs, num_forwards, max_pages = starts.shape[0] - 1, write_slots.shape[0], page_table.shape[1]
    outputs = (starts, request_of_rows, page_table, window_slots, window_lens, write_slots)
    step = step_sizes(inputs, width, *counts, num_forwards, max_pages)
    windows = (window, is_block, window_slots.shape[2], window_slots.stride(0), window_slots.stride(1))
    strides = (window_lens.stride(0), page_table.stride(0), write_slots.stride(0))
    sizes = tuple(sizes_of(each, over_read, *how) for each, how in zip(entries, compressions, strict=True))
    given, variant = arguments_of(inputs)
    aligned = tuple(is_aligned(tensor) for each in entries for tensor in each)
    most_programs = _MOST_PROGRAMS if inputs.widths is None else _MOST_RAGGED
    most = max(1, most_programs // ((bs + 1) * max(num_forwards, 1)))
    grid = (bs + 1, min(width, most) * (len(entries) + 1), max(num_forwards, 1))
    rest = (step, opaque(WindowSizes(*windows, *strides)), tuple(entries), sizes)
    arguments = (*given, *outputs, *rest, len(entries), _BLOCK)
    return Prepared(_launch(starts.device, grid), (*variant, aligned), arguments)


@cache
def _launch(device: torch.device, grid: tuple[int, int, int]) -> Launch:
    return Launch(_plan_compressed, device, grid)
