"""Sets of phases that take turns in one memory: a worker whose number of drafted steps adapts."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs, nearest
from attn_backends.conformance.exercise import (
    Captured,
    batch_of,
    bucket_of,
    prepare_memory,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.situations import graph, graphable, growing, is_declared, joined, one_page_size
from attn_backends.conformance.worlds import World
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.memory.phase_sets import PhaseSet, PhaseSets
from attn_backends.planning.metadata import Metadata
from spec_metadata import AnyBucket, StepKind

CYCLE = (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)


class InSet(Captured):
    """A graph whose metadata lies in a set."""

    def __init__(self, world: World, case: Case, within: PhaseSet) -> None:
        self.within = within
        super().__init__(world, case)

    def capture(self, bucket: AnyBucket) -> Metadata:
        """The metadata of the graph, in the set."""
        return self.world.backend.capture(bucket, self.world.paging(), within=self.within)


class _Set:
    """The phases of a cycle at one number of steps, in turn with those of another."""

    def __init__(self, world: World, cases: list[Case], within: PhaseSet) -> None:
        self.world, self.cases, self.within = world, cases, within
        self.phases = [InSet(world, case, within) for case in cases]

    def cycle(self, seed: int) -> Measured:
        """Plan all phases for one batch, then run their graphs."""
        room, found = self.world.table.shape[1], []
        scenes = [scene_of(self.world, batch_of(case), seed + i, seed, room) for i, case in enumerate(self.cases)]
        for phase, scene in zip(self.phases, scenes, strict=True):
            phase.load(scene)
        for phase, scene in zip(self.phases, scenes, strict=True):
            ran = phase.replay(scene, prepare_memory(scene, phase.case))
            compare_memory(ran.scene, ran.before, padded=True)
            found.append(compare_outputs(ran.scene, ran.inputs, ran.outputs))
        self.within.sets.reads_end()
        return nearest(found)


def _shallower(world: World) -> World:
    """The same engine where it drafts a chain, of a step less if it drafts one already."""
    other, known = copy(world), world.capacity
    num_steps = known.num_steps - 1 if known.topk == 1 else known.num_steps
    other.capacity = known.with_draft(1, num_steps, num_steps + 1)
    return other


def verifies(subject: Subject) -> list[Case]:
    """Verifies through graphs that are planned before they run, or as their first node."""
    kinds = (StepKind.TARGET_VERIFY,)
    return one_page_size(joined(graph(growing, kinds=kinds), graph(growing, kinds=kinds, refresh=True)))(subject)


@check("graph.sets_take_turns", verifies)
def sets_take_turns(subject: Subject, case: Case) -> Measured:
    """Two sets of phases, each with strides of its own, in the memory of the larger: cycles of either are right, in
    whatever order, and metadata of the set that is not alive is refused. Another set like the first needs no memory.
    """
    world = world_of(setup_of(subject, case))
    cases = [
        replace(case, kind=str(kind))
        for kind in CYCLE
        if graphable(subject, kind) and is_declared(subject, replace(case, kind=str(kind)))
    ]
    sets = PhaseSets(world.device)
    try:
        deep, shallow = (_Set(each, cases, sets.add()) for each in (world, _shallower(world)))
    except UnsupportedStepError as refusal:
        return Measured(refusal=str(refusal))
    num_bytes, again = sets.num_bytes, sets.add()
    for phase in deep.phases:
        world.backend.capture(bucket_of(world, phase.case), world.paging(), within=again)
    compare_identical("bytes of all sets", torch.tensor([sets.num_bytes]), torch.tensor([num_bytes]))
    found = [each.cycle(case.seed + 10 * turn) for turn, each in enumerate((deep, shallow, shallow, deep, shallow))]
    given = torch.arange(7, device=world.device)
    compare_identical("copy in a set", shallow.within.like(given), given)
    try:
        deep.phases[0].meta.at(0, deep.phases[0].static[0].ancestors)
    except CaptureError:
        return nearest(found)
    raise CheckFailure("metadata", "that of a set whose memory another one has taken was not refused")
