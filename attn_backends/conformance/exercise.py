"""Running a backend the way an engine does: eager steps, and graphs captured on one batch and replayed on others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.conformance.cases import CACHE_DTYPES, Case
from attn_backends.conformance.catalogue import CheckFailure, Subject
from attn_backends.conformance.compressed_scenes import CompressedScene
from attn_backends.conformance.compressed_worlds import (
    COMPRESSIONS,
    REAL_PAGE,
    SHORT,
    SHORT_LAYERS,
    CompressedWorld,
    is_compressed,
    small,
)
from attn_backends.conformance.inputs import ForwardInputs
from attn_backends.conformance.requests import Batch
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.contract.capabilities import DTYPES
from attn_backends.errors import CaptureError
from attn_backends.graphs import CudaGraph, Graph, RecordedGraph
from attn_backends.layer import AttentionOutput
from attn_backends.planning.metadata import WRITE_SLOTS, Metadata
from spec_metadata import Bucket, Step, StepKind, TokenBucket, pad_step, padding_step

CONTENTS = {"nan": float("nan"), "finite": 77.0}


def setup_of(subject: Subject, case: Case) -> Setup:
    """The setup of a case. Compressed keys have small ratios but on the largest pages."""
    format = CompressedFormat(case.format) if case.format in list(CompressedFormat) else CacheFormat(case.format)
    backend = subject.backend
    if is_compressed(backend) and case.page_size != REAL_PAGE:
        backend = small(backend, SHORT if case.layer in SHORT_LAYERS else COMPRESSIONS)
    return Setup(
        backend,
        format,
        case.page_size,
        case.topk,
        DTYPES[case.dtype],
        block_table=case.table == "block",
        checking=False,
        kernel=subject.kernel,
        device=subject.device,
        index=getattr(torch, case.index),
        far=case.far,
        cache_dtype=CACHE_DTYPES[case.cache_dtype] if case.cache_dtype else None,
        layer=case.layer,
        size=case.size,
    )


def world_of(setup: Setup) -> World:
    """The world of a setup."""
    return (CompressedWorld if setup.format is CompressedFormat.COMPRESSED else World)(setup)


def scene_of(world: World, batch: Batch, seed: int = 0, placement: int | None = None, room: int = 0) -> Scene:
    """A batch in a world; arguments as of `Scene`."""
    return (CompressedScene if isinstance(world, CompressedWorld) else Scene)(world, batch, seed, placement, room)


def batch_of(case: Case) -> Batch:
    """The batch that is run."""
    if not case.lens:
        return Batch(StepKind.IDLE, ())
    return Batch(StepKind(case.kind), case.lens, case.widths, case.bounded, ragged=case.ragged)


def captured_batch_of(case: Case) -> Batch:
    """The batch that its graph is captured on."""
    return Batch(StepKind(case.kind), case.captured_lens, case.captured_widths, ragged=case.ragged)


@dataclass
class Ran:
    """A scene that was run: what the model handed in, what came out, and the memory before it."""

    scene: Scene
    inputs: list[ForwardInputs]
    outputs: list[AttentionOutput]
    before: Tensor
    meta: Metadata


def run_case_eagerly(subject: Subject, case: Case) -> Ran:
    """The case's batch, eagerly."""
    return run_eagerly(scene_of(world_of(setup_of(subject, case)), batch_of(case), case.seed), case)


def run_eagerly(scene: Scene, case: Case) -> Ran:
    """A scene, eagerly."""
    before = prepare_memory(scene, case)
    meta = scene.world.backend.init_forward_metadata(scene.step())
    inputs = scene.inputs()
    return Ran(scene, inputs, run_forwards(scene.world, meta, inputs), before, meta)


def prepare_memory(scene: Scene, case: Case) -> Tensor:
    """Write the committed tokens, and the case's poison elsewhere. Returns a copy."""
    return scene.reset_memory(CONTENTS[case.poison], CONTENTS[case.reserved])


def run_forwards(world: World, meta: Metadata, inputs: list[ForwardInputs]) -> list[AttentionOutput]:
    """Store and attend, forward after forward."""
    return [run_forward(world, meta, forward, given) for forward, given in enumerate(inputs)]


def run_forward(world: World, meta: Metadata, forward: int, given: ForwardInputs) -> AttentionOutput:
    """Store and attend in one forward."""
    at = meta.at(forward, given.ancestors)
    world.store(given, at)
    return world.attend(given, at)


def run_case_through_graph(subject: Subject, case: Case) -> Ran:
    """The case's batch, replayed by a graph that was captured on another."""
    world = world_of(setup_of(subject, case))
    captured = Captured(world, case)
    return captured.run(scene_of(world, batch_of(case), case.seed + 1), case)


def bucket_of(world: World, case: Case) -> Bucket | TokenBucket:
    """The bucket of a case's graph."""
    kind = StepKind(case.kind)
    return TokenBucket(kind, case.bs, case.num_tokens) if case.num_tokens else world.capacity.bucket(kind, case.bs)


class Captured:
    """The forwards of a case's captured batch as a graph. scene: that batch; its inputs are the graph's static ones."""

    def __init__(self, world: World, case: Case) -> None:
        self.world, self.case = world, case
        self.scene = scene_of(world, captured_batch_of(case), case.seed)
        prepare_memory(self.scene, case)
        backend, bucket = world.backend, bucket_of(world, case)
        self.meta = self.capture(bucket)
        self.addresses = _addresses(self.meta)
        self.plan(self.scene.step())
        self.static = self.scene.inputs(case.bs, case.num_tokens)
        if backend.kernel_of(self.scene.batch.kind).schedule is not None:
            self._region()  # a vendor's schedules are made by the first forward, which a graph may not hold
        self.graph = new_graph(world.device)
        self.outputs = self.graph.capture(self._region)

    def _region(self) -> list[AttentionOutput]:
        if self.case.refresh:
            self.world.backend.refresh(self.meta)
        return run_forwards(self.world, self.meta, self.static)

    def capture(self, bucket: Bucket | TokenBucket) -> Metadata:
        """The metadata of the graph."""
        return self.world.backend.capture(bucket, self.world.paging())

    def plan(self, step: Step) -> None:
        """Make the metadata that of a step."""
        self.world.backend.replay(self.meta, step)

    def bring(self, step: Step) -> None:
        """Make what the metadata is planned from that of a step."""
        self.world.backend.copy_inputs(self.meta, step)

    def load(self, scene: Scene) -> Step:
        """Make inputs and metadata those of a scene. Returns the step."""
        step = self.fill(scene)
        (self.bring if self.case.refresh else self.plan)(step)
        return step

    def fill(self, scene: Scene) -> Step:
        """Make what the model hands in that of a scene. Returns the step."""
        if scene.batch.kind is not StepKind.IDLE:
            fill(self.static, scene.inputs(self.case.bs, self.case.num_tokens))
        return scene.step()

    def run(self, scene: Scene, case: Case) -> Ran:
        """Replay on a scene. The outputs are copies, the inputs too."""
        if scene.batch.kind is StepKind.IDLE:
            scene.num_forwards, scene.rows = self.scene.num_forwards, [[]] * self.scene.num_forwards
        before = prepare_memory(scene, case)
        self.load(scene)
        return self.replay(scene, before)

    def replay(self, scene: Scene, before: Tensor) -> Ran:
        """Replay what was loaded; never on what another graph's metadata left, which may index anything."""
        assert self.meta.captured is not None, "it was captured"
        try:
            self.meta.captured.check_phase()
            self.graph.replay()
        except CaptureError as error:
            raise CheckFailure("metadata", str(error)) from error
        outputs = [AttentionOutput(out.clone(), lse.clone()) for out, lse in self.outputs]
        return Ran(scene, self.static, outputs, before, self.meta)

    def padded(self, scene: Scene) -> Step:
        """The scene's step in the layout of this graph, from fresh tensors."""
        assert self.meta.bucket is not None
        if scene.batch.kind is not StepKind.IDLE:
            return pad_step(scene.step(), self.meta.bucket, self.world.capacity)
        return padding_step(self.meta.bucket, self.world.paging(), self.world.capacity)


def new_graph(device: torch.device) -> Graph:
    """A graph of the device."""
    return CudaGraph() if device.type == "cuda" else RecordedGraph()


def fill(static: list[ForwardInputs], given: list[ForwardInputs]) -> None:
    """Make a graph's inputs others."""
    for ours, theirs in zip(static, given, strict=True):
        for destination, source in zip(ours.tensors(), theirs.tensors(), strict=True):
            destination.copy_(source)


def run_case(subject: Subject, case: Case) -> Ran:
    """The case's batch on its path."""
    return (run_case_through_graph if case.path == "graph" else run_case_eagerly)(subject, case)


def _addresses(meta: Metadata) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where every tensor of metadata lies, plans included."""
    found = {name: (t.data_ptr(), t.stride()) for name, t in meta.buffers.items()}
    for forward, plan in enumerate(meta.plans):
        for name in getattr(plan, "__dataclass_fields__", {}):
            value = getattr(plan, name)
            if isinstance(value, Tensor):
                found[f"plan {forward}: {name}"] = (value.data_ptr(), value.stride())
    return found


def check_addresses(captured: Captured) -> None:
    """No tensor of captured metadata was replaced by another."""
    for name, (address, stride) in _addresses(captured.meta).items():
        if captured.addresses[name] != (address, stride):
            raise CheckFailure(name, "the graph reads the tensor that it was captured with, and this is another one")


def check_guarded(backend: AttentionBackend, meta: Metadata) -> None:
    """In checking mode, nothing was written next to a buffer of a backend, and what is then is noticed."""
    try:
        backend.phases.check()
    except Exception as error:
        raise CheckFailure("buffers", str(error)) from error
    slots = meta.buffers[WRITE_SLOTS.name]
    before = slots.as_strided((1,), (1,), slots.storage_offset() - 1)
    guard = before.clone()
    before.zero_()
    try:
        backend.phases.check()
    except CaptureError:
        before.copy_(guard)
    else:
        raise CheckFailure("buffers", "a write next to them was not noticed")


def check_refuses_others(first: Captured, second: Captured, scene: Scene, others: Scene) -> None:
    """A recorded graph does not run once another phase that shares its table is planned for different requests.

    scene: of the first phase. others: of the second.
    """
    assert first.meta.captured is not None, "it was captured"
    if not first.meta.captured.phase.tables or not isinstance(first.graph, RecordedGraph):
        return
    first.load(scene)
    second.load(others)
    try:
        first.graph.replay()
    except CaptureError:
        return
    raise CheckFailure("replay", f"ran ({first.meta.bucket}) on the pages of other requests")
