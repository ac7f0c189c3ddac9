"""FlashInfer's own plans on the host, which a version of unknown format gets: a stand-in attends by them.

What holds whoever plans is in `tests/test_vendor_flashinfer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import World
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.planning.metadata import Metadata
from attn_backends.vendors import flashinfer_work
from benchmarks.rows import Stage
from benchmarks.speculation import NUM_STEPS
from benchmarks.timing import CudaClock
from spec_metadata import Step, StepKind
from spec_metadata.plans import csr
from spec_metadata.visibility import HostLens
from tests import checks
from tests.checks import check_eager, check_replay
from tests.flashinfer_stand_in import Module, OnCpuByVendor, WarmedUp, install, setup_of
from tests.gpu.syncs import (
    BATCH_SIZE,
    CONTEXT,
    PLACES,
    PLANNINGS,
    backends_of,
    cycles,
    num_host_plans,
    setting_of,
    worker_of,
)

module = pytest.fixture(install)


def one_key_less(rows: csr.CsrRows) -> csr.CsrRows:
    return rows._replace(kv_len=rows.kv_len - 1)


def a_page_later(rows: csr.CsrRows) -> csr.CsrRows:
    return rows._replace(kv_indptr=rows.kv_indptr + 1)


def uniform_rows(rows: csr.CsrRows) -> csr.CsrRows:
    bs = rows.kv_len.numel()
    return rows._replace(qo_indptr=(torch.arange(bs + 1) * (rows.qo_indptr[-1] // bs)).int())


def test_both_halves_plan_the_same_rows(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    scene = Scene(world, Batch(StepKind.TARGET_VERIFY, (9, 4)), seed=1)
    meta = world.backend.init_forward_metadata(scene.step())
    world.backend.forward(scene.inputs()[0].q, world.cache, meta.at(), world.layer)
    (rows,), (plan,) = module.plans, meta.plans
    for name in rows._fields:
        torch.testing.assert_close(getattr(rows, name), getattr(plan, name), rtol=0, atol=0)


@pytest.mark.parametrize("spoil", [one_key_less, a_page_later, uniform_rows])
def test_a_wrong_host_plan_is_seen(module: Module, spoil: Callable[[csr.CsrRows], csr.CsrRows]):
    batch = Batch(StepKind.PREFILL, (5, 0, 8), widths=(3, 2, 1))
    check_eager(World(setup_of(4, backend=OnCpuByVendor)), batch)
    module.spoil = spoil
    with pytest.raises(AssertionError):
        check_eager(World(setup_of(4, backend=OnCpuByVendor)), batch)


def test_a_replay_on_the_lengths_of_the_capture_is_seen(module: Module):
    module.keeps_first = True
    with pytest.raises(AssertionError):
        check_replay(
            World(setup_of(4, backend=OnCpuByVendor)),
            Batch(StepKind.DECODE, (9, 4)),
            Batch(StepKind.DECODE, (3, 12)),
            2,
        )


def test_a_replay_whose_plan_failed_is_refused_until_the_next(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    scene = Scene(world, Batch(StepKind.DECODE, (9, 4)))
    meta = world.backend.capture(scene.step().bucket(), world.paging())
    world.backend.forward(scene.inputs()[0].q, world.cache, meta.at(), world.layer)
    module.fails = True
    with pytest.raises(RuntimeError, match="Failed to plan MLA"):
        world.backend.replay(meta, scene.step())
    with pytest.raises(
        CaptureError, match=r"\(decode bs=2 .*\) was overwritten by a replay, refresh or capture that failed"
    ):
        meta.at()
    module.fails = False
    world.backend.replay(meta, scene.step())
    meta.at()


def test_a_step_without_host_lengths_is_refused(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    step = replace(Scene(world, Batch(StepKind.DECODE, (9, 4))).step(), seq_lens_cpu=None)
    with pytest.raises(UnsupportedStepError, match="pass seq_lens_cpu to the step"):
        world.backend.init_forward_metadata(step)
    meta = world.backend.capture(step.bucket(), world.paging())
    with pytest.raises(UnsupportedStepError, match="needs exact lengths"):
        world.backend.replay(meta, step)


def test_an_idle_replay_plans_padding(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    scene = Scene(world, Batch(StepKind.DECODE, (9, 4)))
    meta = world.backend.capture(scene.step().bucket(3), world.paging())
    world.backend.replay(meta, scene.step())
    world.backend.forward(scene.inputs(3)[0].q, world.cache, meta.at(), world.layer)
    world.backend.replay(meta, Step.idle(world.paging()))
    assert module.plans[-1].kv_len.tolist() == [1, 1, 1]


def test_a_capture_without_a_warm_up_is_refused(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    scene = Scene(world, Batch(StepKind.DECODE, (9, 4)))
    meta = world.backend.capture(scene.step().bucket(), world.paging())
    world.backend.replay(meta, scene.step())
    q = scene.inputs()[0].q

    def region() -> Tensor:
        return world.backend.forward(q, world.cache, meta.at(), world.layer).out

    with pytest.raises(CaptureError, match="run the region once"):
        RecordedGraph().capture(region)
    region()
    RecordedGraph().capture(region)


def test_a_graph_whose_grid_changed_is_refused(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    scene = Scene(world, Batch(StepKind.DECODE, (9, 4)))
    meta = world.backend.capture(scene.step().bucket(), world.paging())
    world.backend.forward(scene.inputs()[0].q, world.cache, meta.at(), world.layer)
    module.grid = 66
    with pytest.raises(CaptureError, match=r"\[1, 132, .*\] and are \[1, 66, "):
        world.backend.replay(meta, scene.step())


def test_a_draft_is_planned_once_for_all_forwards(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    scene = Scene(world, Batch(StepKind.DRAFT_DECODE, (9, 4)))
    meta = world.backend.init_forward_metadata(scene.step())
    for forward, given in enumerate(scene.inputs()):
        world.backend.forward(given.q, world.cache, meta.at(forward), world.layer)
    schedules = list(meta.schedules._made.values())
    assert len(schedules) == 1
    assert [rows.kv_len.tolist() for rows in module.plans] == [[9, 4]]


@pytest.mark.parametrize("planning", PLANNINGS)
@pytest.mark.parametrize("topk", [1, 4])
def test_a_cycle_plans_each_phase_once_from_what_the_host_knows_at_its_start(module: Module, topk: int, planning: str):
    """Whatever the number of layers and forwards."""
    stage = Stage(torch.device("cpu"), WarmedUp, CudaClock(), rounds=1)
    setting = replace(setting_of(PLACES[0], topk, stage), backend=OnCpuByVendor)
    (backend,) = backends_of(setting, ["flashinfer_fa3"]).values()
    launch, _ = cycles(worker_of(setting, backend, planning))
    module.plans.clear()
    launch.run()
    extended = CONTEXT + NUM_STEPS + 1
    expected = [CONTEXT, extended, extended] if topk == 1 else [CONTEXT, CONTEXT, extended]
    assert [rows.kv_len.tolist() for rows in module.plans] == [[length] * BATCH_SIZE for length in expected]
    assert num_host_plans(backend) == len(expected)


def test_buckets_of_a_kind_share_a_workspace_that_each_replay_plans_anew(module: Module):
    world = World(setup_of(4, backend=OnCpuByVendor))
    batches = [Batch(StepKind.DECODE, lens) for lens in ((9, 4), (3, 12, 5))]
    metas = [world.backend.capture(Scene(world, batch).step().bucket(), world.paging()) for batch in batches]
    for seed, (batch, meta) in enumerate([*zip(batches, metas, strict=True), (batches[0], metas[0])]):
        scene = Scene(world, batch, seed)
        scene.reset_memory(math.nan)
        world.backend.replay(meta, scene.step())
        (given,) = inputs = scene.inputs()
        world.backend.store(given.stored, world.cache, meta.at(), world.layer)
        checks.check_outputs(scene, inputs, [world.backend.forward(given.q, world.cache, meta.at(), world.layer)])
    works = {made.schedule._work.data_ptr() for meta in metas for made in meta.schedules._made.values()}
    assert len(works) == 1


VERIFY, EXTEND, DRAFT = StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND, StepKind.DRAFT_DECODE
LENS, OTHERS = (9, 4), (3, 12)


class InTurn:
    """Phases of one backend that are replayed in turn, each right for its lengths."""

    def __init__(self, module: Module) -> None:
        self.world, self.module = World(setup_of(4, backend=OnCpuByVendor)), module
        self.metas: dict[tuple[StepKind, int], Metadata] = {}

    def run(self, kind: StepKind, lens: tuple[int, ...]) -> int:
        """Replay a phase in a bucket of its size and attend; returns how often the module planned."""
        scene, planned = Scene(self.world, Batch(kind, lens), seed=len(self.module.plans)), len(self.module.plans)
        scene.reset_memory(math.nan)
        if (kind, len(lens)) not in self.metas:
            self.metas[kind, len(lens)] = self.world.backend.capture(scene.step().bucket(), self.world.paging())
        meta = self.metas[kind, len(lens)]
        self.world.backend.replay(meta, scene.step())
        inputs, outputs = scene.inputs(), []
        for forward, given in enumerate(inputs):
            at = meta.at(forward)
            self.world.backend.store(given.stored, self.world.cache, at, self.world.layer)
            outputs.append(self.world.backend.forward(given.q, self.world.cache, at, self.world.layer))
        checks.check_outputs(scene, inputs, outputs)
        return len(self.module.plans) - planned


@pytest.fixture
def in_turn(module: Module) -> InTurn:
    return InTurn(module)


def test_phases_have_lists_of_work_of_their_own(in_turn: InTurn):
    for lens in (LENS, OTHERS, (*LENS, 5), LENS[:1], LENS):
        assert [in_turn.run(kind, lens) for kind in (DRAFT, VERIFY, EXTEND)] == [1, 1, 1]
    works = {
        kind: {made.schedule._work.data_ptr() for made in meta.schedules._made.values()}
        for (kind, _), meta in in_turn.metas.items()
    }
    assert [len(places) for places in works.values()] == [1, 1, 1]
    assert len(set.union(*works.values())) == 3


def test_layers_of_another_shape_have_a_list_of_their_own(in_turn: InTurn):
    in_turn.run(VERIFY, LENS)
    in_turn.world.layer = replace(in_turn.world.layer, scale=0.5)
    assert [in_turn.run(VERIFY, lens) for lens in (LENS, OTHERS)] == [2, 2]


def test_a_list_of_work_with_another_grid_is_refused(in_turn: InTurn):
    in_turn.run(EXTEND, LENS)
    in_turn.module.grid = 66
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"\[1, 132, .*\] and are \[1, 66, "):
            in_turn.run(EXTEND, OTHERS)


@pytest.mark.parametrize(("query_lens", "num_heads"), [([16200], 128), ([64] * 520, 64), ([8] * 16200, 4)])
def test_more_work_than_the_list_holds_is_refused(query_lens: list[int], num_heads: int):
    lens = tuple(query_lens)
    (reason,) = flashinfer_work.work_reasons(HostLens(lens, lens, True), num_heads)
    assert "prefill in smaller chunks" in reason
    fewer = tuple(length // 2 for length in lens[: max(len(lens) // 2, 1)])
    assert not flashinfer_work.work_reasons(HostLens(fewer, fewer, True), num_heads)


def test_tiles_are_counted_exactly_where_they_might_not_fit():
    """8 tokens of 8 heads fill a tile of 64 rows, of which the list has room for 16128."""
    for bs, num_refused in ((16128, 0), (16129, 1)):
        lens = (8,) * bs
        assert len(flashinfer_work.work_reasons(HostLens(lens, lens, True), 8)) == num_refused
