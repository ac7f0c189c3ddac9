"""Multi-layer MTP drafts what a full recompute of all modules gives, and emits what plain decoding does, whatever its
cycles accept and however they run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.errors import UnsupportedStepError
from attn_backends_reference.eagle.chains import Chains
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.requests import DraftShape, RequestError, RequestOptions
from attn_backends_reference.eagle.serving import Server
from spec_metadata import Sampling, Step, StepKind
from tests import mtp_laws as laws
from tests.mtp_scenes import Place, capacity_of, mtp_worker, random_arrivals, steady
from tests.no_host_reads import NoHostReads

# Every backend, page size, number of steps, chunk, path and lag, most pairs of them at least once.
CASES = [
    (Place("mla", "flashinfer_mla", 16), 3, 1),
    (Place("mla", "flashinfer_mla", 1, (1, 2), "one", host_lag=1), 4, 3),
    (Place("mla", "flashinfer_mla", 4, (1, 2), "per_module"), 2, 64),
    (Place("mla", "trtllm_mla", 32, host_lag=1), 4, 5),
    (Place("mla", "trtllm_mla", 64, (1, 2), "one"), 3, 2),
    (Place("mla", "trtllm_mla", 32, (1, 2), "per_module", host_lag=1), 3, 64),
    (Place("mla", "fa3", 1, (1, 2), "per_module"), 4, 4),
    (Place("mla", "fa3", 8, host_lag=1), 2, 1),
    (Place("mla", "reference", 4, (1, 2), "one"), 1, 2),
    (Place("gqa", "fa3", 16, (1, 2), "one", host_lag=1), 2, 3),
    (Place("gqa", "fa3", 1), 4, 64),
    (Place("gqa", "fa3", 4, (1, 2), "per_module", host_lag=1), 3, 2),
    (Place("gqa", "reference", 1, host_lag=1), 1, 5),
    (Place("mla_experts", "flashinfer_mla", 8, (1, 2), "one"), 3, 5),
]


def check_case(place: Place, num_steps: int, chunk: int, num_requests: int) -> None:
    """Requests of which up to five run at once: more than the largest bucket."""
    scene = random_arrivals(num_requests, num_requests // 3, 24, num_requests, seed=1)
    _, seen = laws.check_scene(place, num_steps, scene, max_bs=5, chunk=chunk)
    assert set(laws.accepted_lengths(seen)) == set(range(1, num_steps + 2)), "every length is accepted"
    ran = {(cycle.bs, cycle.bucket) for request in seen for cycle in request.cycles}
    assert max(ran)[0] >= 4
    assert {bucket for _, bucket in ran} >= {0, *place.buckets[-1:]}, "some run eagerly, some in the largest bucket"


@pytest.mark.parametrize(("place", "num_steps", "chunk"), CASES, ids=str)
@pytest.mark.one_in(3)
def test_drafts_are_those_of_a_full_recompute(place, num_steps, chunk):
    check_case(place, num_steps, chunk, num_requests=14)


PLACES = [
    ("mla", "flashinfer_mla", 4),
    ("mla", "trtllm_mla", 32),
    ("mla", "fa3", 1),
    ("gqa", "fa3", 4),
]
PATHS = [((), "one"), ((1, 2), "one"), ((1, 2), "per_module")]


@pytest.mark.full
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("buckets", "draft_graphs"), PATHS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_the_whole_cross(place, num_steps, buckets, draft_graphs, lag):
    for chunk in {1, 2, max(num_steps - 1, 1), num_steps, num_steps + 3, 64}:
        check_case(Place(*place, buckets, draft_graphs, lag), num_steps, chunk, num_requests=24)


def test_requests_of_every_kind_join_and_leave():
    laws.check_random()


def test_prompts_shorter_than_the_modules_are_many():
    laws.check_short_prompts()


@pytest.mark.parametrize("num_steps", [2, pytest.param(3, marks=pytest.mark.full), 4])
@pytest.mark.one_in(2)
def test_edges_of_chunks(num_steps):
    laws.check_chunks(num_steps)


BATCHES = [
    ("mla", "trtllm_mla", 32, "one"),
    ("mla", "flashinfer_mla", 4, "per_module"),
    pytest.param("gqa", "fa3", 1, "one", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("model", "backend", "page_size", "draft_graphs"), BATCHES)
def test_batches_below_and_above_the_largest_graph(model, backend, page_size, draft_graphs):
    laws.check_batches(model, backend, page_size, draft_graphs)


@pytest.mark.parametrize("lag", [0, 1])
def test_room_at_the_end_of_the_context_and_of_short_texts(lag):
    laws.check_room(lag)


@pytest.mark.full
def test_a_request_takes_as_many_cycles_on_every_path():
    laws.check_paths()


SHARING = [
    (Place("mla", "flashinfer_mla", 4), 1),
    (Place("mla", "flashinfer_mla", 4, host_lag=1), 2),
    (Place("mla", "trtllm_mla", 32, (1, 2), "per_module"), 3),
    (Place("gqa", "fa3", 8, (1, 2), "one", host_lag=1), 4),
]


@pytest.mark.parametrize(("place", "num_steps"), SHARING, ids=str)
def test_pages_are_shared_with_those_who_agree_on_what_the_modules_saw(place, num_steps):
    laws.check_sharing(place, num_steps)


def test_a_step_that_fails_is_tried_again_as_it_was():
    laws.check_failures()


def test_what_is_not_mtp_is_refused():
    laws.check_refusals()


@pytest.mark.parametrize("kind", [StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND])
def test_a_kernel_that_plans_from_exact_lengths_is_refused_with_lag(kind, monkeypatch):
    capacity = capacity_of(3, 2, 48, 4)
    kernel = mtp_worker(Place("mla", "fa3", 4, host_lag=1), capacity).backends.verify.kernel_of(kind)
    monkeypatch.setitem(kernel.capabilities, kind, replace(kernel.capabilities[kind], needs_host_lens=True))
    mtp_worker(Place("mla", "fa3", 4), capacity)
    with pytest.raises(UnsupportedStepError, match=rf"host_lag=1: kernel torch plans {kind} on the host.*host_lag=0"):
        mtp_worker(Place("mla", "fa3", 4, host_lag=1), capacity)


def test_the_worker_says_what_serving_needs_to_know():
    worker = mtp_worker(Place("mla", "fa3", 4), capacity_of(3, 2, 48, 4))
    assert (worker.max_accepted, worker.draft_room, worker.draft_shape) == (4, 5, DraftShape(1, 3, 4))
    assert len(worker.modules) == 3, "the first modules run"
    with pytest.raises(
        RequestError, match=r"drafts with topk=1, num_steps=2.*this worker drafts with topk=1, num_steps"
    ):
        Server(worker).submit([1], RequestOptions(draft=DraftShape(1, 2, 3)))


def test_more_positions_may_run_again_than_must():
    place, scene = Place("mla", "flashinfer_mla", 4, (1, 2)), steady([1, 3, 9, 14], [16] * 4)
    laws.check_scene(place, 2, scene, max_bs=3, chunk=3, num_rerun=4)


def test_one_step_needs_no_pool():
    worker = mtp_worker(Place("mla", "fa3", 4), capacity_of(1, 2, 48, 4))
    assert (worker.pool.hidden.numel(), worker.pool.tokens.numel()) == (0, 0)


@pytest.mark.parametrize("buckets", [(), (2,)])
def test_nothing_is_read_from_the_device(buckets):
    place = Place("gqa", "fa3", 4, buckets, "per_module", host_lag=1, checking=False)
    worker, prompts = mtp_worker(place, capacity_of(3, 2, 48, 4)), ([1, 2, 3, 4, 5, 6, 7], [8, 9])
    rows = [worker.slots.admit() for _ in prompts]
    for row in rows:
        worker.slots.reserve(row, 32)
        worker.admit(row, Sampling())
    with NoHostReads():
        worker.prefill([Chunk(row, prompt, 0, 2) for row, prompt in zip(rows, prompts, strict=True)])
        worker.prefill([Chunk(rows[0], prompts[0], 2, 6)])
        worker.prefill([Chunk(rows[0], prompts[0], 6, 7)])
        for committed in ([7, 2], [11, 6]):
            worker.cycle(rows, committed)


@pytest.mark.parametrize("buckets", [(), (1, 2)])
def test_an_idle_rank_runs_every_phase_and_writes_nothing(buckets):
    place = Place("gqa", "fa3", 4, buckets, "per_module", checking=False)
    worker = mtp_worker(place, capacity_of(3, 2, 48, 4))
    rows = torch.empty(0, dtype=torch.int64)
    idle, reserved = Step.idle(worker.slots.paging(rows)), worker.slots.geometry.reserved_page
    with torch.no_grad():
        accepted = worker._run(worker._verify, idle, Chains(worker._chains[rows]))
        given = worker._window_inputs(rows, rows.int(), accepted)
        window = worker._run(worker._window, idle, given)
        for runner in worker._further:
            window = worker._run(runner, idle, window)
    assert window.tokens.shape == (0, worker.capacity.extend_width + 3)
    for layer in (*worker.target_caches, *worker.draft_caches):
        assert bool(layer.k[torch.arange(layer.k.shape[0]) != reserved].isnan().all())
