"""A worker whose number of steps adapts: tokens are those of plain decoding, whichever set a cycle takes; sets lie in
the memory of the largest, and no cycle captures or allocates.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from attn_backends import get_backend
from attn_backends.errors import CaptureError, ConfigError
from attn_backends.graphs import RecordedGraph
from attn_backends.memory.phase_sets import PhaseSet, PhaseSets
from attn_backends.runner import PhaseRunner, classify
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle import adaptive, engine
from attn_backends_reference.eagle.adaptive import AdaptiveSteps, StepPolicy
from attn_backends_reference.eagle.requests import DraftShape
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker
from spec_metadata import BlockTable, BoundInputs, CacheGeometry, Capacity, InvalidStepError, StepKind
from tests import serving_laws as laws
from tests.serving_scenes import NEWLINE, TREE, arrivals, eagle_worker, endless, prompts

GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}
SETS = (DraftShape(1, 1, 2), DraftShape(4, 3, 16), DraftShape(1, 3, 4), DraftShape(2, 2, 5))
SAME = {1: (1.0,) * len(SETS)}


class InTurns(StepPolicy):
    """Takes each set in its turn, and a few cycles one after the other."""

    def choose(self, bs: int) -> int:
        self.turn = getattr(self, "turn", 0) + 1
        return (self.turn // 2 + self.turn) % len(self.adaptive.sets)


@pytest.mark.parametrize(
    ("model", "backend", "path"),
    [("gqa", "fa3", GRAPH), ("mla", "flashinfer_mla", GRAPH | {"planning": "in_graph"}), ("mla", "trtllm_mla", {})],
)
def test_requests_that_come_and_go_get_what_plain_decoding_gives(monkeypatch, model, backend, path) -> None:
    monkeypatch.setattr("attn_backends_reference.eagle.worker.StepPolicy", InTurns)
    scene = arrivals(12, 16, 60, 14, seed=5)
    page_size = 32 if backend == "trtllm_mla" else 8
    settings = {"chunk": 24, "eos_tokens": (NEWLINE,), "seed": 2, "host_lag": bool(path)}
    worker = eagle_worker(
        model,
        backend,
        Capacity(6, 112, page_size, **TREE),
        checking=path is GRAPH,
        adaptive=AdaptiveSteps(SETS, SAME),
        **settings,
        **path,
    )
    held = worker.step_sets.num_bytes
    laws.check_scene(worker, scene, endless(model, scene, 14))
    assert bool(worker.num_graph_steps) == bool(path)
    assert worker.step_sets.num_bytes == held, "a cycle allocated"
    if path:
        assert held > 0


@pytest.mark.parametrize(
    "shapes",
    [[DraftShape(1, n, n + 1) for n in (1, 3, 5, 7)], [DraftShape(4, 3, 16), DraftShape(1, 7, 8), DraftShape(2, 3, 8)]],
    ids=["chains", "trees"],
)
@pytest.mark.parametrize(("model", "backend"), [("gqa", "fa3"), ("mla", "flashinfer_mla")])
def test_sets_take_a_tenth_more_than_the_largest_at_most(model, backend, shapes) -> None:
    capacity = Capacity(4, 112, 8, 4, 7, 16)

    def held(sets: tuple[DraftShape, ...]) -> int:
        steps = AdaptiveSteps(sets, {1: (1.0,) * len(sets)})
        options = {"buckets": (4,), "make_graph": RecordedGraph, "adaptive": steps}
        return eagle_worker(model, backend, capacity, checking=False, **options).step_sets.num_bytes

    smallest = DraftShape(1, 1, 2)
    alone = max(held((shape, smallest)) for shape in shapes if shape != smallest)
    assert held(tuple(shapes)) <= 1.1 * alone


def pieces_of(worker: EagleWorker, number: int) -> list[Tensor]:
    """The static memory that the phases of a set have for themselves: inputs, arenas of plans, workspaces."""
    sets = worker.step_sets[number]
    used = worker.backends.draft, worker.backends.verify, worker.backends.draft_extend
    runners = sets.draft, sets.verify, sets.extend
    inputs = [max(runner._captured.items())[1].inputs for runner in runners]
    within = runners[0]._within
    phases = {phase for each in used for phase in each.phases._phases.values() if phase.within is within}
    return [
        *(getattr(given, name) for given in inputs for name in classify(type(given))),
        *(arena._memory for phase in phases for arena in phase.own),
    ]


def held_by(worker: EagleWorker) -> dict[int, int]:
    """Bytes of each allocation that captured phases of any set hold, by address: tables that phases share, too."""
    used = {worker.backends.draft, worker.backends.verify, worker.backends.draft_extend}
    tables = [one.arena._memory for each in used for alike in each.memory._tables.values() for one in alike]
    own = [piece for number in range(len(worker.policy.adaptive.sets)) for piece in pieces_of(worker, number)]
    storages = [piece.untyped_storage() for piece in (*tables, *own)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def spans(pieces: list[Tensor]) -> list[tuple[int, int]]:
    """First and last address of each piece, in order."""
    return sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in pieces if each.nbytes)


MEASURED = [("gqa", "fa3", 8), ("mla", "flashinfer_mla", 8), ("mla", "trtllm_mla", 32)]


@pytest.mark.parametrize(("model", "backend", "page_size"), MEASURED)
def test_the_buffers_of_all_sets_are_hardly_more_than_those_of_the_largest_alone(model, backend, page_size) -> None:
    """What is measured are allocations, not what the library says of them: phases of a set alone have their own."""
    capacity, options = Capacity(4, 112, page_size, **TREE), GRAPH | {"checking": False}

    def worker_of(sets: tuple[DraftShape, ...]) -> EagleWorker:
        steps = AdaptiveSteps(sets, {1: (1.0,) * len(sets)})
        return eagle_worker(model, backend, capacity, adaptive=steps, **options)

    alone = [sum(held_by(worker_of((shape,))).values()) for shape in SETS]
    worker = worker_of(SETS)
    together = sum(held_by(worker).values())
    assert max(alone) <= together * 1.01
    assert together <= 1.1 * max(alone)
    assert sum(alone) > 1.5 * max(alone), "sets of which one is nearly all show nothing"
    of_sets = [spans(pieces_of(worker, number)) for number in range(len(SETS))]
    for own in of_sets:
        assert all(end <= start for (_, end), (start, _) in pairwise(own)), "phases of a set lie beside one another"
    assert len({own[0][0] for own in of_sets}) == 1, "sets lie over one another"


@pytest.mark.parametrize(("model", "backend", "page_size"), MEASURED)
def test_a_switch_to_another_set_captures_and_allocates_nothing(monkeypatch, model, backend, page_size) -> None:
    monkeypatch.setattr("attn_backends_reference.eagle.worker.StepPolicy", InTurns)
    graphs: list[RecordedGraph] = []

    def make_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    captured, took = Mock(wraps=RecordedGraph.capture), Mock(wraps=PhaseSets.block)
    monkeypatch.setattr(RecordedGraph, "capture", lambda self, *given: captured(self, *given))
    monkeypatch.setattr(PhaseSets, "block", lambda self, *given: took(self, *given))
    capacity, revived = Capacity(2, 112, page_size, **TREE), Counter[int]()
    options = {"checking": False, "adaptive": AdaptiveSteps(SETS, SAME), "buckets": (1, 2), "make_graph": make_graph}
    worker = eagle_worker(model, backend, capacity, **options)
    before = held_by(worker), len(graphs), captured.call_count, took.call_count
    assert len(graphs) == captured.call_count == len(SETS) * 3 * 2, "a graph of each set, phase and bucket"
    revive = PhaseSets.revive

    def counted(self: PhaseSets, one: PhaseSet) -> None:
        revived[id(one)] += self.alive is not one
        revive(self, one)

    monkeypatch.setattr(PhaseSets, "revive", counted)
    completions = serve(worker, prompts(2, 20), 24)
    assert len(revived) == len(SETS)
    assert min(revived.values()) > 1, "every set became alive more than once"
    assert not worker.num_eager_steps.keys() & {"draft", "verify", "draft_extend"}
    assert [len(each.tokens) for each in completions] == [24, 24]
    assert (held_by(worker), len(graphs), captured.call_count, took.call_count) == before


def test_a_set_whose_memory_another_one_took_is_refused() -> None:
    worker = eagle_worker(
        "gqa", "fa3", Capacity(4, 64, 8, **TREE), checking=False, adaptive=AdaptiveSteps(SETS, SAME), **GRAPH
    )
    first, second = (worker.step_sets[i].verify for i in (0, 1))
    assert isinstance(first, PhaseRunner)
    replays = [runner._captured[2] for runner in (first, second)]
    first._within.revive()
    with pytest.raises(CaptureError, match="overwritten by another set of phases, which takes turns with its own"):
        replays[1].graph.replay()


def test_a_graph_that_plans_from_an_engines_buffers_does_not_make_its_set_alive() -> None:
    """A CUDA graph could not: the other set's metadata would be taken for what was planned."""
    capacity, geometry, sets = Capacity(2, 16, 4), CacheGeometry(9, 4), PhaseSets(torch.device("cpu"))
    backend, own, other = get_backend("fa3")(capacity, geometry, "cpu", kernel="torch"), sets.add(), sets.add()
    paging, graph = BlockTable(torch.zeros(2, capacity.max_pages, dtype=torch.int32), geometry), RecordedGraph()
    bucket, lens = capacity.bucket(StepKind.DECODE, 2), torch.zeros(2, dtype=torch.int32)
    meta = backend.capture(bucket, paging, BoundInputs(lens, lens_include_rows=True), within=own)
    graph.capture(lambda: backend.refresh(meta))
    graph.replay()
    other.revive()
    with pytest.raises(CaptureError, match=r"in the memory of another set of phases: call PhaseSet\.revive"):
        graph.replay()
    own.revive()
    graph.replay()


def test_sets_lie_over_one_another_and_their_phases_beside() -> None:
    sets = PhaseSets(torch.device("cpu"))
    large, small = sets.add(), sets.add()
    a, b = large.memory(1000), large.memory(300)
    c, d = small.memory(200), small.memory(900)
    assert sets.alive is small
    assert not large.is_alive
    assert {a.data_ptr(), b.data_ptr()} == {c.data_ptr(), d.data_ptr()}
    assert sets.num_bytes == 1024 + 512
    like = small.like(torch.arange(70))
    assert torch.equal(like, torch.arange(70))
    assert sets.num_bytes == 1024 + 512 + 768, "no block had room"


def test_the_end_of_reads_is_on_the_stream_of_the_sets_own_device(monkeypatch) -> None:
    recorded: list[object] = []
    event = SimpleNamespace(record=lambda *stream: recorded.extend(stream))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: device)
    second = torch.device("cuda", 1)
    PhaseSets(second).reads_end()
    assert recorded == [(second,)], "not on that of the current device"


def test_the_set_that_promises_most_tokens_a_second_is_taken() -> None:
    costs = {1: (10.0, 11.0, 12.0), 64: (10.0, 25.0, 60.0)}
    policy = StepPolicy(AdaptiveSteps(tuple(DraftShape(1, n, n + 1) for n in (1, 3, 7)), costs))
    for _ in range(120):
        policy.observe(policy.choose(1), [policy.adaptive.sets[policy.current].num_steps + 1])
    assert policy.choose(1) == 2, "all is accepted, and steps cost little"
    assert policy.choose(64) == 0, "steps cost much"
    for _ in range(120):
        policy.observe(policy.choose(1), [1])
    assert policy.choose(1) == 0, "nothing is accepted"
    assert policy.rates(policy.adaptive.sets[0])[0] < 0.2
    for _ in range(120):
        number = policy.choose(1)
        policy.observe(number, [policy.adaptive.sets[number].num_steps + 1])
    assert policy.choose(1) == 2, "all is accepted again"


def test_what_no_verify_can_accept_is_neither_promised_nor_learnt() -> None:
    """A tree of three nodes accepts two drafts, however many steps it has."""
    deep, narrow = DraftShape(1, 5, 6), DraftShape(1, 5, 3)
    policy = StepPolicy(AdaptiveSteps((deep, narrow), SAME | {1: (1.0, 1.0)}))
    assert policy.expected_tokens(narrow) == policy.expected_tokens(DraftShape(1, 2, 3))
    policy.observe(1, [3] * 100)
    assert policy.rates(deep)[2] > 0.9, "a draft that was not tried was not rejected"


def test_a_tree_learns_rates_of_its_own_and_borrows_until_then() -> None:
    """More nodes hold more candidates of a depth, so what a narrow tree accepts says little of a wide one."""
    narrow, wide = DraftShape(4, 3, 5), DraftShape(4, 3, 16)
    policy = StepPolicy(AdaptiveSteps((narrow, wide), {1: (1.0, 1.4)}))
    for _ in range(40):
        policy.observe(0, [1, 2])
    assert policy.rates(wide)[:2] == pytest.approx([0.5, 0.1], abs=0.06), "nothing else is known of it"
    for _ in range(40):
        policy.observe(1, [4, 4])
    assert policy.rates(narrow)[0] < 0.75 < 0.95 < policy.rates(wide)[0]
    assert policy.choose(1) == 1
    chains = StepPolicy(AdaptiveSteps((DraftShape(1, 1, 2), DraftShape(1, 3, 4)), {1: (1.0, 1.0)}))
    chains.observe(1, [4] * 50)
    assert chains.rates(DraftShape(1, 1, 2)) == chains.rates(DraftShape(1, 3, 4))[:1], "a chain's depths are the same"


def test_costs_between_measured_batches() -> None:
    steps = AdaptiveSteps((DraftShape(1, 1, 2), DraftShape(1, 3, 4)), {2: (1.0, 2.0), 6: (3.0, 8.0)})
    assert [steps.costs(bs) for bs in (1, 2, 3, 6, 99)] == [[1, 2], [1, 2], [1.5, 3.5], [3, 8], [3, 8]]


def test_a_small_advantage_changes_nothing() -> None:
    sets = (DraftShape(1, 1, 2), DraftShape(1, 2, 3))
    most = 1 + adaptive.PRIOR
    even = most, most + adaptive.PRIOR**2
    assert StepPolicy(AdaptiveSteps(sets, {1: (even[0], even[1] / 1.03)})).choose(1) == 0
    assert StepPolicy(AdaptiveSteps(sets, {1: (even[0], even[1] / 1.08)})).choose(1) == 1


@pytest.fixture
def load(tmp_path):
    """Loads a run from the text of a file."""

    def load_text(text: str):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_run_config(str(path))

    return load_text


def test_what_is_refused(load) -> None:
    chain = DraftShape(1, 5, 6)
    with pytest.raises(InvalidStepError, match=r"num_draft_tokens=6 is larger than the capacity: num_steps=5 > 3"):
        eagle_worker("gqa", "fa3", Capacity(2, 64, 8, **TREE), adaptive=AdaptiveSteps((chain,), {1: (1.0,)}))
    for options, reason in [
        (((), {1: ()}), "need sets that differ"),
        (((chain, chain), {1: (1.0, 1.0)}), "need sets that differ"),
        (((chain,), {}), "at one batch size or more"),
        (((chain,), {4: (1.0, 2.0)}), "cycle_ms of 4 requests is .* each of the 1 sets"),
        (((chain,), {4: (0.0,)}), "a positive number"),
        (((chain,), {4: (1.0,)}, 0), "window must be at least 1 cycle"),
    ]:
        with pytest.raises(InvalidStepError, match=reason):
            AdaptiveSteps(*options)
    eagle = 'backend = "fa3"\n[eagle]\ntopk = 1\nnum_steps = 3\nnum_draft_tokens = 4\n'
    sets = "sets = [{topk = 1, num_steps = %d, num_draft_tokens = %d}]\n"
    table = f"[eagle.adaptive]\n{sets}cycle_ms = [{{bs = 1, ms = [%s]}}]\n"
    run = load(eagle + table % (2, 3, "1"))
    assert engine._adaptive_steps(run.eagle.adaptive) == AdaptiveSteps((DraftShape(1, 2, 3),), {1: (1.0,)})
    assert load(eagle).eagle.adaptive is None, "off by default"
    for text, reason in [
        (eagle + table % (5, 6, "1"), "eagle.adaptive: a set of topk=1, num_steps=5.* is larger than the capacity"),
        (eagle + 'worker = "mtp"\n' + table % (2, 3, "1"), "worker = 'mtp' drafts one number of tokens"),
        (eagle + table % (2, 3, "1, 2"), "ms of bs = 1 must be a positive number for each of 1 sets"),
        (eagle + (table % (2, 3, "1")).replace("{bs", "{bs = 1, ms = [2]}, {bs"), r"bs must differ .* got \[1, 1\]"),
        (eagle + "verify_rows = 4\n" + table % (2, 3, "1"), "verify_threshold and verify_rows cut"),
        (eagle + table % (2, 3, '"x"'), r"eagle.adaptive.cycle_ms.0.ms.0: must be a number, got 'x'"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            load(text)


def test_no_set_is_revived_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What forgets and renews the sets runs on the host, once, not in each replay."""
    sets = PhaseSets(torch.device("cuda"))
    first, second = sets.add(), sets.add()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first.revive()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first.revive()
    with pytest.raises(CaptureError, match=r"another set of phases is alive: call PhaseSet\.revive before the capture"):
        second.revive()
    assert first.is_alive
