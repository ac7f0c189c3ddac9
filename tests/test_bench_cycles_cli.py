"""The benchmarks `metadata`, `memory` and `cycle`: what they ask for, write and refuse."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cli_cycles as bench_cycles
from benchmarks import memory
from benchmarks.__main__ import main
from benchmarks.cycle import AHEAD
from benchmarks.host import LOOP
from benchmarks.rows import CycleRow, MetadataRow, Missing
from benchmarks.speculation import speculative

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
    assert main(["metadata", "--json", str(path)]) == 0
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
    assert main(["metadata", "--quick", *words]) == 0
    assert main(["metadata", *words, "--batch-size", "3", "--context", "200000"]) == 0
    (quick, given) = asked
    assert quick == ("fa3", speculative(128, 131072, 16, 4, 3), (32, 128), (4096,), 5)
    assert given == ("fa3", speculative(3, 200000, 16, 4, 3), (3,), (200000,), 20)


def test_bench_cycle_writes_rows(fake_gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    measured, asked = fake_gpu
    measured += [CYCLE, replace(ABSENT, failed=True)]
    path = tmp_path / "rows.json"
    assert main(["cycle", "--json", str(path)]) == 1
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
    assert main(["memory", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    places = {(row["backend"], row["page_size"], row["topk"]) for row in rows}
    assert places == {(name, *case) for name, cases in memory.CASES.items() for case in cases}
    assert "1,357,947,904" in capsys.readouterr().out
    words = ["--backend", "fa3", "--page-size", "16", "--batch-size", "2", "--context", "100"]
    assert main(["memory", *words, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    tables = [row["bytes"] for row in rows if (row["phase"], row["buffer"]) == ("all", "page_table")]
    assert tables == [4 * 2 * 7] * 2, "7 pages of 16 hold 100 tokens and 5 nodes"


def test_nothing_measured_is_an_error(fake_gpu):
    assert main(["cycle"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["metadata"], "benchmarks metadata can't run here: torch sees no CUDA device"),
        (["cycle"], "benchmarks cycle can't run here: torch sees no CUDA device"),
        (["cycle", "--topk", "2"], "benchmarks cycle has no --topk"),
        (["cycle", "--set", "trees", "--page-size", "4"], "benchmarks cycle has no --set or --page-size"),
        (["memory", "--batch-size", "1", "2"], "benchmarks memory takes one --batch-size and one --context"),
        (["memory", "--topk", "0"], "topk must be at least 1, got 0"),
        (["memory", "--json", "no/rows.json"], "there is no folder no"),
        (["attention", "--topk", "2"], "benchmarks attention has no --topk"),
    ],
)
def test_the_commands_refuse_with_a_reason(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_sizes_below_one_are_refused(fake_gpu, capsys):
    assert main(["cycle", "--batch-size", "0"]) == 2
    assert "--batch-size must be at least 1, got 0" in capsys.readouterr().err
