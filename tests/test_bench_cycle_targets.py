"""Targets of metadata, static buffers and cycles, and the page that is written from their results. On a CPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from attn_backends import results
from benchmarks import cycles_page
from benchmarks.page import FOLDER
from benchmarks.rows import CycleRow, MemoryRow, MetadataRow
from benchmarks.targets import by_target, check_targets

ROOT = Path(__file__).parent.parent
OURS = MetadataRow("metadata", "fa3", "triton", "cycle", "in_graph", 32, 4096, 64, 1, 20.0, 11.0, 6, 0, 0, 0)
VENDORS = replace(OURS, kernel="vllm_flash_attn", gpu_us=18.0, launches=10, copies=4)
HOST = replace(OURS, backend="flashinfer_mla", kernel="flashinfer_fa3", page_size=1, host_us=790.0, copies=6)
STATIC = MemoryRow("memory", "fa3", 128, 131072, 64, 4, "block_table", "all", "total", 4_000_000, None)
CYCLE = CycleRow("cycle", "fa3", "triton", "Llama-3-70B", 1, 4096, "loop", 510.0, "loop, planned ahead", 500.0, 1.02)
LAUNCHES, SYNCS, TO_HOST = "launches and copies", "synchronisations", "copies to the host"
HOST_TIME, DEVICE, ADDED = "host time of a cycle", "device time of", "device time that the vendor's"
SGLANGS, CONTEXTS, REQUESTS = "host time, of SGLang's", "host time at context", "host time of 512"


def verdicts(target, *rows):
    found = check_targets(map(asdict, rows))
    return [(reached.value, reached.met) for reached in found if reached.target.startswith(target)]


@pytest.mark.parametrize(
    ("target", "row", "expected"),
    [
        (LAUNCHES, OURS, (6, True)),
        (LAUNCHES, replace(OURS, copies=1), (7, False)),
        (SYNCS, replace(OURS, syncs=1), (1, False)),
        (TO_HOST, replace(OURS, to_host=1), (1, False)),
        (HOST_TIME, VENDORS, (20, True)),
        (HOST_TIME, replace(OURS, host_us=25.1, backend="dsv4", page_size=256), (25.1, False)),
        (DEVICE, replace(OURS, gpu_us=15.1), (15.1, False)),
        (DEVICE, replace(OURS, gpu_us=24.9, batch_size=128), (24.9, True)),
        (DEVICE, replace(OURS, gpu_us=25.1, batch_size=128, backend="dsv4", page_size=256), (25.1, False)),
        (DEVICE, replace(OURS, gpu_us=59.0, batch_size=128, page_size=1), (59, True)),
        (DEVICE, replace(OURS, gpu_us=61.0, batch_size=128, page_size=1), (61, False)),
        ("phases", HOST, (0, False)),
        ("static", STATIC, (4, True)),
        ("static", replace(STATIC, bytes=4_000_001), (4, False)),
        ("static", replace(STATIC, page_size=1, bytes=140_000_000), (140, True)),
        ("static", replace(STATIC, page_size=1, bytes=141_000_000), (141, False)),
        ("a cycle", CYCLE, (1.02, True)),
        ("a cycle", replace(CYCLE, ratio=1.06), (1.06, False)),
    ],
)
def test_a_target_is_held_against_the_rows_that_it_speaks_of(target, row, expected):
    assert verdicts(target, row) == [expected]


@pytest.mark.parametrize(
    "row",
    [
        replace(OURS, phase="draft"),
        replace(OURS, mode="fused"),
        replace(OURS, topk=4),
        replace(HOST, context=1024, kernel="triton"),
        replace(STATIC, batch_size=64),
        replace(STATIC, context=4096),
        replace(STATIC, phase="verify"),
        replace(CYCLE, mode="eager"),
        replace(CYCLE, backend="flashinfer_mla"),
    ],
)
def test_other_rows_reach_nothing(row):
    assert list(check_targets([asdict(row)])) == []


def test_of_a_vendors_kernel_what_it_adds_is_told_and_nothing_promised():
    assert verdicts(ADDED, OURS, VENDORS) == [(7, None)]
    assert verdicts(ADDED, replace(OURS, page_size=1), VENDORS) == [], "of another size"
    assert verdicts(LAUNCHES, VENDORS) == verdicts(DEVICE, VENDORS) == []


def test_host_time_is_held_against_sglangs_of_the_same_run():
    theirs = replace(HOST, mode="sglang", kernel="", host_us=2400.0)
    assert verdicts(SGLANGS, replace(HOST, host_us=800.0), theirs) == [(0.333, True)]
    assert verdicts(SGLANGS, replace(HOST, host_us=810.0), theirs) == [(0.338, False)]
    assert verdicts(SGLANGS, HOST, replace(theirs, batch_size=128)) == [], "of another size"


def test_growth_compares_the_same_kernel_at_two_sizes():
    long, many = replace(OURS, context=131072, host_us=22.1), replace(OURS, batch_size=512, host_us=21.0)
    one = replace(OURS, batch_size=1, host_us=17.0)
    assert verdicts(CONTEXTS, OURS, VENDORS, long) == [(1.105, False)]
    assert verdicts(REQUESTS, one, replace(one, host_us=1.0, page_size=1), many) == [(1.235, False)]
    assert verdicts(REQUESTS, one, replace(many, host_us=20.0)) == [(1.176, True)]
    assert verdicts(CONTEXTS, VENDORS, long) == [], "the other is not there"


def test_phases_that_are_captured_have_rows():
    phases = [replace(HOST, phase=phase) for phase in ("draft", "verify", "draft_extend")]
    assert verdicts("phases", HOST, *phases) == [(3, True)]
    assert verdicts("phases", HOST, *phases[:2]) == [(2, False)]


def test_a_line_says_how_many_met_a_target_and_the_worst():
    found = check_targets(map(asdict, [CYCLE, replace(CYCLE, ratio=1.2), replace(CYCLE, ratio=1.1)]))
    ((worst, num_met, num),) = by_target(found)
    assert (worst.value, worst.verdict, num_met, num) == (1.2, "missed", 1, 3)


@pytest.fixture
def folder(tmp_path):
    head = results.Head("NVIDIA H200", {}, "2026-01-02", "abc", "python -m benchmarks metadata")
    rows = [OURS, replace(OURS, mode="torch", host_us=2000.0), VENDORS, replace(VENDORS, mode="vendor", host_us=150.0)]
    rows += [replace(OURS, context=1024, host_us=30.0), replace(OURS, mode="sglang", kernel="", host_us=357.0)]
    loop = {"additions": 10_000, "least_us": 300.0, "median_us": 310.0, "most_us": 320.0}
    for name, own, more in [
        ("bench_metadata_fa3", rows, {"calibration": loop}),
        ("bench_memory", [STATIC, replace(STATIC, topk=1, peer_bytes=21_000_000), replace(STATIC, phase="draft")], {}),
        ("bench_cycle", [CYCLE], {}),
    ]:
        plain = [asdict(row) for row in own]
        reached = [asdict(each) for each in check_targets(plain)]
        results.write(tmp_path / f"{name}.json", head, plain, targets=reached, **more)
    return tmp_path


def test_the_page_says_what_was_measured(folder):
    path = folder / "page.md"
    assert cycles_page.main([str(folder), "--output", str(path)]) == 0
    lines = path.read_text().splitlines()
    for line in (
        "| fa3 | 64 | triton | 32 | 4096 | 2000.0 |  | 20.0 |  | 357.0 |",
        "| fa3 | 64 | vllm_flash_attn | 32 | 4096 |  |  | 20.0 | 150.0 | 357.0 |",
        "| fa3 | 64 | vllm_flash_attn | 32 | 4096 |  |  | 18.0 | 18.0 | 11.0 |",
        "| fa3 | 64 |  | sglang | 6 | 0 | 0 | 0 |",
        "| fa3 | 64 | triton | in_graph | 6 | 0 | 0 | 0 |",
        "| fa3 | 64 | 4 | block_table | 4.0 |  |",
        "| fa3 | 64 | 1 | block_table | 4.0 | 21.0 |",
        "| fa3 | triton | Llama-3-70B | 1 | 4096 | loop | 510 | 500 | 1.020 |",
    ):
        assert line in lines, line
    assert not any("| 32 | 1024 |" in line for line in lines), "times are those of the contexts that are shown"
    case = "in_graph, batch 32, context 1024, page size 64, topk 1"
    assert f"| host time of a cycle, us, at most 25 | fa3 | triton | 1 of 2 | 30.0 | {case} | **missed** |" in lines
    assert any("300.0 to 320.0 us, 310.0 in the middle" in line for line in lines)


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    assert cycles_page.main([str(tmp_path), "--output", str(tmp_path / "page.md")]) == 2
    assert "holds none of bench_memory.json" in capsys.readouterr().err


def test_the_committed_page_is_what_the_committed_results_say(tmp_path):
    written = tmp_path / "page.md"
    assert cycles_page.main([str(ROOT / FOLDER), "--output", str(written)]) == 0
    assert (ROOT / cycles_page.PAGE).read_text() == written.read_text(), f"run {cycles_page.COMMAND}"
