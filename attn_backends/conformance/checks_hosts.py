"""Planning on the host: it is fed exact lengths or the step is refused, and never becomes part of a graph."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.checks_refusals import refused
from attn_backends.conformance.comparisons import compare_identical
from attn_backends.conformance.exercise import (
    Captured,
    batch_of,
    prepare_memory,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.situations import Cases, graph, one_page_size, situations
from attn_backends.errors import CaptureError
from attn_backends.graphs import RecordedGraph
from spec_metadata import StepKind


def _hosted(cases: Cases) -> Cases:
    """Of the cases, at one page size, those of kinds whose kernel plans on the host."""
    return lambda subject: [
        case for case in one_page_size(cases)(subject) if subject.capabilities[StepKind(case.kind)].needs_host_lens
    ]


def _steps(subject: Subject) -> list[Case]:
    kinds = subject.capabilities.keys() - {StepKind.PREFILL}
    eager = [case for kind in sorted(kinds) for case in situations(subject, kind)]
    prompts = [replace(case, lens=(5, 0), widths=(2, 3)) for case in situations(subject, StepKind.PREFILL)]
    return eager + prompts + graph()(subject)


@check("refusals.host_lens", _hosted(_steps))
def host_lens(subject: Subject, case: Case) -> Measured:
    """A step without exact lengths on the host, where the kernel plans there: refused before anything is written."""
    world = world_of(setup_of(subject, case))
    backend, what = world.backend, "a step without seq_lens_cpu"
    if case.path == "eager":
        scene = scene_of(world, batch_of(case), case.seed)
        prepare_memory(scene, case)
        return refused(what, scene, lambda: backend.init_forward_metadata(replace(scene.step(), seq_lens_cpu=None)))
    captured = Captured(world, case)
    before = {name: tensor.clone() for name, tensor in captured.meta.buffers.items()}
    scene = scene_of(world, batch_of(case), case.seed + 1)
    found = refused(what, scene, lambda: backend.replay(captured.meta, replace(scene.step(), seq_lens_cpu=None)))
    for name, old in before.items():
        compare_identical(f"captured {name} after a refusal", captured.meta.buffers[name], old)
    return found


@check("graph.host_plan_stays_outside", _hosted(graph()))
def host_plan_stays_outside(subject: Subject, case: Case) -> Measured:
    """Metadata that is first used inside a graph, or made there, is refused where the kernel plans on the host."""
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(replace(case, lens=case.captured_lens)), case.seed)
    prepare_memory(scene, case)
    kind, step, inputs = StepKind(case.kind), scene.step(), scene.inputs(case.bs)
    unused = world.backend.capture(world.capacity.bucket(kind, case.bs), world.paging())
    world.backend.replay(unused, step)
    regions = {
        "metadata first used in a graph": lambda: run_forwards(world, unused, inputs),
        "metadata made in a graph": lambda: world.backend.init_forward_metadata(step),
    }
    reasons = []
    for what, region in regions.items():
        try:
            RecordedGraph().capture(region)
        except CaptureError as refusal:
            reasons.append(str(refusal))
        if not reasons or "plans" not in reasons[-1]:
            raise CheckFailure(what, f"not refused for its plan on the host: {reasons[-1:] or 'it was recorded'}")
    return Measured(refusal="; ".join(reasons))
