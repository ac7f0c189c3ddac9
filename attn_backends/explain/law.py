"""Slots that each row of a step must see and write: `spec_metadata.visibility` in lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.explain.probes import ROWS
from spec_metadata import Step, StepKind
from spec_metadata.visibility import dense_part, query_starts, token_positions, tree_part, write_slots


@dataclass(frozen=True)
class RowLaw:
    """A row of a real request. request, row: its place, counted from 0, and the row's in it. position: RoPE's. sees:
    slots by pool (`probes.ROWS`, or the ratio of entries). writes: its slot.
    """

    request: int
    row: int
    position: int
    sees: Mapping[int, tuple[int, ...]]
    writes: int


@dataclass(frozen=True)
class Owned:
    """A real request. committed: tokens. slots: of these in order, then those that the step writes, in the order of
    out_cache_loc.
    """

    committed: int
    slots: tuple[int, ...]


def requests_of(step: Step) -> list[Owned]:
    """The real requests of a step, and the slots that are theirs."""
    lens, slots = _slots(step, step.seq_lens)
    written = step.flat_slots().tolist()
    starts = [start * step.num_steps for start in query_starts(step).tolist()]
    return [
        Owned(length, (*slots[i][:length], *written[starts[i] : starts[i + 1]]))
        for i, length in enumerate(lens[: int(step.num_real)])
    ]


def law_of(
    step: Step, forward: int, ancestors: Tensor | None, window: int | None, ratios: tuple[int, ...]
) -> list[RowLaw]:
    """Rows of the real requests of a forward. ancestors: of a draft of topk > 1. window: of all layers, None for none.
    ratios: tokens of a block that has an entry.
    """
    if step.kind is StepKind.IDLE:
        return []
    dense, tree = dense_part(step, forward), tree_part(step, forward, ancestors)
    lens, slots = _slots(step, dense.kv_lens)
    starts, written = query_starts(step).tolist(), write_slots(step, forward).tolist()
    positions = token_positions(step, forward).tolist()
    rows = []
    for request in range(int(step.num_real)):
        first, end = starts[request], starts[request + 1]
        for number in range(first, end):
            hidden = end - 1 - number if dense.causal else 0
            tokens = slots[request][: lens[request] - hidden]
            sees: dict[int, tuple[int, ...]] = {ROWS: tuple(tokens if window is None else tokens[-window:])}
            if tree is not None:
                mask = tree.mask[request, number - first]
                sees[ROWS] += tuple(tree.slots[request][mask].tolist())
            sees |= {ratio: tuple(slot // ratio for slot in tokens[ratio - 1 :: ratio]) for ratio in ratios}
            rows.append(RowLaw(request, number - first, positions[number], sees, written[number]))
    return rows


def name_of(step: Step, row: RowLaw) -> str:
    """The label of a row: branch, node or position."""
    if step.kind is StepKind.DRAFT_DECODE and step.is_tree:
        return f"branch {row.row}"
    return f"node {row.row}" if step.is_tree else f"pos {row.position}"


def _slots(step: Step, lens: Tensor) -> tuple[list[int], list[list[int]]]:
    """Lengths, and the slots of as many leading tokens of each request."""
    known = lens.tolist()
    positions = torch.arange(max(known, default=0), device=step.device).expand(step.bs, -1)
    return known, step.paging.slots(positions).tolist()
