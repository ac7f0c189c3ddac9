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
from attn_backends.kernels.triton_step import (
    arguments_of,
    committed_tokens,
    first_row,
    given_slots,
    is_aligned,
    is_real,
    number,
    page_ids,
    page_row,
    step_sizes,
    store_step,
    visible_keys,
)

_BLOCK = 128
_MOST_PROGRAMS = 2048


class Entries(NamedTuple):
    """The buffers of one ratio (`spec_metadata.plans.compressed`). slots: any tensor where an indexer selects."""

    num_entries: Tensor
    state_writes: Tensor
    writes: Tensor
    positions: Tensor
    input_rows: Tensor
    state_reads: Tensor
    slots: Tensor


class EntrySizes(NamedTuple):
    """Their strides, and how a ratio compresses.

    num_slots: 0 where an indexer selects. over_read: of slots. num_made: entries that a forward makes at most.
    """

    row_stride: int
    slots_forward_stride: int
    slots_row_stride: int
    num_slots: int
    over_read: int
    made_stride: int
    num_made: int
    source_forward_stride: int
    source_stride: int
    ratio: int
    ring: int
    read_window: int


def _sizes_of(entries: Entries, over_read: int, ratio: int, ring: int, read_window: int) -> EntrySizes:
    sizes = EntrySizes(
        row_stride=entries.num_entries.stride(0),
        slots_forward_stride=entries.slots.stride(0),
        slots_row_stride=entries.slots.stride(1),
        num_slots=entries.slots.shape[2],
        over_read=over_read,
        made_stride=entries.writes.stride(0),
        num_made=entries.writes.shape[1],
        source_forward_stride=entries.input_rows.stride(0),
        source_stride=entries.input_rows.stride(1),
        ratio=ratio,
        ring=ring,
        read_window=read_window,
    )
    return opaque(sizes)


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
def _plan_row(entries, sizes, forward, into, position, end, slot, row, rows, real, step, bound, BLOCK: tl.constexpr):
    """What a row sees of one ratio's entries, and where its state goes."""
    ratio, ring, page_size = number(sizes.ratio), number(sizes.ring), number(step.page_size)
    num_visible, at = (position + 1) // ratio, forward * number(sizes.row_stride) + into
    tl.store(entries.num_entries + at, num_visible)
    successor = position + ring
    replaced = (successor < end) & (successor // page_size == position // page_size)
    state = slot // page_size * ring + position % ring
    tl.store(entries.state_writes + at, tl.where(replaced, -1, state).to(tl.int32))
    per_page = page_size // ratio
    last = tl.minimum(num_visible + number(sizes.over_read), number(sizes.num_slots))
    forwards = forward.to(tl.int64) * number(sizes.slots_forward_stride)
    place = forwards + into.to(tl.int64) * number(sizes.slots_row_stride)
    for start in range(0, last, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        page = page_ids(row, rows, real, step, bound, entry // per_page, entry < num_visible)
        slots = tl.where(entry < num_visible, page * per_page + entry % per_page, -1)
        tl.store(entries.slots + place + entry, slots, mask=entry < last)


@triton.jit
def _store_made(
    entries, sizes, forward, entry, write, first, start, begin, row, rows, real, step, bound, BLOCK: tl.constexpr
):
    """One of the entries that a forward makes, and what it is made of; padding where first is below 0.

    start: position of the request's first row, and begin its number.
    """
    ratio, ring, read_window = number(sizes.ratio), number(sizes.ring), number(sizes.read_window)
    at = forward * number(sizes.made_stride) + entry
    tl.store(entries.writes + at, write.to(tl.int32))
    tl.store(entries.positions + at, tl.maximum(first, 0))
    place = forward.to(tl.int64) * number(sizes.source_forward_stride) + entry * number(sizes.source_stride)
    for first_back in range(0, read_window, BLOCK):
        back = first_back + tl.arange(0, BLOCK)
        live, token = back < read_window, tl.where(first >= 0, first + back - (read_window - ratio), -1)
        is_state = (token >= 0) & (token < start)
        inputs = tl.where(token >= start, begin + token - start, -1)
        page = page_ids(row, rows, real, step, bound, token // number(step.page_size), live & is_state)
        reads = tl.where(is_state, page * ring + token % ring, -1)
        tl.store(entries.input_rows + place + back, inputs, mask=live)
        tl.store(entries.state_reads + place + back, reads, mask=live)


@triton.jit
def _plan_made(
    entries,
    sizes,
    forward,
    seq_lens,
    num_real,
    given_starts,
    out_cache_loc,
    row,
    rows,
    committed,
    real,
    step,
    bound,
    part,
    num_parts,
    BLOCK: tl.constexpr,
):
    """One ratio's entries that a request closes in a forward, after those of the requests before it, and padding."""
    request, ratio = tl.program_id(0), number(sizes.ratio)
    before, total = tl.zeros((BLOCK,), dtype=tl.int32), tl.zeros((BLOCK,), dtype=tl.int32)
    for first_other in range(0, number(step.bs), BLOCK):
        other = first_other + tl.arange(0, BLOCK)
        others_real = is_real(seq_lens, num_real, rows, step, bound, other)
        others_committed = committed_tokens(seq_lens, others_real, step, bound, other)
        keys = visible_keys(others_committed, others_real, given_starts, step, other, forward)
        others = first_row(given_starts, step, other + 1) - first_row(given_starts, step, other)
        closing = keys // ratio - (keys - others) // ratio
        total += closing
        before += tl.where(other < request, closing, 0)
    begin = first_row(given_starts, step, request)
    end = visible_keys(committed, real, given_starts, step, request, forward)
    start = end - (first_row(given_starts, step, request + 1) - begin)
    first_entry, num_entries = tl.sum(before, axis=0), end // ratio - start // ratio
    for index in range(part, num_entries, num_parts):
        token = (start // ratio + index) * ratio
        closer = begin + token + ratio - 1 - start
        place = closer * number(step.num_steps) + forward
        live = index < num_entries
        write = given_slots(out_cache_loc, committed, row, rows, real, step, bound, begin, place, live) // ratio
        at = (first_entry + index, write, token, start, begin)
        _store_made(entries, sizes, forward, *at, row, rows, real, step, bound, BLOCK)
    nothing = tl.full((), -1, dtype=tl.int32)
    program, num_programs = request * num_parts + part, tl.num_programs(0) * num_parts
    for entry in range(tl.sum(total, axis=0) + program, number(sizes.num_made), num_programs):
        at = (entry, nothing, nothing, start, begin)
        _store_made(entries, sizes, forward, *at, row, rows, real, step, bound, BLOCK)


@unspecialized
def _plan_compressed(
    seq_lens,
    num_real,
    given_starts,
    out_cache_loc,
    table,
    rows,
    tree_mask,
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
    begin = first_row(given_starts, step, request)
    count = first_row(given_starts, step, request + 1) - begin
    real = is_real(seq_lens, num_real, rows, step, bound, request)
    committed = committed_tokens(seq_lens, real, step, bound, request)
    row = page_row(table, rows, real, step, bound, request)
    if (forward == 0) & (role == 0):
        if captured is not None:
            given = (seq_lens, num_real, out_cache_loc, row, rows, tree_mask, committed, real, step, bound, request)
            store_step(captured, *given, part, num_parts, BLOCK)
        last = visible_keys(committed, real, given_starts, step, request, num_forwards - 1)
        into = page_table + request.to(tl.int64) * number(shared.page_table_stride)
        of_request = (begin, count, last, row, rows, real, step, bound, request, part, num_parts)
        _plan_request(starts, request_of_rows, into, *of_request, BLOCK)
    if (forward < num_forwards) & (role == 0):
        end = visible_keys(committed, real, given_starts, step, request, forward)
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
                _plan_row(entries[i], sizes[i], *at, BLOCK)
    for i in tl.static_range(NUM_RATIOS):
        if (forward < num_forwards) & (role == i + 1):
            source = (seq_lens, num_real, given_starts, out_cache_loc, row, rows, committed, real, step, bound)
            _plan_made(entries[i], sizes[i], forward, *source, part, num_parts, BLOCK)


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
    bs, num_forwards, max_pages = inputs.seq_lens.shape[0], write_slots.shape[0], page_table.shape[1]
    outputs = (starts, request_of_rows, page_table, window_slots, window_lens, write_slots)
    step = step_sizes(inputs, width, *counts, num_forwards, max_pages)
    windows = (window, is_block, window_slots.shape[2], window_slots.stride(0), window_slots.stride(1))
    strides = (window_lens.stride(0), page_table.stride(0), write_slots.stride(0))
    sizes = tuple(_sizes_of(each, over_read, *how) for each, how in zip(entries, compressions, strict=True))
    given, variant = arguments_of(inputs)
    aligned = tuple(is_aligned(tensor) for each in entries for tensor in each)
    most = max(1, _MOST_PROGRAMS // ((bs + 1) * max(num_forwards, 1)))
    grid = (bs + 1, min(width, most) * (len(entries) + 1), max(num_forwards, 1))
    rest = (step, opaque(WindowSizes(*windows, *strides)), tuple(entries), sizes)
    arguments = (*given, *outputs, *rest, len(entries), _BLOCK)
    return Prepared(_launch(starts.device, grid), (*variant, aligned), arguments)


@cache
def _launch(device: torch.device, grid: tuple[int, int, int]) -> Launch:
    return Launch(_plan_compressed, device, grid)
