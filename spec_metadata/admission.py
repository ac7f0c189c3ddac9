"""Checks of a step's values (rule R10): host bounds always, device values only when a caller asks for them.

`check_values` reads the device back, so backends call it in checking mode only; an engine that keeps host mirrors of
its tables calls `check_write_slots` on them when it admits a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_metadata.capacity import Capacity, StepKind
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import PackedQuery, Step
from spec_metadata.paging import CacheGeometry


def check_table_room(step: Step, capacity: Capacity) -> None:
    """Refuse a table whose rows can't hold the committed tokens and what the step adds. Reads shapes only."""
    extent = step.extent(capacity)
    row_tokens = step.paging.row_tokens
    if step.kind is not StepKind.IDLE and row_tokens < extent.max_kv_len:
        raise InvalidStepError(
            f"a table row holds {row_tokens} tokens; {extent.max_kv_len} are needed for "
            f"{step.max_committed or capacity.max_context} committed tokens and {capacity.draft_room} drafted, rounded "
            f"up to pages of {capacity.page_size}. Make the table wider, or pass max_committed if lengths are bounded"
        )


def check_values(step: Step) -> None:
    """Check lengths, rows and slots of a step's real requests. Reads the device back: for checking mode."""
    num_real = int(step.num_real)
    lens = step.seq_lens[:num_real].tolist()
    widths = (
        step.query.lens_cpu if isinstance(step.query, PackedQuery) else [step.num_writes // max(step.bs, 1)] * num_real
    )
    for request, (length, width) in enumerate(zip(lens, widths, strict=False)):
        if length < 0 or length + width > step.paging.row_tokens:
            raise InvalidStepError(
                f"request {request} has {length} committed tokens and adds {width}; its table row holds "
                f"{step.paging.row_tokens}"
            )
    positions = torch.arange(step.paging.row_tokens, device=step.device).expand(step.bs, -1)
    slots = step.paging.slots(positions)[:num_real].tolist()
    visible = [row[:length] for row, length in zip(slots, lens, strict=True)]
    flat, writes = step.out_cache_loc.tolist(), []
    for width in widths:
        writes.append(flat[:width])
        flat = flat[width:]
    check_write_slots(writes[:num_real], visible, step.paging.geometry)


def check_write_slots(
    writes: Sequence[Sequence[int]], visible: Sequence[Sequence[int]], geometry: CacheGeometry
) -> None:
    """Check host mirrors of a batch. writes: each request's write slots. visible: each request's committed slots.

    A slot must exist, lie outside the reserved page, be written once, and be no committed slot of any request.
    """
    owner: dict[int, int] = {}
    committed = {slot: request for request, row in enumerate(visible) for slot in row}
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
