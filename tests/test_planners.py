"""Which planner a backend takes, and what of a step a replay asks about again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance import Outcome, Subject, run_case, run_conformance, selected_cases, worlds
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import BackendUnavailableError, UnsupportedStepError
from attn_backends.planning import planners
from attn_backends.planning.planners import choose_planner
from attn_backends.registry import get_backend
from attn_backends.selection import providers
from spec_metadata import (
    BlockTable,
    BoundStep,
    Buffers,
    CacheGeometry,
    Capacity,
    InvalidStepError,
    RequestTable,
    Step,
    StepKind,
)
from spec_metadata.admission import check_table_room, most_committed
from tests.triton_interpreter import interpreted

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "has_fused", "runs", "name", "reason"),
    [
        ("torch", True, True, "torch", "asked for"),
        ("auto", True, True, "fused", "one launch a phase"),
        ("fused", True, True, "fused", "asked for"),
        ("auto", True, False, "torch", "no fused planner: no GPU"),
        ("auto", False, True, "torch", "no fused planner: mine declares none"),
    ],
)
def test_the_choice_and_its_reason(
    asked: str, has_fused: bool, runs: bool, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [] if runs else ["no GPU"])
    planner = choose_planner("mine", asked, CPU, has_fused=has_fused)
    assert (planner.name, planner.reason) == (name, reason)


@pytest.mark.parametrize(
    ("backend", "asked", "message"),
    [
        (FA3Backend, "fused", "the fused planner of fa3 can't run here: runs on CUDA devices, not on cpu"),
        (ReferenceBackend, "fused", "the fused planner of reference can't run here: reference declares none"),
        (FA3Backend, "fast", "there are auto, torch, fused"),
    ],
)
def test_a_planner_that_can_not_run_is_refused(backend: type, asked: str, message: str) -> None:
    with pytest.raises(BackendUnavailableError, match=message):
        backend(Capacity(1, 16, 4), CacheGeometry(9, 4), planner=asked)


def test_a_fused_planner_takes_the_place_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound once to each metadata, then called for each step; eager, capture and replay alike."""
    monkeypatch.setattr(worlds, "planner_of", lambda kernel: "fused")
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    calls: list[int] = []

    def bind_fused(self: FA3Backend, step: Step, buffers: Buffers, bound: BoundStep | None) -> Callable[[], None]:
        write, number = planners.bind_torch(self.write, step, buffers, bound), len(calls)
        calls.append(0)

        def fused() -> None:
            calls[number] += 1
            write()

        return fused

    monkeypatch.setattr(FA3Backend, "bind_fused", bind_fused)
    world = World(Setup(FA3Backend, CacheFormat.KV, 4))
    assert world.backend.planner.name == "fused"
    step = Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    world.backend.init_forward_metadata(step)
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 3), world.paging())
    for _ in range(2):
        world.backend.replay(meta, step)
    assert calls == [1, 3]


SMOKE, FULL = pytest.param("fa3", marks=pytest.mark.smoke), pytest.param("dsv4", marks=pytest.mark.full)


@pytest.mark.parametrize("name", [SMOKE, "trtllm_mla", "flashinfer_mla", FULL])
def test_fused_planners_pass_the_suite_in_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded as the first node of graphs that grow, shrink, are padded or run idle, or read an engine's buffers."""
    interpreted("triton_plan", "_plan_pages")
    get_backend(name)  # a backend that is imported now keeps what is patched below
    monkeypatch.setattr(worlds, "planner_of", lambda kernel: "fused")
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    report = run_conformance(name, kernel="torch", quick=True, select="graph.refresh_recorded,graph.bound_*")
    assert report.exit_code(require_run=True) == 0, [row.reason for row in report.rows]


def test_the_suite_runs_torch_kernels_on_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too: what is planted into the definition is to be seen there."""
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    assert World(Setup(FA3Backend, CacheFormat.KV, 4)).backend.planner.name == "torch"
    assert worlds.planner_of("triton") == "auto"


def test_what_a_fused_planner_leaves_as_it_was_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded request of a tree had more pages in the graph's capture than the short one that takes its place."""
    interpreted("triton_plan", "_plan_pages")
    subject = Subject(get_backend("fa3"), "torch", "cpu")
    monkeypatch.setattr(worlds, "planner_of", lambda kernel: "fused")
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    wanted = (StepKind.TARGET_VERIFY, True, 4)
    cases = selected_cases(subject, "graph.equals_eager")
    row = run_case(subject, next(each for each in cases if (each.kind, each.topk > 1, each.page_size) == wanted))
    assert row.status is Outcome.PASS, row.reason


@pytest.mark.parametrize("row_pages", [4, 6, 9, 12])
@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_taken_is_taken_again(page_size: int, kind: StepKind, row_pages: int) -> None:
    capacity = Capacity(2, 24 // page_size + 13, page_size, topk=2, num_steps=2, num_draft_tokens=4)
    bucket, geometry = capacity.bucket(kind, 2), CacheGeometry(99, page_size)
    table = BlockTable(torch.zeros(2, row_pages, dtype=torch.int32), geometry)
    took: list[Step] = []
    for committed in range(capacity.max_kv_len + 2):
        slots = torch.zeros(bucket.num_tokens * bucket.num_steps, dtype=torch.int64)
        lens, num_real = torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        step = Step.decode(lens, table, slots[:2], max_committed=committed)
        if kind is StepKind.DRAFT_DECODE:
            step = Step.draft_decode(2, 2, lens, table, slots, max_committed=committed)
        elif kind is StepKind.TARGET_VERIFY:
            step = Step.target_verify(4, lens, table, slots, max_committed=committed)
        step = replace(step, num_real=num_real)
        try:
            check_table_room(step, capacity)
        except InvalidStepError:
            continue
        took.append(step)
    assert [step.max_committed for step in took] == list(range(len(took))), "a longer one is never taken"
    most = [most_committed(step, capacity) for step in took]
    assert most == (list(range(len(took))) if table.row_tokens < capacity.max_kv_len else [len(took) - 1] * len(took))


def test_a_step_like_the_last_one_is_not_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Setup(FA3Backend, CacheFormat.KV, 4, checking=False))
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 3), world.paging())
    asked: list[Step] = []
    reasons = world.backend.unsupported_reasons
    monkeypatch.setattr(world.backend, "unsupported_reasons", lambda step: asked.append(step) or reasons(step))

    def replay(lens: tuple[int, ...], **changes: object) -> int:
        world.backend.replay(meta, replace(Scene(world, Batch(StepKind.DECODE, lens)).step(), **changes))
        return len(asked)

    assert replay((5, 3)) == 1
    assert replay((9, 4)) == 1, "other lengths"
    assert replay((9, 4, 2)) == 2, "another number of requests"
    assert replay((1, 4, 2), max_committed=7) == 2, "a bound"


def test_what_is_remembered_refuses_what_it_must() -> None:
    world = World(Setup(FA3Backend, CacheFormat.KV, 4, checking=False))
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 3), world.paging())
    step = Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    world.backend.replay(meta, step)
    with pytest.raises(InvalidStepError, match="the capacity holds"):
        world.backend.replay(meta, replace(step, max_committed=world.capacity.max_kv_len, seq_lens_cpu=None))
    with pytest.raises(InvalidStepError, match="the capacity holds"):
        world.backend.replay(meta, replace(step, max_committed=None, seq_lens_cpu=(world.capacity.max_kv_len, 1)))
    assert isinstance(step.paging, RequestTable)
    elsewhere = replace(step, paging=replace(step.paging, table=step.paging.table.clone()))
    with pytest.raises(UnsupportedStepError, match="at another address"):
        world.backend.replay(meta, elsewhere)
