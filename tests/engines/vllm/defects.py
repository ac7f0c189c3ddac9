"""Bugs of an adapter, planted into ours by an environment variable: in place of `Plans`, or of a call of `Builder`.

They are in the plug-in of these tests, so that they are there in each process of an engine's, and on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.adapters.batch import BlockTableBatch
from attn_backends.engines.vllm import builder
from attn_backends.engines.vllm.plans import Plan, Plans, Refresh
from attn_backends.graphs import is_capturing
from attn_backends.planning.metadata import WRITE_SLOTS, Metadata
from spec_metadata import Step, StepKind
from tests.engines.vllm.given import BUG

SWITCH = BUG


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

    def captured(self, common: Any) -> Refresh:
        refresh = super().captured(common)

        def short_of_one() -> Sequence[Metadata]:
            for given, short in self._lens:
                short.copy_(given - 1)
            return refresh()

        return short_of_one


class NotPlannedInTheGraph(Plans):
    """A graph keeps what was planned for the batch that it was captured with."""

    kind: StepKind

    def captured(self, common: Any) -> Refresh:
        refresh, made = super().captured(common), list[Metadata]()

        def kept() -> Sequence[Metadata]:
            if not made or made[0].step.kind is not self.kind or not is_capturing():
                made[:] = refresh()
            return made

        return kept


class NoRefresh(NotPlannedInTheGraph):
    """Of the draft loop."""

    kind = StepKind.DECODE


class NoReplay(NotPlannedInTheGraph):
    """Of the target's verify, and of the draft's extend on the same metadata."""

    kind = StepKind.TARGET_VERIFY


class PaddedRowsWriteALiveSlot(Plans):
    """Rows of padding write the slot before the batch's first, which is read, instead of the reserved page."""

    def captured(self, common: Any) -> Refresh:
        refresh, geometry = super().captured(common), self.backend.geometry

        def into_a_live_one() -> Sequence[Metadata]:
            (meta,) = refresh()
            slots = meta.buffers[WRITE_SLOTS.name]
            live = (slots.flatten()[:1] - 1).clamp_min(geometry.page_size)
            slots.copy_(torch.where(slots < geometry.page_size, live, slots))
            return (meta,)

        return into_a_live_one


class StaleBlockTable(Plans):
    """The table is copied when a graph is captured."""

    def capture(self, common: Any) -> Plan:
        return super().capture(replace(common, block_table_tensor=common.block_table_tensor.clone()))


class VerifyAsPrefill(Plans):
    """An eager verify is planned as a prefill. Attention is the same; its kernel may be slower."""

    def _step(self, batch: BlockTableBatch) -> Step:
        return batch.prefill()


PLANS: dict[str, type[Plans]] = {
    "draft length one short": DraftLengthOneShort,
    "no refresh": NoRefresh,
    "no replay": NoReplay,
    "slots of padded rows": PaddedRowsWriteALiveSlot,
    "stale block table": StaleBlockTable,
    "verify as prefill": VerifyAsPrefill,
}
FORWARD_0 = "all drafts on forward 0"
DRAFT_WRITES = "writes of a draft layer, in a graph: .* "
CAUGHT = {
    "draft length one short": "attention of a draft layer, in a graph",
    FORWARD_0: f"{DRAFT_WRITES}wrote slots",
    "no refresh": f"{DRAFT_WRITES}did not store what it was given",
    "no replay": r"metadata of \(target_verify .* was overwritten by a replay or capture of \(target_verify",
    "slots of padded rows": "writes of a .* layer, in a graph: .* wrote slots",
    "stale block table": "attention of a .* layer, in a graph",
}
"""Bug -> what tells of it, as a grouped-query model runs in graphs."""
CAUGHT_IN_MLA = {
    "draft length one short": CAUGHT["draft length one short"],
    FORWARD_0: "attention of a draft layer, in a graph",
    "no refresh": "attention of a draft layer, in a graph",
    "no replay": CAUGHT["no replay"],
    "stale block table": CAUGHT["stale block table"],
}
"""Of an MLA model; vLLM stores its latents itself, by its own slots."""


def planted() -> str:
    """The bug that the environment names, or none."""
    name = os.environ.get(SWITCH, "")
    if name and name not in (*PLANS, FORWARD_0):
        raise ValueError(f"{SWITCH} is {name!r}; the bugs are {', '.join([*PLANS, FORWARD_0])}")
    return name


def register() -> None:
    """Entry point of `vllm.general_plugins`: our plug-in has the bug that `SWITCH` names, in every process."""
    update = builder.Builder.update_draft_decode_metadata

    def update_or_not(self: builder.Builder, metadata: builder.GroupMetadata) -> None:
        if planted() != FORWARD_0:
            update(self, metadata)

    builder.Plans = lambda *args: PLANS.get(planted(), Plans)(*args)
    builder.Builder.update_draft_decode_metadata = update_or_not
