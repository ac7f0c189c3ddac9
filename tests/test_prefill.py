"""Captured prefill at buckets of tokens: pieces between eager attention calls, and graphs of all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.errors import CaptureError, ConfigError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle import mtp
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.options import PrefillGraphs, WorkerOptions
from attn_backends_reference.eagle.phases import by_name
from attn_backends_reference.eagle.prefill_phases import DRAFT_PREFILL, PREFILL, PrefillInputs
from attn_backends_reference.eagle.protocol import Chunk
from spec_metadata import Capacity, InvalidStepError, Step, StepKind
from tests import prefill_laws as laws
from tests import reference_models as rm
from tests.mm_laws import PREFILLS, eagle3_worker
from tests.mtp_laws import check_scene
from tests.mtp_scenes import Place, random_arrivals
from tests.serving_scenes import CHAIN, GRAPH, eagle, plain, prompts, tokens
from tests.test_prefill_graphs import Noted
from tests.torch_kernels import torch_kernel

PLACES = [
    Place("gqa", "fa3", 4),
    Place("gqa", "reference", 1),
    Place("mla", "flashinfer_mla", 8),
    Place("mla_experts", "fa3", 16),
]


CHUNKS = [(1, {8}), (7, {8, 32}), (16, {8, 32}), (64, {0, 32})]


def cases() -> Iterator[Any]:
    """Every chunk at every place, by each worker and way in turn: in the quick tests each pair of these once."""
    for (i, place), (j, worker), (k, graphs), (n, chunk) in product(
        *map(enumerate, (PLACES, laws.WORKERS, get_args(PrefillGraphs), CHUNKS))
    ):
        marks = () if (i + 2 * j + k + n) % 4 == 0 else pytest.mark.full
        yield pytest.param(graphs, place, worker, *chunk, marks=marks, id=f"{graphs}-{place}-{worker}-{chunk[0]}")


@pytest.mark.parametrize(("graphs", "place", "worker", "chunk", "sizes"), list(cases()))
def test_results_are_those_of_eager_prefill(
    graphs: PrefillGraphs, place: Place, worker: str, chunk: int, sizes: set[int]
) -> None:
    if place.model == "mla_experts" and worker == "mtp":
        place = Place("mla", "trtllm_mla", 32)
    found = laws.check_paths(worker, place, chunk, graphs=graphs)
    assert {ran.result.bucket.num_tokens if ran.result.bucket else 0 for ran in found} >= sizes


@pytest.mark.parametrize("graphs", get_args(PrefillGraphs))
def test_a_bucket_that_the_target_fills_has_one_for_modules_that_begin_earlier(graphs: PrefillGraphs) -> None:
    """Last chunks of one token: modules run the two before it again."""
    found = laws.check_paths("mtp", chunk=29, lens=(29, 30, 30, 30), graphs=graphs)
    ran = [(each.num_tokens, each.result.bucket and each.result.bucket.num_tokens) for each in found]
    assert ran == [(87, None), (87, None), (32, 32), (38, 40)]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("graphs", get_args(PrefillGraphs))
@pytest.mark.one_in(2)
def test_so_are_the_states_of_several_layers(
    graphs: PrefillGraphs, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(laws.WORKERS, "eagle3", eagle3_worker)
    found = laws.check_paths("eagle3", laws.PLACE, chunk, graphs=graphs)
    widths = {ran.result.value.features.shape[1] for ran in found if ran.phase == PREFILL}
    assert widths == {3 * rm.HIDDEN}


@pytest.mark.parametrize("worker", laws.WORKERS)
@pytest.mark.parametrize("place", PLACES[::2], ids=str)
def test_a_full_bucket_equals_eager_prefill_to_the_bit(place: Place, worker: str) -> None:
    laws.check_exact(worker, place)


@pytest.mark.parametrize("worker", laws.WORKERS)
@pytest.mark.parametrize("place", [*PLACES[:3], Place("mla", "trtllm_mla", 32)], ids=str)
def test_a_replay_of_all_equals_the_padded_step_to_the_bit(place: Place, worker: str) -> None:
    laws.check_full_exact(worker, place)


def test_a_mixed_step_runs_between_pieces_and_in_a_whole_graph() -> None:
    laws.check_mixed()


def test_fields_of_a_user_go_in_and_come_out() -> None:
    laws.check_further_fields()


@pytest.mark.parametrize("place", [Place("mla", "flashinfer_mla", 4), Place("gqa", "fa3", 8, (1, 2))], ids=str)
@pytest.mark.parametrize("graphs", get_args(PrefillGraphs))
@pytest.mark.one_in(3)
def test_drafts_after_it_are_those_of_a_full_recompute(place: Place, graphs: PrefillGraphs) -> None:
    """Requests join and leave, and some share pages with others."""
    scene = random_arrivals(12, 6, 24, 12, seed=2)
    captured = {"prefill_buckets": (4, 16), "prefill_graphs": graphs, "make_graph": RecordedGraph}
    requests, _ = check_scene(place, 3, scene, max_bs=4, chunk=5, **captured)
    assert any(request.statistics.num_shared_tokens for request in requests)


@cache
def eagerly(model: str, backend: str) -> tuple[Capacity, list[list[int]], list[list[int]]]:
    """Prompts, and what plain decoding makes of them without a graph."""
    given, capacity = [*prompts(2, 60), [0, *prompts(4, 160)[3]]], Capacity(3, 200, 256, **CHAIN)
    return capacity, given, tokens(plain(model, backend, capacity, given, 8)[0])


@pytest.mark.parametrize(
    ("model", "backend"), [pytest.param("gqa", "fa3", marks=pytest.mark.full), ("v4", "dsv4")], ids=["gqa", "v4"]
)
@pytest.mark.parametrize("graphs", get_args(PrefillGraphs))
@pytest.mark.one_in(2)
def test_eagle_equals_plain_decoding(model: str, backend: str, graphs: PrefillGraphs) -> None:
    """Whatever a model hands to its attention beside queries, keys and values; see below for one that hands nothing."""
    capacity, given, expected = eagerly(model, backend)
    captured = {"chunk": 20, "prefill_buckets": (16, 64), "prefill_graphs": graphs, **GRAPH}
    decoded, one = plain(model, backend, capacity, given, 8, **captured)
    drafted, other = eagle(model, backend, capacity, given, 8, **captured)
    assert tokens(decoded) == tokens(drafted) == expected
    assert one.num_graph_steps[PREFILL] > 0 < other.num_graph_steps[DRAFT_PREFILL]


@pytest.mark.parametrize("path", PREFILLS)
def test_an_idle_rank_prefills_nothing(path: str) -> None:
    worker = laws.eagle_worker(laws.PLACE, **PREFILLS[path], make_graph=RecordedGraph)
    idle = Step.idle(worker.slots.paging(torch.empty(0, dtype=torch.int64)))
    padding = by_name(worker._prefill.phase.safe_inputs(1))
    given = PrefillInputs(**{name: tensor[:0] for name, tensor in padding.items()})
    with torch.no_grad():
        result = worker._prefill.run(idle, given)
    assert (result.value.tokens.shape, result.value.features.shape) == ((0,), (0, worker.target.hidden_size))
    for held in (*worker.target_caches, *worker.draft_caches):
        for pages in held.pages:
            assert pages[torch.arange(len(pages)) != worker.slots.geometry.reserved_page].isnan().all()


def test_entries_of_another_size_are_refused() -> None:
    """They would be spread over the graph's, as if it had been captured on them."""
    worker = laws.eagle_worker(laws.PLACE, prefill_buckets=laws.BUCKETS, make_graph=RecordedGraph)
    given = worker._first_drafts.phase.safe_inputs(3)
    given = replace(given, features=given.features[:, :1], last=given.last[:1])
    row = worker.slots.admit()
    worker.slots.reserve(row, 8)
    step = worker._prefill_step([Chunk(row, [1, 2, 3], 0, 3)])
    with pytest.raises(InvalidStepError, match=r"input features is \[3, 1\], captured as \[8, 32\]"):
        worker._first_drafts.run(step, given)


@pytest.mark.parametrize("graphs", get_args(PrefillGraphs))
def test_buckets_need_a_graph(graphs: PrefillGraphs) -> None:
    with pytest.raises(CaptureError, match=r"phase prefill: buckets \[8, 32\] were given and no graph to capture with"):
        laws.eagle_worker(laws.PLACE, prefill_buckets=laws.BUCKETS, prefill_graphs=graphs)


def test_a_kernel_that_no_graph_can_hold_prefills_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch_kernel(FA3Backend)
    lacking = replace(kernel.capabilities[StepKind.PREFILL], packed_graph=False)
    monkeypatch.setitem(kernel.capabilities, StepKind.PREFILL, lacking)
    options = {"prefill_buckets": laws.BUCKETS, "make_graph": RecordedGraph}
    with pytest.raises(UnsupportedStepError, match=r"over packed rows.*prefill in pieces"):
        laws.eagle_worker(laws.PLACE, prefill_graphs="full", **options)
    assert all(ran.result.ran_graph for ran in laws.prefill(laws.eagle_worker(laws.PLACE, **options), (5, 3), 8))


def test_prefill_graphs_are_of_two_sorts() -> None:
    with pytest.raises(InvalidStepError, match="prefill_graphs must be 'piecewise' or 'full', got 'whole'"):
        WorkerOptions(prefill_graphs="whole")  # type: ignore[arg-type]
    with pytest.raises(InvalidStepError, match=r"'full' captures nothing without prefill_buckets; give numbers of tok"):
        WorkerOptions(prefill_graphs="full")


@pytest.mark.parametrize("graphs", get_args(PrefillGraphs))
def test_smaller_buckets_share_the_memory_of_larger_ones(graphs: PrefillGraphs) -> None:
    """The largest is captured first, so the others fit into what it has freed; target and draft share nothing."""
    made = list[Noted]()
    options = {"prefill_graphs": graphs, "make_graph": lambda: made.append(Noted()) or made[-1]}
    laws.eagle_worker(laws.PLACE, prefill_buckets=(4, 16, 8), **options)
    alone = [place for place, graph in enumerate(made) if graph.sharing is None]
    assert len(alone) == 2
    assert all(graph.sharing is made[place] for place, graph in enumerate(made[1:]) if place + 1 not in alone)


def test_the_host_lists_the_tokens_of_a_step_not_of_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 requests and a bucket of 8192 tokens it took 60 ms a step."""
    worker = laws.modules_worker(laws.PLACE, prefill_buckets=(64,), make_graph=RecordedGraph)
    chunks, listed = [Chunk(row, [1, 2, 3, 4, 5], 1, 3) for row in (1, 2)], list[int]()
    made = mtp.to_device
    monkeypatch.setattr(mtp, "to_device", lambda values, *where: listed.append(len(values)) or made(values, *where))
    tokens, _ = worker._prompt_tokens(chunks, torch.tensor([6, 7]))
    assert tokens.shape == (2, 64 + laws.MORE_ROWS["mtp"] + 2 * 3)
    assert max(listed) == 2 * (2 + 2 * 3)


@pytest.mark.parametrize("sizes", [(0,), (-3, 0)])
def test_buckets_hold_a_token(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidStepError, match=r"a bucket of prefill holds at least 1 token, got num_tokens=0"):
        laws.eagle_worker(laws.PLACE, prefill_buckets=sizes, make_graph=RecordedGraph)


@pytest.mark.parametrize("name", ["buckets", "prefill_buckets"])
@pytest.mark.parametrize("sizes", [64, "8,16", (8.0,), None])
def test_buckets_are_whole_numbers(name: str, sizes: object) -> None:
    message = re.escape(f"{name} must be a tuple of whole numbers, such as (1, 2, 4); got {sizes!r}")
    with pytest.raises(InvalidStepError, match=message):
        WorkerOptions(**{name: sizes})  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_holds_a_token(chunk: int) -> None:
    with pytest.raises(InvalidStepError, match=rf"chunk must be at least 1 prompt token, got {chunk}"):
        WorkerOptions(chunk=chunk)


@pytest.mark.parametrize(
    ("runtime", "sizes"),
    [
        ({}, ()),
        ({"prefill": "piecewise"}, (40,)),
        ({"prefill": "piecewise", "prefill_buckets": (12, 48)}, (12, 48)),
        ({"prefill": "piecewise", "path": "eager"}, ()),
        ({"prefill": "full", "path": "eager"}, ()),
        ({"prefill": "full", "prefill_buckets": (48,)}, (48,)),
    ],
    ids=str,
)
@pytest.mark.one_in(2)
def test_a_run_says_how_it_prefills(runtime: dict[str, object], sizes: tuple[int, ...]) -> None:
    small = {"max_bs": 2, "buckets": (1,), "max_context": 96, "prefill_chunk": 20}
    engine, given = build_engine(load_run_config("chain", backend="fa3", runtime=small | runtime)), prompts(3, 40)
    assert engine.eagle.options.prefill_buckets == sizes
    full = bool(sizes) and runtime["prefill"] == "full"
    assert engine.eagle.options.prefill_graphs == ("full" if full else "piecewise")
    assert [c.tokens for c in engine.generate(given, 8)] == [c.tokens for c in engine.generate_plain(given, 8)]
    for phase in (PREFILL, DRAFT_PREFILL):
        assert bool(engine.ran[phase]["graph"]) == bool(sizes)


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({"prefill": "whole"}, r"runtime\['prefill'\]: .*'eager', 'piecewise' or 'full', got 'whole'"),
        ({"prefill": "full", "prefill_buckets": (0,)}, r"runtime\['prefill_buckets'\].* got 0"),
        ({"prefill": "full", "prefill_buckets": ()}, r"runtime\['prefill_buckets'\]"),
        (
            {"prefill_buckets": [32, 64]},
            r"runtime\['prefill_buckets'\]: prefill = 'eager' captures none, got \[32, 64\]; set 'piecewise' or",
        ),
    ],
    ids=str,
)
def test_errors_name_the_key(runtime: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config("chain", runtime=runtime)
