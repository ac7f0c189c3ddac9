"""Poison: what no request owns, or no row sees, may hold anything and changes nothing."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_memory, compare_outputs, compare_ranges
from attn_backends.conformance.exercise import (
    batch_of,
    prepare_memory,
    run_case,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.situations import around_pages, eager, graph, joined, one_page_size, padded
from attn_backends.conformance.worlds import capacity_of
from spec_metadata import StepKind


def _measure(subject: Subject, case: Case) -> Measured:
    ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


def _without_over_read(subject: Subject) -> list[Case]:
    """Kinds whose kernel declares that it reads no key that no row sees."""
    cases = joined(eager(), graph(padded))(subject)
    return [case for case in cases if not subject.capabilities[StepKind(case.kind)].over_read]


@check("poison.unowned_finite", joined(eager(poison="finite"), graph(padded, poison="finite")))
def unowned_finite(subject: Subject, case: Case) -> Measured:
    """Finite garbage in unowned pages, which no NaN would betray, is neither seen nor overwritten."""
    return _measure(subject, case)


@check("poison.unowned_nan", _without_over_read)
def unowned_nan(subject: Subject, case: Case) -> Measured:
    """NaN in unowned pages, and past a request's tokens in its own last page, reaches no output."""
    return _measure(subject, case)


@check("poison.reserved_nan", lambda subject: [replace(case, reserved="nan") for case in _without_over_read(subject)])
def reserved_nan(subject: Subject, case: Case) -> Measured:
    """NaN in the reserved page reaches no real row, where the kernel declares no over-read."""
    return _measure(subject, case)


def _whole_pages(subject: Subject) -> list[Case]:
    """Draft chains whose last forward fills a page, or all of it but one token."""
    cases = [case for case in one_page_size(eager((StepKind.DRAFT_DECODE,)))(subject) if case.topk == 1]
    drafted = {case: capacity_of(case.page_size, case.topk, case.size).num_steps - 1 for case in cases}
    return [replace(case, lens=tuple(n - drafted[case] for n in around_pages(case)[:2])) for case in cases]


@check("poison.table_tail", joined(eager(), _whole_pages))
def table_tail(subject: Subject, case: Case) -> Measured:
    """Table entries past a request's tokens may hold anything, pages that don't exist among it, and are not planned."""
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    scene.poison_table_tails()
    prepare_memory(scene, case)
    meta, inputs = world.backend.init_forward_metadata(scene.step()), scene.inputs()
    compare_ranges(scene, meta.buffers)
    return compare_outputs(scene, inputs, run_forwards(world, meta, inputs))
