"""Windowed drafts: which tokens they read, that texts are those of plain decoding, and where a window is refused."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from attn_backends import AttentionLayer, CacheFormat
from attn_backends.errors import UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.eagle.adaptive import AdaptiveSteps
from attn_backends_reference.eagle.draft_window import DraftWindow
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.requests import DraftShape
from attn_backends_reference.eagle.slots import SlotAllocator
from spec_metadata import CacheGeometry, Capacity, InvalidStepError
from tests import eagle3_laws
from tests import serving_laws as laws
from tests.serving_scenes import CHAIN, NEWLINE, TREE, Arrival, arrivals, eagle_worker, endless

GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}
LAYER = AttentionLayer(0, 2, 1, 16, 16, 0.25)
Shape = dict[str, int]


def window_of(capacity: Capacity, **options: int) -> DraftWindow:
    """A window over two requests that have pages for all tokens of a capacity."""
    geometry = CacheGeometry(1 + 2 * capacity.max_pages, capacity.page_size)
    slots = SlotAllocator(geometry, capacity, torch.device("cpu"))
    for _ in range(2):
        slots.reserve(slots.admit(), capacity.max_context + capacity.draft_room)
    draft = SimpleNamespace(layers=(LAYER,), cache_format=CacheFormat.KV)
    return DraftWindow.of(WorkerOptions(**options), draft, capacity, slots)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("size", "sinks"), [(8, 0), (8, 3), (1, 1), (60, 4)])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_reads_the_first_tokens_and_the_last(page_size: int, size: int, sinks: int, shape: Shape) -> None:
    """Pages of one token leave out what SGLang leaves out: min(L, sinks + window) tokens stay. What is drafted, of
    every branch of a tree, lies behind them where it would without a window.
    """
    capacity, rows = Capacity(2, 60, page_size, **shape), torch.tensor([2, 1])
    window, room = window_of(capacity, draft_window=size, draft_sink_tokens=sinks), capacity.draft_room
    for length in range(1, 60):
        lens = torch.tensor([length, 60 - length], dtype=torch.int32)
        left = window.read(rows, lens)
        for i, (committed, row) in enumerate(zip(lens.tolist(), rows.tolist(), strict=True)):
            own = window.slots.table[row].tolist()
            pages = {p // page_size for p in range(committed) if p < sinks or p >= committed - size}
            seen = [own[p] for p in range(committed) if p // page_size in pages]
            assert left[i] == len(seen)
            drafted = own[committed : committed + room]
            assert window.table[row, : len(seen) + room].tolist() == seen + drafted
            if page_size == 1:
                assert len(seen) == min(committed, size + sinks)
        exact = window.bounds(60, lens.tolist())
        assert exact["seq_lens_cpu"] == left.tolist()
        assert max(left.tolist()) <= window.bounds(60, None)["max_committed"] == exact["max_committed"]


def test_drafts_are_those_of_a_full_recompute_over_the_window() -> None:
    eagle3_laws.check_window()


@cache
def scene_of(model: str) -> tuple[list[Arrival], list[list[int]]]:
    """Requests, some greedy and some sampled, and what plain decoding makes of them."""
    scene = arrivals(8, 16, 60, 12, seed=5)
    return scene, endless(model, scene, 12)


COSTS = {1: (1.0, 2.0), 4: (1.0, 1.1)}
SETS = AdaptiveSteps((DraftShape(1, 1, 2), DraftShape(1, 3, 4)), COSTS)
TREE_SETS = AdaptiveSteps((DraftShape(1, 1, 2), DraftShape(4, 3, 16)), COSTS)


@pytest.mark.parametrize(
    ("model", "backend", "page_size", "shape", "options"),
    [
        ("gqa", "fa3", 8, CHAIN, GRAPH | {"host_lag": 1}),
        ("gqa", "fa3", 1, CHAIN, {"verify_rows": 7}),
        ("gqa", "fa3", 8, CHAIN, GRAPH | {"adaptive": SETS}),
        ("mla", "flashinfer_mla", 8, CHAIN, {}),
        ("mla", "trtllm_mla", 32, CHAIN, GRAPH),
        ("gqa", "fa3", 1, TREE, {}),
        ("gqa", "fa3", 8, TREE, GRAPH | {"adaptive": TREE_SETS}),
        ("mla", "flashinfer_mla", 8, TREE, GRAPH | {"host_lag": 1}),
        ("mla", "trtllm_mla", 32, TREE, {}),
    ],
)
def test_requests_that_come_and_go_get_what_plain_decoding_gives(model, backend, page_size, shape, options) -> None:
    capacity = Capacity(6, 112, page_size, **shape)
    settings = {"chunk": 24, "eos_tokens": (NEWLINE,), "seed": 2, "draft_window": 9, "draft_sink_tokens": 2}
    laws.check_scene(eagle_worker(model, backend, capacity, **settings, **options), *scene_of(model))


def test_where_it_is_refused() -> None:
    with pytest.raises(InvalidStepError, match="draft_window must be at least 1"):
        WorkerOptions(draft_window=0)
    with pytest.raises(InvalidStepError, match="draft_sink_tokens=4 stand before a draft_window"):
        WorkerOptions(draft_sink_tokens=4)
    options, capacity = WorkerOptions(draft_window=8), Capacity(1, 32, 4)
    windowed = AttentionLayer(2, 2, 1, 16, 16, 1, window=4)
    for draft, reason in (
        (
            SimpleNamespace(layers=(LAYER, windowed), cache_format=CacheFormat.KV),
            "layer 2 has a window of 4 of its own",
        ),
        (SimpleNamespace(layers=(LAYER,), cache_format=object()), "keeps states of tokens beside their pages"),
    ):
        with pytest.raises(UnsupportedStepError, match=reason):
            DraftWindow.of(options, draft, capacity, None)
