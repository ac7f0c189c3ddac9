"""Checks of a backend as plain functions that raise AssertionError; the planted defects are run through the same."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.backend import Metadata
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs
from attn_backends.conformance.scenes import Batch, ForwardInputs, Scene
from attn_backends.conformance.worlds import World
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionOutput
from spec_metadata import Extent, Step, StepKind, allocate, input_specs, pad_step, static_step


def check_eager(world: World, batch: Batch, poison: float = float("nan")) -> None:
    """An eager step: every forward's writes, outputs and LSE against the oracle."""
    scene = Scene(world, batch, seed=1)
    before = scene.reset_memory(poison)
    meta = world.backend.init_forward_metadata(scene.step())
    inputs = scene.inputs()
    outputs = []
    for forward, given in enumerate(inputs):
        outputs.append(_run_forward(world, meta, forward, given))
        check_memory(scene, before, forward + 1)
    check_outputs(scene, inputs, outputs)


def check_replay(
    world: World,
    captured: Batch,
    replayed: Batch,
    bs: int,
    poison: float = float("nan"),
    *,
    record_refresh: bool = False,
) -> None:
    """A graph captured on one batch and replayed on another: against the oracle, and equal to the eager step on
    the same padded layout bit for bit. record_refresh: the plan is the graph's first node.
    """
    backend = world.backend
    first = Scene(world, captured, seed=2)
    before = first.reset_memory(poison)
    bucket = world.capacity.bucket(captured.kind, bs)
    meta = backend.capture(bucket, world.paging())
    backend.replay(meta, first.step())
    static = first.inputs(bs)

    def region() -> list[AttentionOutput]:
        if record_refresh:
            backend.refresh(meta)
        return _run(world, meta, static)

    graph = RecordedGraph()
    outputs = graph.capture(region)
    check_memory(first, before, padded=True)
    check_outputs(first, static, outputs)
    addresses = {name: (t.data_ptr(), t.stride()) for name, t in meta.buffers.items()}

    second = Scene(world, replayed, seed=3)
    if replayed.kind is StepKind.IDLE:
        second.num_forwards, second.rows = first.num_forwards, [[]] * first.num_forwards
    before = second.reset_memory(poison)
    given = second.inputs(bs) if replayed.kind is not StepKind.IDLE else static
    for destination, source in zip(_flat(static), _flat(given), strict=True):
        destination.copy_(source)
    assert meta.captured is not None
    meta.captured.phase.reset()  # a planner leaves what other phases may see, which a fresh buffer does not hold
    (backend.copy_inputs if record_refresh else backend.replay)(meta, second.step())
    eager = backend.init_forward_metadata(_padded(world, second, meta, bs))
    if not record_refresh:
        check_same_metadata(world, meta, eager)
    graph.replay()
    check_same_metadata(world, meta, eager)
    check_memory(second, before, padded=True)
    check_outputs(second, static, outputs)
    assert addresses == {name: (t.data_ptr(), t.stride()) for name, t in meta.buffers.items()}, "a buffer moved"
    replay = [AttentionOutput(out.clone(), lse.clone()) for out, lse in outputs]
    after = world.memory.clone()

    world.memory.copy_(before)
    expected = _run(world, eager, static)
    check_identical("memory", after, world.memory)
    for forward, (one, two) in enumerate(zip(replay, expected, strict=True)):
        check_identical(f"output of forward {forward}", one.out, two.out)
        check_identical(f"LSE of forward {forward}", one.lse, two.lse)
    backend.phases.check()


def check_outputs(scene: Scene, inputs: list[ForwardInputs], outputs: list[AttentionOutput]) -> None:
    """Every real row's output and LSE against the oracle."""
    compare_outputs(scene, inputs, outputs)


def check_memory(scene: Scene, before: Tensor, forwards: int | None = None, *, padded: bool = False) -> None:
    """Exactly the owned slots changed, to exactly the right bytes. padded: padding may write the reserved page."""
    compare_memory(scene, before, forwards, padded=padded)


def check_same_metadata(world: World, one: Metadata, two: Metadata) -> None:
    """All declared integer buffers of two metadata of a step kind are equal."""
    names = ["write_slots", *(spec.name for spec in world.backend.buffers(one.step.kind))]
    for name in names:
        check_identical(name, one.buffers[name], two.buffers[name])


def check_identical(what: str, one: Tensor, two: Tensor) -> None:
    """Same shape, type and bytes."""
    compare_identical(what, one, two)


def _padded(world: World, scene: Scene, meta: Metadata, bs: int) -> Step:
    if scene.batch.kind is not StepKind.IDLE:
        return pad_step(scene.step(), scene.step().bucket(bs), world.capacity)
    assert meta.bucket is not None
    specs, paging = input_specs(meta.bucket, world.paging()), world.paging()
    extent = Extent.of_bucket(meta.bucket, world.capacity)
    return static_step(meta.bucket, paging, allocate(specs, extent, torch.device("cpu")))


def _run(world: World, meta: Metadata, inputs: list[ForwardInputs]) -> list[AttentionOutput]:
    return [_run_forward(world, meta, forward, given) for forward, given in enumerate(inputs)]


def _run_forward(world: World, meta: Metadata, forward: int, given: ForwardInputs) -> AttentionOutput:
    at = meta.at(forward, given.ancestors)
    world.backend.store(given.stored, world.cache, at, world.layer)
    return world.backend.forward(given.q, world.cache, at, world.layer)


def _flat(inputs: list[ForwardInputs]) -> list[Tensor]:
    return [tensor for given in inputs for tensor in given.tensors()]
