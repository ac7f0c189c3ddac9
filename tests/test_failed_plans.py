"""What fails on the way leaves no step: metadata is refused until its next replay, and sets keep what is theirs."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from attn_backends import backend as backend_module
from attn_backends import get_backend
from attn_backends.backend import AttentionBackend, Metadata
from attn_backends.errors import CaptureError
from attn_backends.memory.phase_sets import PhaseSet, PhaseSets
from spec_metadata import BoundInputs, CacheGeometry, Capacity, RequestTable, Step, StepKind, write_slots

CAPACITY = Capacity(max_bs=4, max_context=40, page_size=4, num_steps=3, num_draft_tokens=4)
GEOMETRY = CacheGeometry(num_pages=200, page_size=4, reserved_page=7)
TABLE = RequestTable(80 + torch.arange(6 * CAPACITY.max_pages * 4).view(6, -1), torch.tensor([0]), GEOMETRY)
TABLE.table[0] = 28 + torch.arange(CAPACITY.max_pages * 4) % 4


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("no room for a launch")


def verify(lens: list[int]) -> Step:
    return Step.target_verify(4, torch.tensor(lens), TABLE.on_static(1 + torch.arange(len(lens))))


def captured_on(backend: AttentionBackend, bs: int = 2, within: PhaseSet | None = None) -> Metadata:
    return backend.capture(CAPACITY.bucket(StepKind.TARGET_VERIFY, bs), TABLE, within=within)


@pytest.mark.parametrize("checking", [False, True])
@pytest.mark.parametrize("place", ["copy", "plan", "schedule"])
def test_metadata_of_a_replay_that_failed_is_refused_until_the_next(
    monkeypatch: pytest.MonkeyPatch, place: str, checking: bool
) -> None:
    backend = get_backend("fa3")(CAPACITY, GEOMETRY, kernel="torch", checking=checking)
    meta: Any = captured_on(backend)
    backend.replay(meta, verify([5, 9]))
    with monkeypatch.context() as patch:
        if place == "copy":
            patch.setattr(meta.captured, "copy_inputs", fail)
            patch.setattr(meta.captured, "bind_inputs", lambda step: fail)
        elif place == "plan":
            patch.setattr("attn_backends.planning.planners.write_slots", fail)
        else:
            patch.setattr(meta.schedules, "refresh", fail)
        with pytest.raises(RuntimeError, match="no room"):
            backend.replay(meta, verify([30, 31]))
    with pytest.raises(CaptureError, match="overwritten by a replay, refresh or capture that failed: replay it again"):
        meta.at()
    backend.replay(meta, verify([30, 31]))
    assert torch.equal(meta.at().write_slots, write_slots(verify([30, 31])))


def test_metadata_that_reads_an_engines_buffers_is_refused_after_a_plan_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, step = get_backend("fa3")(CAPACITY, GEOMETRY, kernel="torch"), verify([5, 9])
    meta = backend.capture(step.bucket(), step.paging, BoundInputs(step.seq_lens))
    backend.refresh(meta)
    monkeypatch.setattr(meta.schedules, "refresh", fail)
    with pytest.raises(RuntimeError, match="no room"):
        backend.refresh(meta)
    with pytest.raises(CaptureError, match="that failed"):
        meta.at()


def in_two_sets() -> tuple[AttentionBackend, PhaseSet, PhaseSet, Metadata]:
    """Two sets with a phase each. The second one is alive, and has the metadata."""
    backend, sets = get_backend("fa3")(CAPACITY, GEOMETRY, kernel="torch"), PhaseSets(torch.device("cpu"))
    first, second = sets.add(), sets.add()
    captured_on(backend, 4, first)
    meta = captured_on(backend, 4, second)
    backend.replay(meta, verify([5, 9, 13, 17]))
    return backend, first, second, meta


def test_a_second_bucket_of_a_set_that_is_not_alive_is_padding() -> None:
    backend, first, _, _ = in_two_sets()
    step: Any = captured_on(backend, 2, first).step
    assert set((step.out_cache_loc // 4).tolist()) == {GEOMETRY.reserved_page}
    ragged = CAPACITY.ragged_bucket(StepKind.TARGET_VERIFY, 4, 12)
    sets = PhaseSets(torch.device("cpu"))
    own, other = sets.add(), sets.add()
    *_, again = [backend.capture(ragged, TABLE, within=each) for each in (own, other, own)]
    query: Any = again.step.query
    assert query.cu_seqlens[-1] == 12


def test_a_capture_waits_for_the_set_that_is_alive_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, first, second, meta = in_two_sets()
    seen: list[Any] = []
    monkeypatch.setattr(second.sets._reads, "wait", lambda: seen.append(meta.step.seq_lens.tolist()))
    captured_on(backend, 2, first)
    assert seen == [[5, 9, 13, 17]]


def test_a_capture_that_fails_leaves_no_step_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, first, second, meta = in_two_sets()
    monkeypatch.setattr(backend_module, "bind_inputs", fail)
    with pytest.raises(RuntimeError, match="no room"):
        captured_on(backend, 2, second)
    with pytest.raises(CaptureError, match="that failed"):
        meta.at()
    with pytest.raises(RuntimeError, match="no room"):
        captured_on(backend, 2, first)
    with pytest.raises(CaptureError, match="by another set of phases"):
        meta.at()
