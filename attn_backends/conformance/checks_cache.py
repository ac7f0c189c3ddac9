"""Writes: exactly the owned slots change, to exactly the right bytes. The suite reads the cache with its own code."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs
from attn_backends.conformance.exercise import batch_of, prepare_memory, run_case, scene_of, setup_of, world_of
from attn_backends.conformance.situations import dtypes, eager, graph, joined, one_page_size
from spec_metadata import StepKind


@check("cache.writes_owned_slots", joined(eager(), graph()))
def writes_owned_slots(subject: Subject, case: Case) -> Measured:
    """A step changes the slots that it owns, to what the model handed in, and not one byte beside them."""
    ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return Measured()


@check("cache.writes_forward_by_forward", eager(poison="finite"))
def writes_forward_by_forward(subject: Subject, case: Case) -> Measured:
    """`store` of forward i writes the slots of forward i and no others, and `forward` writes nothing."""
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    before = prepare_memory(scene, case)
    meta = world.backend.init_forward_metadata(scene.step())
    for forward, given in enumerate(scene.inputs()):
        at = meta.at(forward, given.ancestors)
        world.store(given, at)
        compare_memory(scene, before, forward + 1)
        stored = world.memory.clone()
        world.attend(given, at)
        compare_identical(f"cache after the attention of forward {forward}", world.memory, stored)
    return Measured()


def _far(subject: Subject) -> list[Case]:
    cases = one_page_size(eager((StepKind.DECODE,)))(subject)
    return [replace(case, far=True, dtype=dtypes(subject, StepKind.DECODE)[-1]) for case in cases]


@check("cache.far_pages", _far)
def far_pages(subject: Subject, case: Case) -> Measured:
    """A cache of more than 2**31 elements is written and read where its slots are."""
    ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before)
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)
