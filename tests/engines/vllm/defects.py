"""Bugs of an adapter, planted into ours: each in place of `Plans`, or of one call of `Builder`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.engines.vllm import builder
from attn_backends.engines.vllm.plans import Plan, Plans
from attn_backends.graphs import is_capturing
from attn_backends.planning.metadata import WRITE_SLOTS, Metadata
from spec_metadata import StepKind

Defect = Callable[[pytest.MonkeyPatch], None]


class DraftLengthOneShort(Plans):
    """A draft's forwards are planned as if its token were not counted in the length."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lens: list[tuple[Tensor, Tensor]] = []

    def capture(self, common: Any) -> Plan:
        if common.num_actual_tokens == common.num_reqs:
            self._lens.append((common.seq_lens, common.seq_lens.clone()))
            common = replace(common, seq_lens=self._lens[-1][1])
        return super().capture(common)

    def _bound(self, captured: Metadata) -> Plan:
        plan = super()._bound(captured)

        def refresh() -> tuple[Metadata]:
            for given, short in self._lens:
                short.copy_(given - 1)
            plan.expire()
            plan.current()
            return (captured,)

        return Plan(refresh)


class NotPlannedInTheGraph(Plans):
    """A graph keeps what was planned for the batch that it was captured with."""

    kind: StepKind

    def _bound(self, captured: Metadata) -> Plan:
        plan = super()._bound(captured)

        def refresh() -> tuple[Metadata]:
            if captured.step.kind is not self.kind or not is_capturing():
                plan.expire()
                plan.current()
            return (captured,)

        return Plan(refresh)


class NoRefresh(NotPlannedInTheGraph):
    """Of the draft loop."""

    kind = StepKind.DECODE


class NoReplay(NotPlannedInTheGraph):
    """Of the target's verify, and of the draft's extend on the same metadata."""

    kind = StepKind.TARGET_VERIFY


class PaddedRowsWriteALiveSlot(Plans):
    """Rows of padding write the last slot of the pool, as -1 does in torch, instead of the reserved page."""

    def _bound(self, captured: Metadata) -> Plan:
        plan, geometry = super()._bound(captured), self.backend.geometry

        def refresh() -> tuple[Metadata]:
            plan.expire()
            plan.current()
            slots = captured.buffers[WRITE_SLOTS.name]
            slots.copy_(torch.where(slots < geometry.page_size, geometry.num_slots - 1, slots))
            return (captured,)

        return Plan(refresh)


class StaleBlockTable(Plans):
    """The table is copied when a graph is captured."""

    def capture(self, common: Any) -> Plan:
        return super().capture(replace(common, block_table_tensor=common.block_table_tensor.clone()))


def _plans(planted: type[Plans]) -> Defect:
    return lambda patch: patch.setattr(builder, "Plans", planted)


def _forward_0(patch: pytest.MonkeyPatch) -> None:
    """Every forward of the draft loop attends on the metadata of the first."""
    patch.setattr(builder.Builder, "update_draft_decode_metadata", lambda self, metadata: None)


DEFECTS: dict[str, tuple[Defect, str]] = {
    "draft length one short": (_plans(DraftLengthOneShort), "attention of a draft layer, in a graph"),
    "all drafts on forward 0": (_forward_0, "writes of a draft layer, in a graph: .* wrote slots"),
    "no refresh": (_plans(NoRefresh), "writes of a draft layer, in a graph: .* did not store what it was given"),
    "no replay": (_plans(NoReplay), "in a graph|overwritten by a replay or capture"),
    "slots of padded rows": (_plans(PaddedRowsWriteALiveSlot), "writes of a .* layer, in a graph: .* wrote slots"),
    "stale block table": (_plans(StaleBlockTable), "attention of a .* layer, in a graph"),
}
"""Bug -> how it is planted, and what tells of it."""
