"""Mutants of sets of phases that take turns in one memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend, Metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.contract.kernel import Schedules
from attn_backends.memory.phase_sets import PhaseSet, PhaseSets
from attn_backends.memory.phases import PhaseMemory
from spec_metadata import Bucket, Buffers, Paging, Step, StepKind
from spec_metadata.visibility import HostLens
from tests.mutants import hosted
from tests.mutants.hosts import HOSTED, SCHEDULED
from tests.mutants.mutant import mutant
from tests.mutants.replays import keep_captures

TURNS = "graph.sets_take_turns"


@mutant("a set's graph replayed with another set's strides", TURNS, graph=True)
def sets_share_a_plan(patch: pytest.MonkeyPatch) -> None:
    """Metadata of captures is kept under kind and batch size: a graph of one set runs on what was planned in another's
    strides.
    """

    def key(bucket: Bucket) -> object:
        return bucket.kind, bucket.bs

    keep_captures(patch, key)


@mutant("phases of a set over one another", TURNS, graph=True)
def phases_of_a_set_lie_over_one_another(patch: pytest.MonkeyPatch) -> None:
    """All phases of a set begin at the same address, so they overwrite each other."""
    block = PhaseSets.block
    patch.setattr(PhaseSets, "block", lambda self, num_bytes, taken: block(self, 2**22, {}))


@mutant("a random change of one token", TURNS)
def sets_have_memory_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """No phase lies where one of another set does, so every set adds to the memory."""

    def new(self: PhaseSets, num_bytes: int, taken: dict[int, int]) -> Tensor:
        self._blocks.append(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))
        return self._blocks[-1]

    patch.setattr(PhaseSets, "block", new)


@mutant("a set that is not alive is taken for planned", TURNS, graph=True)
def lost_contents_are_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Phases stay marked as planned when another set takes their memory."""
    patch.setattr(PhaseMemory, "forget", lambda self: None)


@mutant("a switch in the middle of a cycle", TURNS, graph=True)
def every_plan_begins_a_set(patch: pytest.MonkeyPatch) -> None:
    """Planning a phase makes its whole set anew, the phases that were planned before it too."""

    def revive(self: PhaseSet) -> None:
        self.sets.alive = self
        for member in self.members:
            member.renew()

    patch.setattr(PhaseSet, "revive", revive)


@mutant("a workspace that sets plan into in turn", TURNS, backend=HOSTED, graph=True)
def own_last_plan_taken_for_the_sets(patch: pytest.MonkeyPatch) -> None:
    """Lengths that a schedule planned last are not planned again, though another set has taken its workspace since."""
    plan = hosted.OnHost.plan_host

    def once(self: hosted.OnHost, lens: HostLens) -> None:
        if lens != getattr(self, "last", None):
            plan(self, lens)
        self.last = lens

    patch.setattr(hosted.OnHost, "plan_host", once)


@mutant("SGLang #35275: the hook of another backend, after a capture's warm-up", TURNS, backend=SCHEDULED, graph=True)
def schedule_of_the_first_set_asked(patch: pytest.MonkeyPatch) -> None:
    """Device schedules are renewed in the first set that was captured: another set's stay in its graph as they were."""
    capture, asked = AttentionBackend.capture, dict[object, Schedules]()

    def keeping(self: AttentionBackend, bucket: Bucket, paging: Paging, **options: Any) -> Metadata:
        meta = capture(self, bucket, paging, **options)
        first = asked.setdefault((self, bucket.kind, bucket.bs), meta.schedules)
        patch.setattr(meta.schedules, "refresh", first.refresh)
        return meta

    patch.setattr(AttentionBackend, "capture", keeping)


@mutant("vLLM #48329: the target's numbers of drafts, taken for the draft's own steps", TURNS, graph=True)
def draft_sized_by_the_target_s_schedule(patch: pytest.MonkeyPatch) -> None:
    """Drafts of a set fall short by as many keys as its steps are fewer than those of the largest."""
    write, most = FA3Backend.write, [0]

    def derived(self: FA3Backend, step: Step, buffers: Buffers) -> None:
        write(self, step, buffers)
        if step.kind is StepKind.DRAFT_DECODE:
            most[0] = max(most[0], step.num_steps)
            buffers["seqused_k"].sub_(most[0] - step.num_steps).clamp_(min=0)

    patch.setattr(FA3Backend, "write", derived)


@mutant("a switch that does not wait for the last set's reads", "streams.sets_switch_behind_reads", needs=("cuda",))
def switch_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A worker does not say where the reads of a set end."""
    patch.setattr(PhaseSets, "reads_end", lambda self: None)
