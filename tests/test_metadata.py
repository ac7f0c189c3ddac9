"""Metadata as it is handed on: one forward of it, to the backend that planned it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.cache import CacheFormat, PagedLatent
from attn_backends.conformance.exercise import run_forwards
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import Metadata, own_drafted
from spec_metadata import InvalidStepError, Step, StepKind
from spec_metadata.visibility import chain_parts
from tests.backend_worlds import MID, nothing_written
from tests.checks import check_identical
from tests.launches import CountsLaunches

FORWARDS = {StepKind.DECODE: 1, StepKind.TARGET_VERIFY: 1, StepKind.DRAFT_DECODE: 2}


@pytest.fixture
def world() -> World:
    return World(Setup(FA3Backend, CacheFormat.KV, 16))


def planned(world: World, kind: StepKind) -> tuple[Metadata, Scene]:
    """A step of two requests, planned."""
    scene = Scene(world, Batch(kind, (5, 3)))
    scene.reset_memory()
    return world.backend.init_forward_metadata(scene.step()), scene


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_that_the_step_does_not_plan(world: World, kind: StepKind) -> None:
    meta, _ = planned(world, kind)
    for forward in (FORWARDS[kind], -1):
        with pytest.raises(InvalidStepError, match=f"forward {forward} of a {kind} step that plans {FORWARDS[kind]}"):
            meta.at(forward)


def test_an_idle_step_has_any_forward(world: World) -> None:
    meta = world.backend.init_forward_metadata(Step.idle(world.paging()))
    assert meta.at(3).write_slots.shape == (0,)


def check_refused(world: World, meta: Any, scene: Scene, reason: str) -> None:
    """Neither is anything written nor attended to."""
    given, before = scene.inputs()[0], world.memory.clone()
    calls: list[Callable[[], Any]] = [
        lambda: world.backend.store(given.stored, world.cache, meta, world.layer),
        lambda: world.backend.forward(given.q, world.cache, meta, world.layer),
    ]
    for call in calls:
        with pytest.raises(UnsupportedStepError, match=reason):
            call()
    assert torch.equal(world.memory.nan_to_num(), before.nan_to_num())


def test_metadata_of_a_whole_step(world: World) -> None:
    meta, scene = planned(world, StepKind.DECODE)
    check_refused(world, meta, scene, r"fa3: a Metadata where one forward's metadata belongs\. Instead: pass meta\.at")


def test_metadata_of_another_backend(world: World) -> None:
    other = ReferenceBackend(world.capacity, world.geometry)
    _, scene = planned(world, StepKind.DECODE)
    meta = other.init_forward_metadata(scene.step())
    check_refused(world, meta.at(), scene, "metadata of a decode step that another reference planned")


def test_metadata_of_a_kind_that_the_backend_was_not_asked_for(world: World) -> None:
    _, scene = planned(world, StepKind.DECODE)
    meta = world.backend.init_forward_metadata(scene.step())
    world.backend = FA3Backend(world.capacity, world.geometry, kernel={StepKind.PREFILL: "torch"})
    check_refused(world, meta.at(), scene, "a decode step that another fa3 planned")


def test_a_cache_of_another_format_is_refused_by_name(world: World) -> None:
    narrow = type("KeysAndValues", (FA3Backend,), {"formats": frozenset({CacheFormat.KV})})
    backend = narrow(world.capacity, world.geometry)
    _, scene = planned(world, StepKind.DECODE)
    at, given = backend.init_forward_metadata(scene.step()).at(), scene.inputs()[0]
    latent = PagedLatent(torch.zeros(world.geometry.num_pages, 16, 32), 16)
    with pytest.raises(UnsupportedStepError, match=r"a cache of latent \(it takes kv\)"):
        backend.forward(given.q, latent, at, world.layer)


@pytest.mark.parametrize("kind", [StepKind.TARGET_VERIFY, StepKind.DRAFT_DECODE])
def test_a_tree_of_more_tokens_than_a_gpus_kernel_reads(kind: StepKind) -> None:
    """Refused with the step, before a token is stored."""
    small, large = (World(Setup(FA3Backend, CacheFormat.KV, 16, topk)) for topk in (2, 200))
    for world, reasons in ((small, []), (large, ["a draft tree of 600 tokens per request (on a GPU at most 512)"])):
        step = Scene(world, Batch(kind, (5, 3))).step()
        assert not world.backend.unsupported_reasons(step)
        world.backend.device = torch.device("cuda")
        *found, elsewhere = world.backend.unsupported_reasons(step)
        assert found == reasons
        assert elsewhere == "tensors on cpu (the backend was built for cuda)"


OWNED = [(setup.backend, setup.format) for setup in MID]


@pytest.mark.parametrize(("backend", "format"), OWNED)
def test_metadata_of_another_backend_of_the_same_class(backend: type[AttentionBackend], format: CacheFormat) -> None:
    """A smaller one's page tables would hide the end of every context."""
    world = World(Setup(backend, format, 32, checking=False))
    small = replace(world.capacity, max_context=world.capacity.max_context // 2)
    other = backend(small, world.geometry, kernel="torch")
    scene = Scene(world, Batch(StepKind.DECODE, (5, 3)))
    scene.reset_memory()
    step, bucket = scene.step(), world.capacity.bucket(StepKind.DECODE, 4)
    said = f"metadata of a decode step that another {backend.name} planned, for max_bs=5 and max_context="
    said += f"{small.max_context} \\(here 5 and {world.capacity.max_context}\\)"
    check_refused(world, other.init_forward_metadata(step).at(), scene, said)
    captured = other.capture(bucket, step.paging)
    other.replay(captured, step)
    check_refused(world, captured.at(), scene, said)
    calls: list[Callable[[], None]] = [
        lambda: world.backend.replay(captured, step),
        lambda: world.backend.copy_inputs(captured, step),
        lambda: world.backend.refresh(captured),
    ]
    for call in calls:
        with nothing_written(world, captured), pytest.raises(UnsupportedStepError, match=said):
            call()
    captured.at()  # the memory is still let to it


REUSED = [
    pytest.param(setup.backend, setup.format, topk, kind, id=f"{setup.backend.name}-{setup.format}-topk{topk}-{kind}")
    for setup in MID
    for topk in (1, 3)
    for kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)
]


@pytest.mark.parametrize(("backend", "format", "topk", "kind"), REUSED)
def test_an_eager_step_owns_what_its_forwards_read(
    backend: type[AttentionBackend], format: CacheFormat, topk: int, kind: StepKind
) -> None:
    """A worker fills its buffers for the next step while the forwards of this one are still to come."""
    world = World(Setup(backend, format, 32, topk, index=torch.int32))
    scene = Scene(world, Batch(kind, (5, 3)))
    scene.reset_memory()
    found = []
    for is_reused in (False, True):
        step = scene.step()  # its slots are int64
        meta = world.backend.init_forward_metadata(step)
        if is_reused:
            for tensor in (step.seq_lens, step.out_cache_loc):
                tensor.zero_()
            if step.tree_mask is not None:
                step.tree_mask.fill_(True)
        found.append([each.out for each in run_forwards(world, meta, scene.inputs())])
    for kept, reused in zip(*found, strict=True):
        check_identical("out", reused, kept)


@pytest.mark.parametrize("kind", [StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY])
def test_what_an_eager_tree_owns_takes_one_launch(kind: StepKind) -> None:
    world = World(Setup(FA3Backend, CacheFormat.KV, 16, 3))
    meta, scene = planned(world, kind)
    step = scene.step()
    with CountsLaunches() as counts:
        own_drafted(step, meta.buffers["write_slots"])
    assert counts.num == 1


def test_what_an_eager_chain_owns_takes_no_look_at_slots_that_were_left_out() -> None:
    """A copy of those that were planned, and a constant."""
    meta, scene = planned(World(Setup(FlashInferMLABackend, CacheFormat.LATENT, 32)), StepKind.DRAFT_DECODE)
    given = scene.step()
    left_out, slots = replace(given, out_cache_loc=None), given.flat_slots().view(2, -1)
    with CountsLaunches() as counts:
        parts = chain_parts(left_out, meta.buffers["write_slots"])
    assert counts.num == 2
    assert [part.slots.tolist() for part in parts] == [slots[:, :1].tolist(), slots[:, :2].tolist()]
