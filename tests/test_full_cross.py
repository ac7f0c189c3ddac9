"""The whole cross, `make test-full`: every backend, page size, draft, batch size and path, 64 prompts of 128 tokens."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from attn_backends.graphs import RecordedGraph
from spec_metadata import Capacity
from tests.serving_scenes import CHAIN, TREE, eagle, plain, prompts, tokens

NUM_PROMPTS, NEW_TOKENS, CONTEXT = 64, 128, 176
PAGED = [
    *(("mla", "flashinfer_mla", size) for size in (1, 16, 64)),
    *(("mla", "trtllm_mla", size) for size in (32, 64)),
    *(("mla", "fa3", size) for size in (1, 16, 64)),
    *(("gqa", "fa3", size) for size in (1, 16, 64)),
]


@cache
def expected(model: str) -> list[list[int]]:
    """Plain greedy decoding, eight requests at once."""
    completions, _ = plain(model, "fa3", Capacity(8, CONTEXT, 32), prompts(NUM_PROMPTS, 48), NEW_TOKENS)
    return tokens(completions)


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize(("name", "path"), list(product(("chain", "tree"), ("eager", "graph"))))
@pytest.mark.parametrize(("model", "backend", "page_size"), PAGED)
def test_identical(model, backend, page_size, name, path, batch_size, record_property):
    capacity = Capacity(batch_size, CONTEXT, page_size, **(CHAIN if name == "chain" else TREE))
    options = {"buckets": (batch_size,), "make_graph": RecordedGraph} if path == "graph" else {}
    found, worker = eagle(
        model, backend, capacity, prompts(NUM_PROMPTS, 48), NEW_TOKENS, checking=False, chunk=32, **options
    )
    emitted = sum(len(completion.tokens) - 1 for completion in found)
    record_property("tokens_per_cycle", round(emitted / sum(completion.num_cycles for completion in found), 3))
    assert tokens(found) == expected(model)
    assert bool(worker.num_graph_steps) == (path == "graph")
