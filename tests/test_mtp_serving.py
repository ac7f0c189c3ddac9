"""Serving by multi-layer MTP on the shipped models: whatever requests do to the batch, each gets what plain decoding
would give it, and what was drafted for it is what a full recompute gives.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from attn_backends.graphs import RecordedGraph
from attn_backends_reference.eagle.serving import serve
from tests import serving_laws
from tests.mtp_laws import accepted_lengths, check_drafts
from tests.mtp_scenes import capacity_of, watch
from tests.mtp_shipped import NUM_STEPS, shipped_worker, trained
from tests.serving_scenes import NEWLINE, PHASES, arrivals, check_nothing_kept, endless, plain, prompts, tokens

GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}
PER_MODULE = GRAPH | {"draft_graphs": "per_module"}

RANDOM = [
    pytest.param("mla", "flashinfer_mla", 16, GRAPH, 1, marks=pytest.mark.full),
    pytest.param("mla", "trtllm_mla", 32, PER_MODULE, 0, marks=pytest.mark.full),
    pytest.param("mla", "fa3", 4, {}, 1, marks=pytest.mark.full),
    ("gqa", "fa3", 16, PER_MODULE, 1),
    ("gqa", "reference", 1, {}, 0),
]


@pytest.mark.parametrize(("model", "backend", "page_size", "path", "lag"), RANDOM)
@pytest.mark.one_in(2)
def test_requests_join_and_leave_at_random(model, backend, page_size, path, lag):
    capacity = capacity_of(NUM_STEPS, 6, 112, page_size)
    worker = shipped_worker(model, backend, capacity, chunk=24, eos_tokens=(NEWLINE,), seed=2, host_lag=lag, **path)
    scene = arrivals(20, 25, 80, 20, seed=3)
    with watch(worker) as seen:
        figures = serving_laws.check_scene(worker, scene, endless(model, scene, 20))
    assert figures["largest_batch"] > 4, "more than the largest bucket"
    assert figures["shared_tokens"] > 60 or page_size > 16
    assert {"eos", "stop", "length", "cancelled"} <= figures.keys()
    assert set(accepted_lengths(seen)) == {1, 2, 3, 4}
    assert bool(worker.num_graph_steps) == bool(path)
    for request in seen if model == "mla" else ():
        check_drafts(trained(), request)


PER_PHASE = dict.fromkeys(PHASES, "flashinfer_mla") | {"prefill": "fa3", "draft_extend": "trtllm_mla"}


@pytest.mark.parametrize("model", ["mla", "gqa"])
@pytest.mark.one_in(2)
def test_a_cycle_accepts_as_much_on_every_path(model):
    capacity, given = capacity_of(NUM_STEPS, 5, 96, 32), prompts(6, 60)
    expected, _ = plain(model, "reference", capacity, given, 24)
    others = ["flashinfer_mla", PER_PHASE] if model == "mla" else ["fa3", "reference"]
    found = []
    for backend, path, lag in (("fa3", {}, 0), (others[0], GRAPH, 1), (others[1], PER_MODULE, 0), ("fa3", GRAPH, 1)):
        worker = shipped_worker(model, backend, capacity, chunk=20 + 9 * lag, host_lag=lag, **path)
        found.append(serve(worker, given, 24))
        check_nothing_kept(worker)
    assert tokens(found[0]) == tokens(expected)
    assert all(completions == found[0] for completions in found[1:]), "tokens or cycles differ"
    assert sum(c.num_cycles for c in found[0]) < 0.8 * sum(len(c.tokens) for c in found[0]), "drafts are accepted"


PLACES = [
    ("mla", "flashinfer_mla", 16),
    ("mla", "trtllm_mla", 32),
    ("mla", "fa3", 16),
    ("gqa", "fa3", 16),
]


@cache
def whole_scene():
    """200 requests."""
    return arrivals(200, 800, 96, 48)


@cache
def expected(model: str) -> list[list[int]]:
    """What plain decoding makes of them."""
    return endless(model, whole_scene(), 48)


@pytest.mark.full
@pytest.mark.parametrize(("path", "lag"), list(product(({}, GRAPH, PER_MODULE), (0, 1))))
@pytest.mark.parametrize(("model", "backend", "page_size"), PLACES)
def test_random_serving(model, backend, page_size, path, lag, record_property):
    capacity = capacity_of(NUM_STEPS, 24, 96 + 48 + 8, page_size)
    worker = shipped_worker(
        model, backend, capacity, checking=False, chunk=32, eos_tokens=(NEWLINE,), host_lag=lag, **path
    )
    figures = serving_laws.check_scene(worker, whole_scene(), expected(model))
    for figure, value in figures.items():
        record_property(figure, value)
    assert figures["cycles"] >= 300
    assert figures["largest_batch"] == 24
