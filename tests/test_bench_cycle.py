"""`bench cycle` runs whole cycles of the worker, `bench memory` adds up declarations, and their commands. On a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from attn_backends.bench import cycle, memory, plot, stacks
from attn_backends.bench.cycle import AHEAD, CYCLES, Loop, Setting, SteadyWorker, compare, measure_cycles, take_cycles
from attn_backends.bench.host import LOOP
from attn_backends.bench.memory import measure_memory
from attn_backends.bench.rows import CycleRow, MetadataRow, Missing, Stage
from attn_backends.bench.speculation import PHASES, Tables, speculative
from attn_backends.bench.stacks import SHAPES, Projected, StackShape
from attn_backends.cli import bench_cycles, main
from attn_backends.errors import UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
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
    assert len({id(backend.memory) for backend in own}) == 3, "phases keep their metadata"
    tables = {id(backend): backend.memory._blocks[0].clone() for backend in own}
    worker.committed = [CONTEXT - 50] * 2
    worker.run()
    for backend in own:
        assert torch.equal(backend.memory._blocks[0], tables[id(backend)])


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
        for phase in PHASES:
            assert totals[phase] == sum(r.bytes for r in own if r.phase == phase and r.buffer != memory.TOTAL)
            assert {"seq_lens", "write_slots"} <= {row.buffer for row in own if row.phase == phase}
        assert totals["all"] == max(totals[phase] for phase in PHASES)
    made = backend(capacity, tables.geometry)
    made.capture(capacity.bucket(StepKind.DRAFT_EXTEND, 1), tables.paging(1))
    (total,) = [row.bytes for row in rows if (row.phase, row.paging) == (memory.ALL, "request_table")]
    num_buffers = sum(row.phase == "verify" for row in rows)
    assert total <= made.memory.num_bytes <= total + 256 * num_buffers, "aligned"
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


METADATA = MetadataRow("metadata", "fa3", "triton", "cycle", "fused", 32, 4096, 64, 1, 21.5, 9.5, 6, 0, 0, 0)
CYCLE = CycleRow("cycle", "fa3", "triton", "Llama-3-70B", 1, 4096, "graph", 510.0, f"graph, {AHEAD}", 500.0, 1.02)
ABSENT = Missing("fa3", "x", "torch, batch 1", "no", False)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Commands that measure nothing: what they give is up to the test. Returns what they were asked for, too."""
    measured, asked = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_cycles.Tables, "of", lambda capacity, device: SimpleNamespace(capacity=capacity))

    def measure(problems, batch_sizes, contexts, bench):
        for backend, tables in problems:
            asked.append((backend.name, tables.capacity, tuple(batch_sizes), tuple(contexts), bench.rounds))
            bench.calibration_us.append(300.0 + len(asked))
            yield from measured

    def cycles(backend, batch_sizes, contexts, stage):
        asked.append((backend.name, tuple(batch_sizes), tuple(contexts), stage.rounds))
        return iter(measured)

    monkeypatch.setattr(bench_cycles.metadata, "measure_metadata", measure)
    monkeypatch.setattr(bench_cycles.cycle, "measure_cycles", cycles)
    monkeypatch.setattr(bench_cycles.results, "device_name", lambda device: "NVIDIA H200")
    return measured, asked


def test_bench_metadata_measures_each_backend_at_its_page_sizes(fake_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "150")
    measured, asked = fake_gpu
    measured += [METADATA, ABSENT]
    path = tmp_path / "rows.json"
    assert main(["bench", "metadata", "--json", str(path)]) == 0
    places = [(name, capacity.page_size, capacity.topk, capacity.max_context) for name, capacity, *_ in asked]
    assert places == [
        (name, page_size, 1, 131072)
        for name, page_size in [("trtllm_mla", 64), ("fa3", 64), ("fa3", 1), ("flashinfer_mla", 1), ("dsv4", 256)]
    ]
    assert asked[0][2:] == ((1, 32, 128, 512), (1024, 4096, 32768, 131072), 20)
    assert asked[0][1].max_bs == 512
    written = json.loads(path.read_text())
    assert written["rows"] == [asdict(METADATA)] * 5
    keys = (
        "bench backend kernel phase mode batch_size context page_size topk host_us gpu_us launches copies syncs to_host"
    )
    assert list(written["rows"][0]) == keys.split()
    assert written["calibration"] == {"additions": LOOP, "least_us": 301.0, "median_us": 303.0, "most_us": 305.0}
    assert (written["rounds"], len(written["missing"]), written["device"]) == (20, 5, "NVIDIA H200")
    output = capsys.readouterr().out
    assert "21.5" in output
    assert "this host takes 301.0 .. 303.0 .. 305.0 us for 10000 additions" in output
    assert "not measured: fa3/x torch, batch 1; torch, batch 1 and 3 more: no" in output


def test_bench_metadata_is_quick_and_takes_sizes(fake_gpu):
    measured, asked = fake_gpu
    measured += [METADATA]
    words = ["--backend", "fa3", "--page-size", "16", "--topk", "4"]
    assert main(["bench", "metadata", "--quick", *words]) == 0
    assert main(["bench", "metadata", *words, "--batch-size", "3", "--context", "200000"]) == 0
    (quick, given) = asked
    assert quick == ("fa3", speculative(128, 131072, 16, 4, 3), (32, 128), (4096,), 5)
    assert given == ("fa3", speculative(3, 200000, 16, 4, 3), (3,), (200000,), 20)


def test_bench_cycle_writes_rows(fake_gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    measured, asked = fake_gpu
    measured += [CYCLE, replace(ABSENT, failed=True)]
    path = tmp_path / "rows.json"
    assert main(["bench", "cycle", "--json", str(path)]) == 1
    assert asked == [(name, (1, 32), (4096,), 20) for name in ("flashinfer_mla", "trtllm_mla", "fa3")]
    written = json.loads(path.read_text())
    assert written["rows"] == [asdict(CYCLE)] * 3
    assert {"bench", "backend", "kernel", "batch_size", "context", "mode", "us", "peer", "peer_us", "ratio"} <= set(
        written["rows"][0]
    )
    assert [(each["backend"], each["value"], each["met"]) for each in written["targets"]] == [("fa3", 1.02, True)] * 3
    output = capsys.readouterr().out
    assert "1.020" in output
    assert "met: a cycle, times one without planning, at most 1.05: fa3/triton, 3 of 3; at worst 1.02" in output


def test_bench_memory_needs_no_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "rows.json"
    assert main(["bench", "memory", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    places = {(row["backend"], row["page_size"], row["topk"]) for row in rows}
    assert places == {(name, *case) for name, cases in memory.CASES.items() for case in cases}
    assert "1,357,947,904" in capsys.readouterr().out
    words = ["--backend", "fa3", "--page-size", "16", "--batch-size", "2", "--context", "100"]
    assert main(["bench", "memory", *words, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    tables = [row["bytes"] for row in rows if (row["phase"], row["buffer"]) == ("verify", "page_table")]
    assert tables == [4 * 2 * 7] * 2, "7 pages of 16 hold 100 tokens and 5 nodes"


def test_nothing_measured_is_an_error(fake_gpu):
    assert main(["bench", "cycle"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["metadata"], "bench metadata can't run here: torch sees no CUDA device"),
        (["cycle"], "bench cycle can't run here: torch sees no CUDA device"),
        (["cycle", "--topk", "2"], "bench cycle has no --topk"),
        (["cycle", "--set", "trees", "--page-size", "4"], "bench cycle has no --set or --page-size"),
        (["memory", "--plot", "a.png"], "bench memory has no --plot"),
        (["memory", "--batch-size", "1", "2"], "bench memory takes one --batch-size and one --context"),
        (["memory", "--topk", "0"], "topk must be at least 1, got 0"),
        (["memory", "--json", "no/rows.json"], "there is no folder no"),
        (["attention", "--topk", "2"], "bench attention has no --topk"),
        (["metadata", "--plot", "a.jpg"], "a picture ends in .png or .svg"),
    ],
)
def test_the_commands_refuse_with_a_reason(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_sizes_below_one_are_refused(fake_gpu, capsys):
    assert main(["bench", "cycle", "--batch-size", "0"]) == 2
    assert "--batch-size must be at least 1, got 0" in capsys.readouterr().err


class Figure:
    """Matplotlib's, as far as it is used; keeps what is drawn."""

    drawn: list

    def __init__(self, **_):
        Figure.drawn = []

    def suptitle(self, text):
        Figure.drawn.append(text)

    def subplots(self, rows, columns, **_):
        def axes():
            return SimpleNamespace(
                plot=lambda x, y, label, **_: Figure.drawn.append((label, x, y)),
                bar=lambda names, heights, color: Figure.drawn.append((names, heights, color)),
                scatter=lambda names, heights, **_: Figure.drawn.append((names, heights)),
                set=lambda title, **_: Figure.drawn.append(title),
                bar_label=lambda bars, labels, **_: Figure.drawn.append(labels),
                set_xlabel=lambda text: None,
                set_xticks=lambda *_, **__: None,
                legend=lambda **_: None,
            )

        grid = np.empty((rows, columns), dtype=object)
        for place in np.ndindex(rows, columns):
            grid[place] = axes()
        return grid

    def savefig(self, path, **_):
        path.write_text("picture")


@pytest.fixture
def matplotlib_here(monkeypatch):
    module = ModuleType("matplotlib.figure")
    module.Figure = Figure
    monkeypatch.setattr(plot, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)


def test_the_picture_of_metadata_shows_cycles_by_batch_size(fake_gpu, tmp_path, matplotlib_here):
    others = [
        replace(METADATA, phase="draft", host_us=1.0),
        replace(METADATA, context=1024),
        replace(METADATA, mode="sglang", kernel="", host_us=350.0),
        replace(METADATA, batch_size=1, host_us=20.0, gpu_us=4.0),
    ]
    fake_gpu[0].extend([METADATA, *others])
    path = tmp_path / "metadata.svg"
    assert main(["bench", "metadata", "--backend", "fa3", "--page-size", "64", "--plot", str(path)]) == 0
    assert path.read_text() == "picture"
    title, ours, sglangs, host, on_device, *_ = Figure.drawn
    assert title == "metadata of a cycle on NVIDIA H200"
    assert ours == ("fused triton", [1, 32], [20.0, 21.5])
    assert sglangs == ("sglang", [32], [350.0])
    assert host == "fa3, page size 64, context 4096: host"
    assert on_device == ("fused triton", [1, 32], [4.0, 9.5])


def test_the_picture_of_cycles_shows_what_is_left_without_planning(fake_gpu, tmp_path, matplotlib_here):
    fake_gpu[0].extend(
        [replace(CYCLE, mode="eager"), CYCLE, replace(CYCLE, mode="loop", us=400.0, peer_us=390.0, ratio=1.026)]
    )
    path = tmp_path / "cycle.png"
    assert main(["bench", "cycle", "--backend", "fa3", "--plot", str(path)]) == 0
    title, bars, marks, ratios, panel = Figure.drawn
    assert title == "cycles on NVIDIA H200; black: without planning"
    names = ["graph\n1 x 4096", "loop\n1 x 4096"]
    assert bars == (names, [510.0, 400.0], ["C0", "C1"])
    assert marks == (names, [500.0, 390.0])
    assert ratios == ["1.020", "1.026"]
    assert panel == "fa3: Llama-3-70B"


def test_a_loop_over_a_host_planner_is_refused_before_it_is_captured(stage, monkeypatch):
    monkeypatch.setattr(cycle, "_needs_host_lens", lambda backend, kind: True)
    with pytest.raises(UnsupportedStepError, match="draft_decode, target_verify, draft_extend"):
        cycle.loop(setting_of("fa3", GQA, stage), setting_of("fa3", GQA, stage).backends(ahead=False))
