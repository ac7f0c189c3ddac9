"""Schedules: what a vendor plans for a forward and a shape of layers, made once, planned again with its metadata."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attn_backends import CaptureError, UnsupportedStepError
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled, Schedules
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionLayer
from attn_backends.planning.metadata import check_frozen
from spec_metadata import Buffers, BufferSpec, InvalidStepError, StepKind, copy_step
from spec_metadata.buffers import BS, NUM_FORWARDS, Dim
from spec_metadata.capacity import Extent
from spec_metadata.visibility import HostLens
from tests.mutants.hosted import HostedBackend, ScheduledBackend
from tests.torch_kernels import torch_kernel

LAYER = AttentionLayer(0, 8, 2, 64, 64, 0.125)
SHAPE = LayerShape.of(LAYER, torch.bfloat16, torch.bfloat16)
OTHER = LayerShape.of(replace(LAYER, num_heads=16), torch.bfloat16, torch.bfloat16)
EXTENT = Extent(2, 1, 2, 2, 2, 16, 2, 8)
FOUR = Dim("4", lambda e: 4)
WORK = BufferSpec("work", torch.int32, (NUM_FORWARDS, FOUR), "work of a forward")
PARTIAL = BufferSpec("partial", torch.int32, (FOUR,), "partial results")


class Noted(Schedule):
    """Notes what it is asked."""

    def __init__(self, plan, shape, buffers):
        self.plan, self.shape, self.buffers, self.calls = plan, shape, dict(buffers), []

    def plan_host(self, lens):
        self.calls.append(("host", list(lens.kv_lens)))

    def refresh(self):
        self.calls.append(("device",))


def lens(*kv_lens: int) -> HostLens:
    """Exact lengths of one forward."""
    return HostLens((1,) * len(kv_lens), kv_lens, causal=True)


def workspaces():
    """Of two rows, which hold nothing."""
    buffers = {"work": torch.zeros(2, 4, dtype=torch.int32), "partial": torch.zeros(4)}
    return Buffers(buffers, EXTENT)


def schedules(schedule=Noted, exact=None):
    """Of two forwards with the plans "first" and "second", and the shapes that memory was asked for."""
    present, asked = torch_kernel(FA3Backend), []
    kernel = Kernel(
        "noted",
        present.launch,
        present.capabilities,
        present.unavailable_reasons,
        schedule=schedule,
        workspaces=(WORK,),
        scratch=(PARTIAL,),
    )

    def allocate(shape):
        asked.append(shape)
        return workspaces()

    return Schedules(kernel, ("first", "second"), exact, allocate), asked


def test_a_kernel_without_a_schedule_is_launched_on_the_plan():
    found, asked = schedules(schedule=None)
    assert found.planned(1, SHAPE) == "second"
    assert asked == []


def test_a_schedule_is_made_once_for_each_forward_and_shape():
    found, asked = schedules()
    first = found.planned(0, SHAPE)
    assert isinstance(first, Scheduled)
    assert (first.plan, first.schedule.plan, first.schedule.shape) == ("first", "first", SHAPE)
    assert found.planned(0, SHAPE).schedule is first.schedule
    assert found.planned(1, SHAPE).schedule is not first.schedule
    assert found.planned(0, OTHER).schedule is not first.schedule
    assert asked == [SHAPE, OTHER]


def test_a_schedule_owns_its_forwards_row_of_the_workspaces_and_all_of_the_scratch():
    found, _ = schedules()
    one, two = (found.planned(forward, SHAPE).schedule.buffers for forward in range(2))
    one["work"].fill_(1)
    assert one["work"].shape == (4,)
    assert two["work"].tolist() == [0, 0, 0, 0]
    assert one["partial"] is two["partial"]


def test_a_schedule_is_planned_on_the_host_and_then_on_the_device():
    found, _ = schedules(exact=[lens(3, 5), lens(4, 6)])
    assert found.planned(1, SHAPE).schedule.calls == [("host", [4, 6]), ("device",)]


def test_a_replay_plans_what_was_made_and_what_is_made_after_it():
    found, _ = schedules(exact=[lens(3, 5), lens(4, 6)])
    made = found.planned(0, SHAPE).schedule
    made.calls.clear()
    found.plan_host([lens(7, 9), lens(8, 10)])
    found.refresh()
    assert made.calls == [("host", [7, 9]), ("device",)]
    assert found.planned(1, OTHER).schedule.calls == [("host", [8, 10]), ("device",)]


def test_a_plan_of_the_host_is_never_made_inside_a_graph():
    hosted, _ = schedules(exact=[lens(3, 5), lens(4, 6)])
    with pytest.raises(CaptureError, match=r"kernel noted plans on the host.*run the region once"):
        RecordedGraph().capture(lambda: hosted.planned(0, SHAPE))
    made = hosted.planned(0, SHAPE).schedule
    assert RecordedGraph().capture(lambda: hosted.planned(0, SHAPE).schedule) is made
    on_device, _ = schedules()
    assert RecordedGraph().capture(lambda: on_device.planned(0, SHAPE).schedule).calls == [("device",)]


def world_of(backend, **options):
    """A world of a backend whose kernel has a schedule."""
    return World(Setup(backend, next(iter(backend.formats)), 16, dtype=torch.float32, **options))


def attend(world, scene, meta):
    """The output of the first forward."""
    given = scene.inputs(meta.step.bs)[0]
    world.backend.store(given.stored, world.cache, meta.at(), world.layer)
    return world.backend.forward(given.q, world.cache, meta.at(), world.layer)


def test_workspaces_of_graphs_are_declared_buffers_with_guard_words():
    world = world_of(ScheduledBackend, checking=True)
    scene = Scene(world, Batch(StepKind.DECODE, (5, 3)))
    scene.reset_memory()
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 2), world.paging())
    world.backend.replay(meta, scene.step())
    attend(world, scene, meta)
    world.backend.phases.check()
    planned = meta.schedules.planned(0, LayerShape.of(world.layer, torch.float32, torch.float32)).schedule.lens
    assert planned.tolist() == [6, 4]
    storage = planned.new_empty(0).set_(planned.untyped_storage())
    storage[planned.storage_offset() + planned.numel() :] = 0
    with pytest.raises(CaptureError, match="planned_lens"):
        world.backend.phases.check()


def test_workspaces_of_two_buckets_lie_in_one_arena():
    world = world_of(ScheduledBackend)
    places = []
    for bs in (2, 4):
        scene = Scene(world, Batch(StepKind.DECODE, (5, 3)))
        scene.reset_memory()
        meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, bs), world.paging())
        world.backend.replay(meta, scene.step())
        attend(world, scene, meta)
        shape = LayerShape.of(world.layer, torch.float32, torch.float32)
        places.append(meta.schedules.planned(0, shape).schedule.lens.data_ptr())
    assert places[0] == places[1]


def test_captured_phases_plan_into_workspaces_of_their_own():
    world, places = world_of(HostedBackend), {}
    for kind in (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND):
        scene = Scene(world, Batch(kind, (5, 3)))
        scene.reset_memory()
        meta = world.backend.capture(world.capacity.bucket(kind, 2), world.paging())
        world.backend.replay(meta, scene.step())
        attend(world, scene, meta)
        shape = LayerShape.of(world.layer, torch.float32, torch.float32)
        places[kind] = meta.schedules.planned(0, shape).schedule.lens.data_ptr()
    assert len(set(places.values())) == len(places)


@pytest.mark.parametrize("lens_given", [(), (5,)])
def test_padded_rows_are_planned_as_padding(lens_given):
    """A row past the real ones sees as many keys as it has query rows, on the host as on the device."""
    world = world_of(HostedBackend)
    kind = StepKind.TARGET_VERIFY
    meta = world.backend.capture(world.capacity.bucket(kind, 3), world.paging())
    first = Scene(world, Batch(kind, (5, 3)))
    first.reset_memory()
    world.backend.replay(meta, first.step())
    attend(world, first, meta)
    planned = meta.schedules.planned(0, LayerShape.of(world.layer, torch.float32, torch.float32)).schedule.lens
    width = first.width
    assert planned.tolist() == [5 + width, 3 + width, width]
    scene = Scene(world, Batch(kind, lens_given) if lens_given else Batch(StepKind.IDLE, ()))
    world.backend.replay(meta, scene.step())
    assert planned.tolist() == [*(n + width for n in lens_given), *[width] * (3 - len(lens_given))]


def test_a_step_without_exact_lengths_is_refused_before_a_graphs_inputs_change():
    world = world_of(HostedBackend)
    scene = Scene(world, Batch(StepKind.DECODE, (5, 3)))
    step = replace(scene.step(), seq_lens_cpu=None)
    with pytest.raises(UnsupportedStepError, match=r"exact lengths.*pass seq_lens_cpu"):
        world.backend.init_forward_metadata(step)
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 2), world.paging())
    with pytest.raises(UnsupportedStepError, match="exact lengths"):
        world.backend.copy_inputs(meta, step)
    assert meta.step.seq_lens.tolist() == [0, 0]
    copy_step(meta.step, step)
    assert meta.step.seq_lens.tolist() == [5, 3]


class GrowingScratchBackend(ScheduledBackend):
    """Its kernel wants a word of scratch a request."""

    kernels = (replace(ScheduledBackend.kernels[0], scratch=(BufferSpec("partial", torch.int32, (BS,), "partials"),)),)


def test_a_scratch_that_is_too_small_for_a_later_step_is_refused():
    """It is allocated once, for the first launch; a larger step must not be handed too little of it."""
    world = world_of(GrowingScratchBackend)
    scenes = [Scene(world, Batch(StepKind.DECODE, lens)) for lens in ((5, 3), (5,), (5, 3, 4))]
    for scene in scenes[:2]:
        scene.reset_memory()
        attend(world, scene, world.backend.init_forward_metadata(scene.step()))
    scenes[2].reset_memory()
    with pytest.raises(InvalidStepError, match=r"buffer partial.*needs .3,. but was allocated .2,."):
        attend(world, scenes[2], world.backend.init_forward_metadata(scenes[2].step()))


class PlanTuple(NamedTuple):
    """A plan of somebody who writes no dataclass."""

    lens: Tensor
    width: int


LENS = torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("captured", "planned", "name"),
    [
        (PlanTuple(LENS, 1), PlanTuple(LENS, 2), "PlanTuple.width"),
        (PlanTuple(LENS, 1), PlanTuple(LENS[1:], 1), "PlanTuple.lens"),
        (PlanTuple(LENS, 1), PlanTuple(LENS.clone(), 1), "PlanTuple.lens"),
        ({"lens": LENS}, {"lens": LENS.clone()}, "dict.lens"),
        ({"lens": LENS}, {}, "dict.lens"),
        ({}, {"lens": LENS}, "dict.lens"),
        ((LENS, (LENS, 3)), (LENS, (LENS, 4)), "tuple.1"),
        (LENS, LENS.clone(), "Tensor.value"),
        (7, 8, "int.value"),
        (WORK, replace(WORK, pad=1), "BufferSpec.pad"),
    ],
)
def test_a_plan_of_any_type_is_held_to_its_capture(captured, planned, name):
    check_frozen([captured], [captured])
    with pytest.raises(CaptureError, match=rf"{name} was .* at capture"):
        check_frozen([captured], [planned])
