"""Checks of a step's values (rule R10): host bounds always, device values only when a caller asks for them.

`check_values` reads the device back, so backends call it in checking mode only; an engine that keeps host mirrors of
its tables calls `check_write_slots` on them when it admits a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from spec_metadata.capacity import Capacity, StepKind
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import Step
from spec_metadata.paging import CacheGeometry, Paging, RequestTable
from spec_metadata.query import BoundedQuery, PackedQuery, UniformQuery


def check_table_room(step: Step, capacity: Capacity) -> None:
    """Refuse a step that its capacity or table can't hold. Reads shapes and host bounds only."""
    if step.kind is StepKind.IDLE:
        return
    if step.seq_lens_cpu is not None:
        committed = max(step.seq_lens_cpu, default=0)
    elif step.max_committed is not None:
        committed = step.max_committed
    else:
        committed = capacity.max_context if isinstance(step.query, UniformQuery) else 0
    num_added = step.num_added_at_least
    longest = max(committed + num_added, step.width)
    if step.seq_lens_cpu is not None and isinstance(step.query, PackedQuery):
        real = zip(step.seq_lens_cpu, step.query.lens_cpu, strict=False)  # padding is behind, and has no exact length
        longest = max(map(sum, real), default=0)
    if longest > capacity.max_kv_len:
        raise InvalidStepError(
            f"a {step.kind} step adds {max(num_added, step.width)} tokens to requests of up to {committed} committed; "
            f"the capacity holds {capacity.max_kv_len} (max_context={capacity.max_context} and {capacity.draft_room} "
            "drafted)"
        )
    extent = step.extent(capacity)
    if step.paging.row_tokens < extent.max_kv_len:
        committed = capacity.max_context if step.max_committed is None else step.max_committed
        raise InvalidStepError(_too_narrow(step.paging, extent.max_kv_len, committed, capacity))


def is_on(step: Step, device: torch.device) -> bool:
    """Whether a step's tensors, which lie on one device, lie on this; one without an index is any of its type."""
    return step.device.type == device.type and (device.index is None or step.device.index in (None, device.index))


def most_committed(step: Step, capacity: Capacity) -> int:
    """Committed tokens of a request up to which `check_table_room` takes a uniform step like one that it took: any that
    the capacity holds, and of a table that is narrower those of that step.
    """
    if step.paging.row_tokens >= capacity.max_kv_len:
        return capacity.max_kv_len - step.num_added_at_least
    return longest_promised(step, capacity)


def longest_promised(step: Step, capacity: Capacity) -> int:
    """Committed tokens of the longest request, as far as the host knows."""
    if step.max_committed is not None:
        return step.max_committed
    return max(capacity.max_context, *(step.seq_lens_cpu or (0,)))


def check_capture_room(paging: Paging, capacity: Capacity) -> None:
    """Refuse to capture on a table that can't hold a request at the capacity."""
    if paging.row_tokens < capacity.max_kv_len:
        raise InvalidStepError(_too_narrow(paging, capacity.max_kv_len, capacity.max_context, capacity))


def _too_narrow(paging: Paging, needed: int, committed: int, capacity: Capacity) -> str:
    return (
        f"a table row holds {paging.row_tokens} tokens; {needed} are needed for {committed} committed tokens and "
        f"{capacity.draft_room} drafted, rounded up to pages of {capacity.page_size}. Make the table wider, or pass "
        "max_committed if lengths are bounded"
    )


def check_values(step: Step, capacity: Capacity) -> None:
    """Check lengths, rows and slots of a step's real requests. Reads the device back: for checking mode."""
    num_real = int(step.num_real)
    lens = step.seq_lens[:num_real].tolist()
    _check_query_values(step)
    if isinstance(step.query, UniformQuery):
        widths = [step.width * step.num_steps] * num_real
    else:
        widths = step.query.cu_seqlens.diff()[:num_real].tolist()
    most = min(step.paging.row_tokens, capacity.max_kv_len)
    for request, (length, width) in enumerate(zip(lens, widths, strict=True)):
        if length < 0 or length + width > most:
            raise InvalidStepError(
                f"request {request} has {length} committed tokens and adds {width}; its table row and the capacity "
                f"hold {most}"
            )
        if step.max_committed is not None and length > step.max_committed:
            raise InvalidStepError(
                f"request {request} has {length} committed tokens, max_committed={step.max_committed}"
            )
    if step.seq_lens_cpu is not None and list(step.seq_lens_cpu) != lens:
        raise InvalidStepError(f"seq_lens_cpu says {list(step.seq_lens_cpu)}, the device holds {lens}")
    positions = torch.arange(step.paging.row_tokens, device=step.device).expand(step.bs, -1)
    slots = step.paging.slots(positions)[:num_real].tolist() if num_real else []
    visible = [row[:length] for row, length in zip(slots, lens, strict=True)]
    flat, writes = step.out_cache_loc.tolist(), []
    for width in widths:
        writes.append(flat[:width])
        flat = flat[width:]
    check_write_slots(writes, visible, step.paging.geometry)
    if not step.is_tree:
        _check_own_slots(writes, [row[n : n + w] for row, n, w in zip(slots, lens, widths, strict=True)])


def _check_own_slots(writes: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> None:
    """A chain reads what it writes through the table, so the two must be the same slots."""
    for request, (written, read) in enumerate(zip(writes, own, strict=True)):
        if list(written) != list(read):
            raise InvalidStepError(
                f"request {request} writes slots {list(written)}; its table has {list(read)} after what is committed"
            )


def _check_query_values(step: Step) -> None:
    if isinstance(step.query, PackedQuery):
        lens, given = step.query.lens_cpu, step.query.cu_seqlens.tolist()
        if given != [0, *accumulate(lens)]:
            raise InvalidStepError(f"cu_seqlens {given} are not the sums of the lengths {lens}")
    elif isinstance(step.query, BoundedQuery):
        given = step.query.cu_seqlens.tolist()
        if sorted(given) != given or given[0] != 0 or given[-1] != step.num_tokens:
            raise InvalidStepError(f"cu_seqlens {given} don't rise from 0 to {step.num_tokens}, the query rows")
    if isinstance(step.paging, RequestTable):
        num_rows, rows = step.paging.table.shape[0], step.paging.rows.tolist()
        if any(not 0 <= row < num_rows for row in rows):
            raise InvalidStepError(f"rows {rows} must lie in the table's [0, {num_rows})")


def check_write_slots(
    writes: Sequence[Sequence[int]], visible: Sequence[Sequence[int]], geometry: CacheGeometry
) -> None:
    """Check host mirrors of a batch. writes: each request's write slots. visible: each request's committed slots.

    A slot must exist, lie outside the reserved page, be written once, and be no committed slot of any request.
    """
    owner: dict[int, int] = {}
    committed = {slot: request for request, row in enumerate(visible) for slot in row}
    for slot, request in committed.items():
        if not 0 <= slot < geometry.num_slots:
            raise InvalidStepError(f"request {request} sees slot {slot}, outside [0, {geometry.num_slots})")
    for request, row in enumerate(writes):
        for slot in row:
            if not 0 <= slot < geometry.num_slots:
                raise InvalidStepError(f"request {request} writes slot {slot}, outside [0, {geometry.num_slots})")
            if slot // geometry.page_size == geometry.reserved_page:
                raise InvalidStepError(f"request {request} writes slot {slot} of the reserved page, which is padding's")
            if slot in owner:
                raise InvalidStepError(f"slot {slot} is written twice, by requests {owner[slot]} and {request}")
            if slot in committed:
                raise InvalidStepError(
                    f"request {request} writes slot {slot}, which holds a committed token of request {committed[slot]}"
                )
            owner[slot] = request
