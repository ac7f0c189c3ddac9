"""The whole cross of serving, `make test-full`: 200 requests join and leave at random over 300 cycles, in every batch
size from 1 to 24, with buckets up to 16, on every backend, chain and tree, eagerly and through graphs, with lag and
without; with pages shared, sampled requests among greedy ones, and requests cancelled.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from attn_backends.graphs import RecordedGraph
from spec_metadata import Capacity
from tests import serving_laws
from tests.serving_scenes import CHAIN, NEWLINE, TREE, Arrival, arrivals, eagle_worker, endless

NUM_REQUESTS, NUM_ROUNDS, LONGEST, NEW_TOKENS = 200, 800, 96, 48
BUCKETS = (1, 2, 4, 8, 16)
PAGED = [
    ("mla", "flashinfer_mla", 16),
    ("mla", "trtllm_mla", 32),
    ("mla", "fa3", 16),
    ("mla", "reference", 8),
    ("gqa", "fa3", 16),
    ("gqa", "reference", 1),
]


@cache
def scene() -> list[Arrival]:
    """The requests."""
    return arrivals(NUM_REQUESTS, NUM_ROUNDS, LONGEST, NEW_TOKENS)


@cache
def expected(model: str) -> list[list[int]]:
    """What plain decoding makes of them."""
    return endless(model, scene(), NEW_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("host_lag", [0, 1])
@pytest.mark.parametrize(("name", "path"), list(product(("chain", "tree"), ("eager", "graph"))))
@pytest.mark.parametrize(("model", "backend", "page_size"), PAGED)
def test_random_serving(model, backend, page_size, name, path, host_lag, record_property):
    capacity = Capacity(24, LONGEST + NEW_TOKENS + 8, page_size, **(CHAIN if name == "chain" else TREE))
    options = {"buckets": BUCKETS, "make_graph": RecordedGraph} if path == "graph" else {}
    worker = eagle_worker(
        model, backend, capacity, checking=False, chunk=32, eos_tokens=(NEWLINE,), host_lag=host_lag, **options
    )
    figures = serving_laws.check_scene(worker, scene(), expected(model))
    for figure, value in figures.items():
        record_property(figure, value)
    assert figures["cycles"] >= 300
    assert figures["largest_batch"] == 24
    assert figures["smallest_batch"] == 1
    assert figures["idle_rounds"] > 0, "the batch shrinks to nothing and comes back"
    assert figures["shared_tokens"] > 1000
    assert min(figures[reason] for reason in ("length", "eos", "stop", "cancelled")) > 3
    assert bool(worker.num_graph_steps) == (path == "graph")
    assert figures["buckets"] == (len(BUCKETS) if path == "graph" else 0)
