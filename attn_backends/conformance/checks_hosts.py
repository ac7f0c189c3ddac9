"""Planning on the host: it is fed exact lengths or the step is refused, never becomes part of a graph, and may fail."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.checks_refusals import refused
from attn_backends.conformance.checks_unwritten import allocations_hold_nan
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs, nearest
from attn_backends.conformance.exercise import (
    Captured,
    batch_of,
    prepare_memory,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import Cases, eager, graph, one_page_size, situations
from attn_backends.errors import CaptureError
from attn_backends.graphs import RecordedGraph
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata import Step, StepKind


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


class _PlanFailed(Exception):
    """What the suite lets a plan fail by."""


class _Failing(TorchDispatchMode):
    """Counts operations. Raises at number `most`, before or after it ran; never, if that is 0."""

    def __init__(self, most: int = 0, *, written: bool = False) -> None:
        super().__init__()
        self.count, self.most, self.written = 0, most, written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += 1
        if self.count != self.most:
            return func(*args, **(kwargs or {}))
        if self.written:
            func(*args, **(kwargs or {}))
        raise _PlanFailed


def _fail(captured: Captured, step: Step, most: int, *, written: bool) -> None:
    """Let the plan of a replay fail at its last operation. most: operations of `copy_inputs`, which plans last."""
    try:
        with _Failing(most, written=written):
            captured.bring(step)
    except _PlanFailed:
        pass
    else:
        raise CheckFailure("replay", "its plan on the host failed, and the caller was not told")
    try:
        captured.meta.at(0, captured.static[0].ancestors)
    except CaptureError:
        return
    raise CheckFailure("metadata", "it was taken after a replay whose plan on the host failed")


@check("graph.host_plan_failed", _hosted(graph()))
def host_plan_failed(subject: Subject, case: Case) -> Measured:
    """A plan on the host that fails, before or after it wrote, raises to the caller, and its metadata is refused. The
    next replay is right, be it of these lengths again or of those before.
    """
    world, found = world_of(setup_of(subject, case)), []
    captured, before = Captured(world, case), replace(case, lens=case.captured_lens)

    def scene(of: Case) -> Scene:
        return scene_of(world, batch_of(of), case.seed + 1)

    captured.plan(scene(before).step())
    step = scene(case).step()
    with _Failing() as counted:
        captured.bring(step)
    for written, following in product((False, True), (case, before)):
        captured.plan(scene(before).step())
        _fail(captured, scene(case).step(), counted.count, written=written)
        ran = captured.run(scene(following), following)
        compare_memory(ran.scene, ran.before, padded=True)
        found.append(compare_outputs(ran.scene, ran.inputs, ran.outputs))
    return nearest(found)


@check("api.host_plan_failed", _hosted(eager()))
def eager_host_plan_failed(subject: Subject, case: Case) -> Measured:
    """A forward whose plan on the host failed, at whatever operation, gives the same bits when it is tried again."""
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    prepare_memory(scene, case)
    given = scene.inputs()[0]

    def planned() -> ForwardMetadata:
        return world.backend.init_forward_metadata(scene.step()).at(0, given.ancestors)

    at = planned()
    world.store(given, at)
    with _Failing() as first:
        expected = world.attend(given, at)
    with _Failing() as second:
        world.attend(given, at)
    for number, written in product(range(1, first.count - second.count + 1), (False, True)):
        with allocations_hold_nan():
            at = planned()
            with suppress(_PlanFailed), _Failing(number, written=written):
                world.attend(given, at)
                raise CheckFailure("forward", "its plan on the host failed, and the caller was not told")
            compare_identical("output, tried again", world.attend(given, at).out, expected.out)
    return Measured()
