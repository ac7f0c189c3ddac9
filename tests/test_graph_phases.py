"""A recorded graph knows which bucket of its phase was planned last, and for whom; a CUDA graph attends to any."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.backend import Metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.exercise import run_forward
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import CaptureError
from attn_backends.graphs import RecordedGraph
from spec_metadata import RequestTable, StepKind

VERIFY, EXTEND = StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND


class Phase:
    """One phase of a world, recorded on three requests. planned_in_graph, loaded_in_graph: what its graph does too."""

    def __init__(
        self,
        world: World,
        kind: StepKind,
        bs: int = MAX_BS,
        *,
        planned_in_graph: bool = False,
        loaded_in_graph: bool = False,
    ) -> None:
        self.backend, self.scene = world.backend, Scene(world, Batch(kind, (5, 3, 4)))
        self.scene.reset_memory()
        self.meta: Metadata = self.backend.capture(world.capacity.bucket(kind, bs), world.paging())
        self.planned_in_graph = planned_in_graph
        static, self.step = self.scene.inputs(bs)[0], self.scene.step()
        self.load()

        def region() -> torch.Tensor:
            if loaded_in_graph:
                self.backend.replay(self.meta, self.step)
            if planned_in_graph:
                self.backend.refresh(self.meta)
            return run_forward(world, self.meta, 0, static).out

        self.graph = RecordedGraph()
        self.out = self.graph.capture(region)

    def load(self) -> None:
        """Make the static memory hold this phase's step."""
        (self.backend.copy_inputs if self.planned_in_graph else self.backend.replay)(self.meta, self.step)


@pytest.fixture
def world() -> World:
    return World(Setup(FA3Backend, CacheFormat.KV, 16, checking=False))


@pytest.mark.parametrize("planned_in_graph", [False, True])
def test_two_phases_loaded_before_two_graphs(world: World, planned_in_graph: bool) -> None:
    """Each has memory of its own, and they share a table of the same requests."""
    verify, extend = (Phase(world, kind, planned_in_graph=planned_in_graph) for kind in (VERIFY, EXTEND))
    found = []
    for phases in ((verify, extend), (extend, verify)):
        for phase in phases:
            phase.load()
        for phase in (verify, extend):
            phase.graph.replay()
        found.append([phase.out.clone() for phase in (verify, extend)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert not found[0][0][: 3 * verify.scene.width].isnan().any()


@pytest.mark.parametrize("how", ["flipped", "fewer"])
def test_other_requests_loaded_before_two_graphs(world: World, how: str) -> None:
    """On one request table, whose pages two phases have in one place: those of the requests planned last, and the
    reserved page in the rows that padding has there.
    """
    verify, extend = Phase(world, VERIFY), Phase(world, EXTEND)
    paging = extend.step.paging
    assert isinstance(paging, RequestTable)
    if how == "flipped":
        extend.step = replace(extend.step, paging=replace(paging, rows=paging.rows.flip(0)))
    else:
        extend.step = Scene(world, Batch(EXTEND, (5, 3))).step()  # of the first two
    verify.load()
    extend.load()
    kept = verify.out.clone()
    with pytest.raises(CaptureError, match=r"\(target_verify bs=5 .* by a replay of \(draft_extend .* other requests"):
        verify.graph.replay()
    assert torch.equal(verify.out, kept), "nothing ran"
    extend.graph.replay()
    verify.load()
    verify.graph.replay()


@pytest.mark.parametrize("planned_in_graph", [False, True])
def test_two_buckets_of_a_phase_loaded_before_two_graphs(world: World, planned_in_graph: bool) -> None:
    large, small = (Phase(world, VERIFY, bs, planned_in_graph=planned_in_graph) for bs in (MAX_BS, 3))
    for phase in (large, small):
        phase.load()
    kept = large.out.clone()
    with pytest.raises(CaptureError, match=r"of \(target_verify bs=5 .*overwritten by .* \(target_verify bs=3 .*again"):
        large.graph.replay()
    assert torch.equal(large.out, kept), "nothing ran"
    small.graph.replay()
    large.load()
    large.graph.replay()
    assert not large.out[: 3 * large.scene.width].isnan().any()
    with pytest.raises(CaptureError, match=r"of \(target_verify bs=3 .*overwritten"):
        small.graph.replay()


def test_a_graph_that_loads_its_own_step_takes_the_phase(world: World) -> None:
    large, small = Phase(world, VERIFY, loaded_in_graph=True), Phase(world, VERIFY, 3)
    small.load()
    large.graph.replay()
    with pytest.raises(CaptureError, match=r"of \(target_verify bs=3 .*overwritten by .* \(target_verify bs=5"):
        small.graph.replay()


def test_a_capture_takes_the_phase_too(world: World) -> None:
    verify, extend = Phase(world, VERIFY), Phase(world, EXTEND)
    verify.load()
    extend.load()
    world.backend.capture(world.capacity.bucket(VERIFY, 2), world.paging())
    with pytest.raises(CaptureError, match=r"of \(target_verify bs=5"):
        verify.graph.replay()
    extend.graph.replay()


def test_captured_metadata_says_what_it_is_before_its_first_replay(world: World) -> None:
    """A failing assertion of a worker's test prints it."""
    meta = world.backend.capture(world.capacity.bucket(VERIFY, MAX_BS), world.paging())
    assert "target_verify" in repr(meta)
