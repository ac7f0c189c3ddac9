"""A worker that verifies what its draft is sure of: tokens are those of plain decoding, whatever is cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from attn_backends.errors import UnsupportedStepError
from attn_backends_reference.eagle.options import WorkerOptions
from spec_metadata import Capacity, InvalidStepError, Sampling
from tests import serving_laws as laws
from tests.ragged_laws import GRAPH, check_drafts
from tests.serving_scenes import CHAIN, NEWLINE, PHASES, TREE, Arrival, arrivals, eagle_worker, endless


@cache
def scene_of(model: str) -> tuple[list[Arrival], list[list[int]]]:
    """Requests, half of them sampled at temperature 1, of the others most greedy, and what plain decoding makes of
    them.
    """
    scene = arrivals(12, 16, 60, 14, seed=5)
    for number, arrival in enumerate(scene[::2]):
        options = replace(arrival.options, sampling=Sampling(1.0, seed=number))
        scene[2 * number] = replace(arrival, options=options)
    assert Counter(arrival.options.sampling.temperature for arrival in scene) == {0.0: 4, 0.7: 2, 1.0: 6}
    return scene, endless(model, scene, 14)


@pytest.mark.parametrize(
    ("model", "backend", "path", "options"),
    [
        ("gqa", "fa3", GRAPH, {"verify_threshold": 0.3, "verify_rows": 7}),
        ("mla", "flashinfer_mla", {}, {"verify_rows": 6}),
    ],
)
def test_requests_that_come_and_go_get_what_plain_decoding_gives(model, backend, path, options) -> None:
    capacity = Capacity(6, 112, 8, **CHAIN)
    settings = {"chunk": 24, "eos_tokens": (NEWLINE,), "seed": 2, "host_lag": bool(path)}
    worker = eagle_worker(model, backend, capacity, **settings, **path, **options)
    laws.check_scene(worker, *scene_of(model))
    assert bool(worker.num_graph_steps) == bool(path)


@pytest.mark.parametrize(("model", "backend", "path"), [("gqa", "fa3", GRAPH), ("mla", "flashinfer_mla", {})])
def test_drafts_are_those_of_an_extend_over_all_rows(model, backend, path) -> None:
    check_drafts(model, backend, path)


def test_where_it_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match=r"topk=4 \(the rows of a ragged verify are a chain"):
        eagle_worker("gqa", "fa3", Capacity(2, 64, 8, **TREE), verify_rows=4)
    with pytest.raises(UnsupportedStepError, match=r"verifying by confidence.*packed rows"):
        eagle_worker("mla", "trtllm_mla", Capacity(2, 64, 32, **CHAIN), verify_threshold=0.5)
    mixed = {**dict.fromkeys(PHASES, "flashinfer_mla"), "draft_extend": "trtllm_mla"}
    with pytest.raises(UnsupportedStepError, match=r"verifying by confidence.*packed rows, in a draft_extend step"):
        eagle_worker("mla", mixed, Capacity(2, 64, 32, **CHAIN), verify_threshold=0.5)
    with pytest.raises(InvalidStepError, match="a probability in"):
        WorkerOptions(verify_threshold=2)
    with pytest.raises(InvalidStepError, match="verify_rows must be at least 1"):
        WorkerOptions(verify_rows=0)
