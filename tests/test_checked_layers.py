"""Layers are checked once for each cache and use, and refused as ever when a second one is wrong."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World, view_of
from attn_backends.contract.capabilities import Capabilities
from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata import StepKind
from tests.backend_worlds import MID, nothing_written, ready

SETUP = Setup(FA3Backend, CacheFormat.KV, 4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that kernels' capabilities were asked about."""
    found: list[str] = []
    reasons = Capabilities.layer_reasons

    def noted(self: Capabilities, layer: Any, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[str]:
        found.append(layer.id)
        return reasons(self, layer, dtype, cache_dtype)

    monkeypatch.setattr(Capabilities, "layer_reasons", noted)
    return found


def planned(world: World, kind: StepKind, *, captured: bool) -> tuple[ForwardMetadata, Any]:
    """Metadata of a step's first forward, and its inputs."""
    scene = Scene(world, Batch(kind, (5, 3)))
    scene.reset_memory()
    if not captured:
        return world.backend.init_forward_metadata(scene.step()).at(), scene.inputs()[0]
    meta = world.backend.capture(world.capacity.bucket(kind, 2), world.paging())
    world.backend.replay(meta, scene.step())
    return meta.at(), scene.inputs()[0]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_layer_is_checked_once_for_each_kind_of_step(asked: list[str], captured: bool) -> None:
    """Whatever the metadata: eager steps have new ones every time."""
    world = World(SETUP)
    for kind in (StepKind.DECODE, StepKind.TARGET_VERIFY):
        asked.clear()
        for _ in range(3):
            at, given = planned(world, kind, captured=captured)
            for layer in (world.layer, other := replace(world.layer, id=9)):
                world.backend.store(given.stored, world.cache, at, layer)
                world.backend.forward(given.q, world.cache, at, layer)
            assert other.id == 9
        assert asked == [world.layer.id, 9, 9, 9], "a layer that is made anew is another one"


@pytest.mark.parametrize("setup", MID, ids=str)
def test_what_is_wrong_is_refused_after_what_was_right(setup: Setup) -> None:
    """Another layer, another cache and another type, each after the right one, and the right one once more."""
    world, meta, given = ready(setup)
    narrow = view_of(world.memory[:9], setup.format)
    wide = replace(world.layer, head_dim=2 * world.layer.head_dim)
    for _ in range(2):
        world.backend.store(given.stored, world.cache, meta, world.layer)
        world.backend.forward(given.q, world.cache, meta, world.layer)
        wrong = [("entries have", given.q, world.cache, wide), ("holds 9 pages", given.q, narrow, world.layer)]
        for reason, q, cache, layer in [*wrong, (r"torch\.int32", given.q.int(), world.cache, world.layer)]:
            with pytest.raises(UnsupportedStepError, match=reason):
                world.backend.forward(q, cache, meta, layer)
        for reason, _, cache, layer in wrong:
            with nothing_written(world), pytest.raises(UnsupportedStepError, match=reason):
                world.backend.store(given.stored, cache, meta, layer)


def test_a_tree_is_another_use_than_a_chain() -> None:
    """A kernel may take a window over a chain and not over a tree."""
    world = World(replace(SETUP, topk=2))
    with_window = tuple(
        replace(
            each,
            capabilities={
                kind: replace(able, window=True, tree_window=False) for kind, able in each.capabilities.items()
            },
        )
        for each in FA3Backend.kernels
    )
    backend = type("Windowed", (FA3Backend,), {"kernels": with_window})
    taken = backend(world.capacity, world.geometry, kernel="torch", planner="torch")
    layer, scene = replace(world.layer, window=4), Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 3)))
    scene.reset_memory()
    tree = taken.init_forward_metadata(scene.step())
    chain = taken.init_forward_metadata(replace(scene.step(), tree_mask=None))
    given = scene.inputs()[0]
    taken.store(given.stored, world.cache, chain.at(), layer)
    with pytest.raises(UnsupportedStepError, match="over a draft tree"):
        taken.store(given.stored, world.cache, tree.at(), layer)


def test_nothing_is_kept_alive() -> None:
    """Neither a layer nor a cache, though the backend and captured metadata live on."""
    world = World(SETUP)
    at, given = planned(world, StepKind.DECODE, captured=True)
    layer, cache = replace(world.layer), view_of(world.memory, CacheFormat.KV)
    world.backend.forward(given.q, cache, at, layer)
    found = ref(layer), ref(cache)
    del layer, cache
    gc.collect()
    assert [each() for each in found] == [None, None]
    assert len(world.backend._layers._taken) == 0
