"""Entries of one compression ratio in the plan of compressed attention: what a row sees, and what a forward closes."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import opaque
from attn_backends.kernels.triton_requests import number, requests_at, visible_keys
from attn_backends.kernels.triton_step import given_slots, page_ids


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


def sizes_of(entries: Entries, over_read: int, ratio: int, ring: int, read_window: int) -> EntrySizes:
    """The sizes of a ratio's buffers as kernels take them."""
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


@triton.jit
def plan_row(entries, sizes, forward, into, position, end, slot, row, rows, real, step, bound, BLOCK: tl.constexpr):
    """Visible entries of one ratio, for a row, and the place of its state."""
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
def plan_made(
    entries,
    sizes,
    forward,
    seq_lens,
    num_real,
    given_starts,
    out_cache_loc,
    row,
    rows,
    widths,
    cut,
    committed,
    real,
    begin,
    num_rows,
    step,
    bound,
    part,
    num_parts,
    BLOCK: tl.constexpr,
):
    """One ratio's entries that a request closes in a forward, after those of the requests before it, and padding."""
    request, ratio = tl.program_id(0), number(sizes.ratio)
    before, total, longer = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((), tl.int32)
    source = (seq_lens, num_real, given_starts, rows, widths, cut, step, bound)
    for first_other in range(0, number(step.bs), BLOCK):
        other = first_other + tl.arange(0, BLOCK)
        others_real, others_committed, others, longer = requests_at(*source, other, longer)
        keys = visible_keys(others_committed, others_real, others, step, other, forward)
        closing = keys // ratio - (keys - others) // ratio
        total += closing
        before += tl.where(other < request, closing, 0)
    end = visible_keys(committed, real, num_rows, step, request, forward)
    start = end - num_rows
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
