"""`benchmarks cycle` runs whole cycles of the worker, and `benchmarks memory` adds up declarations. On a CPU."""

from __future__ import annotations

import pytest
import torch

from attn_backends.errors import UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from benchmarks import cycle, memory, stacks
from benchmarks.cycle import AHEAD, CYCLES, Loop, Setting, SteadyWorker, compare, measure_cycles, take_cycles
from benchmarks.memory import measure_memory
from benchmarks.rows import CycleRow, Missing, Stage
from benchmarks.speculation import PHASES, Tables, speculative
from benchmarks.stacks import SHAPES, Projected, StackShape
from spec_metadata import StepKind
from tests.test_bench import CPU, Ticks

MLA = StackShape("mla", 64, 2, 4, 1, nope=16, rope=16, value=16, rank=32, query_rank=24, vocabulary=64)
GQA = StackShape("gqa", 64, 3, 4, 2, nope=0, rope=16, value=16, vocabulary=64)
PAIRS = [("flashinfer_mla", MLA), ("trtllm_mla", MLA), ("fa3", MLA), ("fa3", GQA)]
CONTEXT = 100


@pytest.fixture
def stage():
    """A CPU on which a graph's replay takes one tick."""
    clock = Ticks()

    class Graph(RecordedGraph):
        def replay(self):
            clock.now += 1
            super().replay()

    return Stage(CPU, Graph, clock, rounds=2)


def setting_of(name, shape, stage, batch_size=2):
    return Setting.of(get_backend(name), shape, batch_size, CONTEXT, stage)


def graphs(stage, planning):
    return {"buckets": (2,), "make_graph": stage.make_graph, "planning": planning}


def after_cycles(run, num=3):
    for _ in range(num):
        run()


WAYS = {
    "graph_before": lambda setting: steady(setting, ahead=False, **graphs(setting.stage, "before")),
    "graph": lambda setting: steady(setting, ahead=False, **graphs(setting.stage, "in_graph")),
    "graph ahead": lambda setting: steady(setting, ahead=True, **graphs(setting.stage, "in_graph")),
    "loop": lambda setting: looped(setting, ahead=False),
    "loop ahead": lambda setting: looped(setting, ahead=True),
}


def steady(setting, *, ahead, **options):
    """The state of a worker after some cycles, and where its next one would begin."""
    worker = SteadyWorker(setting, setting.backends(ahead=ahead), **options)
    after_cycles(worker.run)
    rows = torch.tensor(worker.rows)
    return {name: getattr(worker._state, name)[rows] for name in ("root", "tokens", "log_probs", "hidden")} | {
        "lens": worker._lens[rows]
    }


def looped(setting, *, ahead):
    loop = Loop(setting, setting.backends(ahead=ahead))
    for name in ("root", "tokens", "log_probs", "hidden"):
        getattr(loop.state, name).zero_()  # as before the cycle that was run ahead of the capture
    after_cycles(loop.replay)
    return {name: getattr(loop.state, name) for name in ("root", "tokens", "log_probs", "hidden")} | {
        "lens": loop.next_lens
    }


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(("name", "shape"), PAIRS)
def test_every_mode_computes_what_the_eager_worker_does(name, shape, way, stage):
    expected = steady(setting_of(name, shape, stage), ahead=False)
    assert expected["root"].abs().sum() > 0
    assert (expected["lens"] > CONTEXT).all()
    found = WAYS[way](setting_of(name, shape, stage))
    for field, tensor in expected.items():
        torch.testing.assert_close(found[field], tensor, rtol=0.02, atol=0.02, msg=field)


def test_every_cycle_begins_at_the_context(stage, monkeypatch):
    seen = []
    for kind in ("draft_decode", "target_verify", "draft_extend"):
        make = getattr(cycle.Step, kind)
        spy = lambda *args, make=make, **host: seen.append(make(*args, **host)) or seen[-1]  # noqa: E731
        monkeypatch.setattr(cycle.Step, kind, spy)
    worker = SteadyWorker(setting_of("fa3", GQA, stage), setting_of("fa3", GQA, stage).backends(ahead=False))
    after_cycles(worker.run)
    assert [step.seq_lens.tolist() for step in seen] == [[CONTEXT] * 2] * 9
    assert {step.max_committed for step in seen} == {CONTEXT}


@pytest.mark.parametrize("planning", ["before", "in_graph"])
def test_metadata_that_is_planned_ahead_is_planned_once(planning, stage):
    setting = setting_of("fa3", GQA, stage)
    backends = setting.backends(ahead=True)
    worker = SteadyWorker(setting, backends, **graphs(stage, planning))
    worker.run()
    own = [getattr(backends, phase) for phase in PHASES]
    assert len({id(backend) for backend in own}) == 3, "a backend a phase"
    phases = [phase for backend in own for phase in backend._memory._phases.values()]
    lens = [phase.view(phase.largest)["seqused_k"].clone() for phase in phases]
    worker.committed = [CONTEXT - 50] * 2
    worker.run()
    for phase, before in zip(phases, lens, strict=True):
        assert torch.equal(phase.view(phase.largest)["seqused_k"], before)


def test_rows_of_every_mode_beside_the_same_graphs_without_planning(stage, monkeypatch):
    monkeypatch.setattr(stacks, "SHAPES", (MLA, GQA))
    rows = list(measure_cycles(get_backend("fa3"), [2], [CONTEXT], stage))
    modes = {"eager": "graph", "graph_before": "graph", "graph": "graph", "loop": "loop"}
    assert [(row.model, row.mode, row.peer) for row in rows] == [
        (shape.name, mode, f"{graphs}, {AHEAD}") for shape in (MLA, GQA) for mode, graphs in modes.items()
    ]
    assert {(row.bench, row.backend, row.kernel, row.batch_size, row.context) for row in rows} == {
        ("cycle", "fa3", "torch", 2, CONTEXT)
    }
    assert [(row.us, row.peer_us, row.ratio) for row in rows[:4]] == [(0, 3, 0), (3, 3, 1), (3, 3, 1), (1, 1, 1)]


def test_a_kernel_that_plans_on_the_host_has_no_loop(stage, monkeypatch):
    monkeypatch.setattr(cycle, "_needs_host_lens", lambda backend, kind: kind is StepKind.TARGET_VERIFY)
    measured = list(compare(setting_of("flashinfer_mla", MLA, stage)))
    absent = [each for each in measured if isinstance(each, Missing)]
    assert [(each.failed, each.case.split(",")[0]) for each in absent] == [(False, "loop")] * 2
    assert "plan on the host (target_verify)" in absent[0].reason
    assert {row.mode for row in measured if isinstance(row, CycleRow)} == {"eager", "graph_before", "graph"}


def test_a_mode_that_raises_is_listed_and_the_others_are_measured(stage, monkeypatch):
    monkeypatch.setattr(cycle, "Loop", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    measured = list(compare(setting_of("fa3", GQA, stage)))
    absent = [each for each in measured if isinstance(each, Missing)]
    assert [(each.failed, each.reason) for each in absent] == [(True, "RuntimeError: broken")] * 2
    assert len(measured) == 5


@pytest.mark.full
def test_what_does_not_fit_is_said_and_the_next_is_measured(stage, monkeypatch):
    make = Setting.of

    def of(backend, shape, batch_size, context, stage):
        if batch_size == 3:
            raise torch.OutOfMemoryError("2 GiB")
        return make(backend, shape, batch_size, context, stage)

    monkeypatch.setattr(stacks, "SHAPES", (GQA,))
    monkeypatch.setattr(cycle.Setting, "of", of)
    first, *rows = measure_cycles(get_backend("fa3"), [3, 2], [CONTEXT], stage)
    assert (first.case, first.failed) == ("gqa, batch 3, context 100", False)
    assert len(rows) == 4


def test_cycles_are_timed_back_to_back_behind_one_that_is_not():
    clock, order = Ticks(), []

    def runner(name, us):
        def run():
            order.append(name)
            clock.now += us if order[-2:-1] == [name] else 1000

        return run

    assert take_cycles([runner("a", 4), runner("b", 6)], 3, clock) == [4, 6]
    assert order == ["a"] * (1 + CYCLES) + ["b"] * (1 + CYCLES) + (["a"] * (1 + CYCLES) + ["b"] * (1 + CYCLES)) * 3


def test_stacks_have_the_sizes_of_the_published_models():
    sizes = {}
    for shape in SHAPES:
        weights = Projected(shape, torch.bfloat16, torch.device("meta"))
        layer = shape.layer
        entry = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
        sizes[shape.name] = (shape.num_layers, entry, sum(x.numel() for x in weights.buffers()))
        assert layer.scale == (192 if shape.rank else 128) ** -0.5
    rank, hidden = 512 * (128 + 128), 7168
    assert sizes["DeepSeek-V3, 128 heads"] == (
        61,
        (128, 1, 576, 512),
        hidden * 1536 + 1536 * 128 * 192 + hidden * 576 + 128 * rank + 128 * 128 * hidden,
    )
    assert sizes["DeepSeek-V3, 16 heads"][:2] == (61, (16, 1, 576, 512))
    assert sizes["Llama-3-70B"] == (80, (64, 8, 128, 128), 8192 * (64 + 8 + 8) * 128 + 64 * 128 * 8192)


def test_the_layers_of_a_stack_share_weights_and_not_caches(stage):
    setting = setting_of("fa3", GQA, stage)
    backend = setting.made(setting.backend)
    caches = setting.target.allocate_caches(backend)
    assert len({cache.k.data_ptr() for cache in caches}) == 3
    assert setting.target.tapped(()).allocate_caches(backend)[0] is caches[0], "all workers have one set of them"
    assert setting.draft.allocate_caches(backend)[0].k.data_ptr() not in {cache.k.data_ptr() for cache in caches}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in memory.CASES.items() for case in cases])
def test_memory_rows_add_up_to_what_is_allocated(name, case):
    backend, capacity = get_backend(name), speculative(4, 512, *case, 4)
    rows = list(measure_memory(backend, capacity))
    assert {(row.bench, row.backend, row.page_size, row.topk) for row in rows} == {("memory", name, *case)}
    tables = Tables.of(capacity, CPU)
    for paging in memory.PAGINGS:
        own = [row for row in rows if row.paging == paging]
        totals = {row.phase: row.bytes for row in own if row.buffer == memory.TOTAL}
        shared = sum(row.bytes for row in own if row.phase == memory.ALL and row.buffer != memory.TOTAL)
        for phase in PHASES:
            assert totals[phase] == shared + sum(
                row.bytes for row in own if row.phase == phase and row.buffer != memory.TOTAL
            )
            assert {"seq_lens", "write_slots"} <= {row.buffer for row in own if row.phase == phase}
        assert totals["all"] == shared + sum(totals[phase] - shared for phase in PHASES)
    made = backend(capacity, tables.geometry)
    for kind in PHASES.values():
        made.capture(capacity.bucket(kind, 1), tables.paging(1))
    (total,) = [
        row.bytes for row in rows if (row.phase, row.paging, row.buffer) == (memory.ALL, "request_table", memory.TOTAL)
    ]
    arenas = {id(arena): arena for phase in made._memory._phases.values() for arena in phase.arenas}
    assert total == sum(arena.num_bytes for arena in arenas.values())
    assert not any(row.peer_bytes for row in rows), "SGLang was measured at another capacity"
    workspaces = [row for row in rows if row.phase == memory.WORKSPACE]
    assert workspaces
    assert {row.paging for row in workspaces} == {""}


PEERS_MB = {
    ("trtllm_mla", 64, 1): 467,
    ("fa3", 64, 1): 21,
    ("fa3", 64, 4): 827,
    ("fa3", 1, 1): 1358,
    ("flashinfer_mla", 1, 1): 336,
}


@pytest.mark.parametrize(
    ("place", "most_mb"),
    [
        (("trtllm_mla", 64, 1), 4),
        (("trtllm_mla", 64, 4), 4),
        (("fa3", 64, 1), 4),
        (("fa3", 64, 4), 4),
        (("fa3", 1, 1), 140),
        (("flashinfer_mla", 1, 1), 140),
    ],
)
def test_memory_at_the_capacity_that_sglang_was_measured_at(place, most_mb):
    name, page_size, topk = place
    rows = list(measure_memory(get_backend(name), speculative(128, 131072, page_size, topk, 4)))
    totals = [row for row in rows if (row.phase, row.buffer) == (memory.ALL, memory.TOTAL)]
    assert [row.paging for row in totals] == list(memory.PAGINGS)
    for row in totals:
        assert row.bytes <= most_mb * 10**6
        assert (row.peer_bytes and round(row.peer_bytes / 1e6)) == PEERS_MB.get(place)


def test_bytes_of_phases_that_a_backend_refuses_are_not_told() -> None:
    (absent,) = measure_memory(get_backend("dsv4"), speculative(2, 512, 256, 4, 4))
    assert isinstance(absent, Missing)
    assert (absent.backend, absent.case, absent.failed) == ("dsv4", "page size 256, topk 4", False)
    assert "draft with topk = 1" in absent.reason


def test_a_loop_over_a_host_planner_is_refused_before_it_is_captured(stage, monkeypatch):
    monkeypatch.setattr(cycle, "_needs_host_lens", lambda backend, kind: True)
    with pytest.raises(UnsupportedStepError, match="draft_decode, target_verify, draft_extend"):
        cycle.loop(setting_of("fa3", GQA, stage), setting_of("fa3", GQA, stage).backends(ahead=False))
