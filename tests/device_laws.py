"""What workers promise on any device, each as a function that raises if it does not hold: tokens of plain decoding.

float32 on torch kernels, so that equal tokens can be asked for. `tests/gpu/workers.py` has the places on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends_reference.eagle.adaptive import AdaptiveSteps, StepPolicy
from attn_backends_reference.eagle.block import BlockWorker
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.requests import DraftShape
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models.block import load_block
from spec_metadata import Capacity
from tests import reference_models as rm
from tests.eagle3_laws import accepted_lengths
from tests.eagle3_scenes import accept_any_length, watch
from tests.mtp_laws import check_scene as check_mtp_scene
from tests.mtp_scenes import Place, random_arrivals
from tests.serving_laws import check_scene
from tests.serving_scenes import (
    CHAIN,
    NEWLINE,
    TREE,
    Arrival,
    arrivals,
    eagle_worker,
    endless,
    engine_parts,
)

BUCKETS = (1, 2, 4, 8)
SETS = (DraftShape(1, 1, 2), DraftShape(4, 3, 16), DraftShape(1, 3, 4), DraftShape(2, 2, 5))
DRAFTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ragged verify": (CHAIN, {"verify_threshold": 0.3, "verify_rows": 7}),
    "adaptive steps": (TREE, {"adaptive": AdaptiveSteps(SETS, {1: (1.0,) * len(SETS)})}),
    "windowed draft": (CHAIN, {"draft_window": 9, "draft_sink_tokens": 2}),
}
"""Ways to draft and verify: the shape of drafts, and a worker's options."""


class InTurns(StepPolicy):
    """Takes each set of steps in its turn, and a few cycles one after the other."""

    turn = 0

    def choose(self, bs: int) -> int:
        self.turn += 1
        return (self.turn // 2 + self.turn) % len(self.adaptive.sets)


def through_graphs(device: str, buckets: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    """Options of a worker that runs through a device's graphs."""
    return {"buckets": buckets, "make_graph": CudaGraph if device == "cuda" else RecordedGraph}


@cache
def scene_of(model: str, num_requests: int, device: str) -> tuple[list[Arrival], list[list[int]]]:
    """Requests, some greedy and some sampled, and what plain decoding makes of them."""
    scene = arrivals(num_requests, 25, 60, 20, seed=5)
    return scene, endless(model, scene, 20, device)


def check_served(worker: EagleWorker, scene: list[Arrival], texts: list[list[int]]) -> None:
    """Requests that come and go get the tokens of plain decoding, through graphs."""
    check_scene(worker, scene, texts)
    assert worker.num_graph_steps, "no step ran through a graph"


def check_serving(place: tuple[str, str, int], draft: dict[str, int], host_lag: int, device: str) -> None:
    """A chain or a tree on real text, in batches of up to 16."""
    model, backend, page_size = place
    scene = arrivals(60, 60, 96, 48)
    capacity = Capacity(16, 96 + 48 + 8, page_size, **draft)
    options = {"chunk": 32, "eos_tokens": (NEWLINE,), "host_lag": host_lag, "device": device}
    worker = eagle_worker(model, backend, capacity, checking=False, **options, **through_graphs(device, BUCKETS))
    check_scene(worker, scene, endless(model, scene, 48, device))


def check_mtp(place: tuple[str, str, int], draft_graphs: str, host_lag: int, device: str) -> None:
    """Several MTP modules: every draft is that of a full recompute of all of them."""
    scene = random_arrivals(40, 20, 40, 24, seed=1)
    where = Place(*place, BUCKETS, draft_graphs, host_lag, device, checking=False)
    check_mtp_scene(where, 4 - host_lag, scene, max_bs=10, chunk=7)


def check_drafts(
    name: str, place: tuple[str, str, int], host_lag: int, device: str = "cpu", num_requests: int = 20
) -> EagleWorker:
    """One of `DRAFTS`. A set of steps is taken in its turn, and no cycle allocates."""
    (model, backend, page_size), (shape, own) = place, DRAFTS[name]
    options = {"chunk": 24, "eos_tokens": (NEWLINE,), "seed": 2, "host_lag": host_lag, "device": device, **own}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attn_backends_reference.eagle.worker.StepPolicy", InTurns)
        capacity = Capacity(6, 112, page_size, **shape)
        worker = eagle_worker(model, backend, capacity, checking=False, **options, **through_graphs(device))
    held, (scene, texts) = worker.step_sets.num_bytes, scene_of(model, num_requests, device)
    if name == "adaptive steps":  # a second run takes other sets, and a request that leaves has other tokens then
        scene = [replace(arrival, leaves=None) for arrival in scene]
    check_served(worker, scene, texts)
    assert worker.step_sets.num_bytes == held, "a cycle allocated"
    return worker


def check_blocks(host_lag: int, device: str = "cpu", num_requests: int = 20) -> None:
    """Blocks of four drafted in one forward by the shipped block draft."""
    capacity = Capacity(6, 112, 16, **CHAIN)
    target, _, *place = engine_parts("gqa", "fa3", capacity, checking=False, device=device)
    options = {"chunk": 24, "eos_tokens": (NEWLINE,), "seed": 2, "host_lag": host_lag, **through_graphs(device)}
    backends, geometry = place
    draft = load_block("gqa-block", target)
    worker = BlockWorker(target, draft, backends, capacity, geometry, WorkerOptions(**options))
    check_served(worker, *scene_of("gqa", num_requests, device))


def check_gpt_oss(shape: dict[str, int], device: str = "cpu", num_requests: int = 20) -> None:
    """Sinks, and windows in alternate layers: random serving on a random gpt-oss, whatever lengths cycles accept of the
    drafts of an EAGLE-3 head.
    """
    scene = arrivals(num_requests, 25, 80, 20, seed=3)
    prompts, texts = [arrival.prompt for arrival in scene], endless("gpt_oss", scene, 28, device)
    options = {"chunk": 24, "eos_tokens": (NEWLINE,), "seed": 2, "host_lag": 1, "device": device}
    capacity = Capacity(6, 112, 8, **shape)
    worker = eagle_worker("gpt_oss", "fa3", capacity, checking=False, **options, **through_graphs(device))
    assert {layer.window for layer in worker.target.layers} == {rm.WINDOW, None}
    assert all(layer.sinks is not None for layer in worker.target.layers)
    with watch(worker, accept_any_length(prompts, texts)) as seen:
        check_scene(worker, scene, texts)
    assert len(accepted_lengths(seen)) > 2, "several lengths are accepted"
    assert worker.num_graph_steps, "no step ran through a graph"
