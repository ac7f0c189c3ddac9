"""Mutants of sets of phases that take turns in one memory."""

from __future__ import annotations

import pytest

from attn_backends.memory.phase_sets import PhaseSet, PhaseSets
from attn_backends.memory.phases import PhaseMemory
from spec_metadata import Bucket
from spec_metadata.visibility import HostLens
from tests.mutants import hosted
from tests.mutants.hosts import HOSTED
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
    """Not the sets take turns but all phases: each begins where its set does."""
    block = PhaseSets.block
    patch.setattr(PhaseSets, "block", lambda self, num_bytes, taken: block(self, 2**22, {}))


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


@mutant("a switch that does not wait for the last set's reads", "streams.sets_switch_behind_reads", needs=("cuda",))
def switch_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A worker does not say where the reads of a set end."""
    patch.setattr(PhaseSets, "reads_end", lambda self: None)
