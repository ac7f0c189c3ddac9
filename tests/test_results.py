"""Results: one shape for every command, nothing of the machine in it, and the pages that show them."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from attn_backends import cli, results
from attn_backends.conformance import CATALOGUE, Report
from attn_backends.conformance.matrix import COMMAND, page, shown
from attn_backends.conformance.outcomes import EXECUTED
from attn_backends.errors import ConfigError
from attn_backends.results import Head, Results, __main__, heads
from tests import gpu_results
from tests.gpu.sanitize import memory_errors, verdict

ROOT = Path(__file__).parent.parent
COMMITTED = sorted((ROOT / "docs" / "results").rglob("*.json"))
HEAD = Head(
    "NVIDIA H200", {"torch": "2.11.0+cu130"}, "2026-11-20", "0123456789abcdef", "attn-backends demo --json FILE"
)
DEMO_ROW = {
    "backend": "fa3", "kernel": "torch", "model": "gqa", "draft": "tree", "path": "graph", "device": "cuda",
    "dtype": "bfloat16", "cache_dtype": "bfloat16", "batch_size": 6, "tokens_per_cycle": 3.8614, "identical": False,
    "consistent": True, "divergences": 1, "max_gap": 0.01,
}  # fmt: skip
BENCH_ROW = {
    "bench": "attention", "backend": "fa3", "kernel": "vllm_flash_attn", "batch_size": 32, "context": 4096, "heads": 32,
    "width": 4, "us": 101.5, "peer": "flash_attn_varlen_func", "peer_us": 100.0, "ratio": 1.015,
}  # fmt: skip


def test_what_is_written_is_read_back_with_a_row_on_each_line(tmp_path):
    path = tmp_path / "rows.json"
    results.write(path, HEAD, [DEMO_ROW, BENCH_ROW], rounds=50)
    assert results.read(path) == Results(HEAD, (DEMO_ROW, BENCH_ROW), {"rounds": 50})
    keys = list(json.loads(path.read_text()))
    assert keys == ["device", "versions", "date", "commit", "command", "rounds", "rows"]
    assert [json.loads(line.strip(" ,")) for line in path.read_text().splitlines() if line.startswith('{"')] == [
        DEMO_ROW,
        BENCH_ROW,
    ]


def test_rows_of_the_commonest_keys_may_be_lists(tmp_path):
    same, mixed = tmp_path / "same.json", tmp_path / "mixed.json"
    whole = {same: Results(HEAD, (DEMO_ROW,) * 3, {"rounds": 50})}
    whole[mixed] = Results(HEAD, (BENCH_ROW, DEMO_ROW, DEMO_ROW))
    for path, found in whole.items():
        results.write(path, found.head, found.rows, **found.own)
    __main__.main([str(same), str(mixed)])
    told = json.loads(same.read_text())
    assert (told["every"], told["columns"], told["rows"]) == (DEMO_ROW, [], [[]] * 3)
    told = json.loads(mixed.read_text())
    assert told["every"] == {"backend": "fa3"}
    assert [type(row) for row in told["rows"]] == [dict, list, list], "keys that are not the first columns"
    assert {path: results.read(path) for path in whole} == whole
    mixed.write_text(mixed.read_text().replace('"columns": ["', '"columns": [], "x": ["'))
    with pytest.raises(ConfigError, match=r"mixed\.json: not a result"):
        results.read(mixed)


def test_a_row_that_ends_early_lacks_the_columns_that_follow(tmp_path):
    path, rows = tmp_path / "rows.json", ({"check": "a", "ms": 1.0}, {"check": "b"}, {"check": "c", "ms": 2.0})
    results.write(path, HEAD, rows)
    __main__.main([str(path)])
    assert json.loads(path.read_text())["rows"] == [["a", 1.0], ["b"], ["c", 2.0]]
    assert results.read(path).rows == rows


def test_values_that_are_equal_but_of_another_type_are_not_what_all_rows_have(tmp_path):
    path, rows = tmp_path / "rows.json", ({"a": [1], "b": 2}, {"a": [1.0], "b": 2}, {"a": [True], "b": 2})
    results.write(path, HEAD, rows)
    __main__.main([str(path)])
    told = json.loads(path.read_text())
    assert (told["every"], told["rows"]) == ({"b": 2}, [[[1]], [[1.0]], [[True]]])
    assert [type(row["a"][0]) for row in results.read(path).rows] == [int, float, bool]


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense", '{"rows": 3, "device": "x", "versions": {}}'])
def test_what_is_no_result_is_refused_by_name(text, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.json: not a result"):
        results.read(path)


def test_a_command_names_files_of_the_checkout_and_no_others(tmp_path):
    words = [
        "attn-backends",
        "demo",
        "--json",
        str(tmp_path / "rows.json"),
        f"--report={tmp_path}/x.html",
        "fa3",
        "a:B",
    ]
    assert results.without_paths(words) == "attn-backends demo --json FILE --report=FILE fa3 a:B"
    inside = str(ROOT / "docs" / "results" / "x.json")
    assert results.without_paths(["--json", inside, "../outside/x.json"]) == "--json docs/results/x.json FILE"
    message = "compiling /home/me/.cache/flashinfer/90a/x.cu failed: 1/2 of torch/ext.h, see /tmp/a.log"
    assert results.without_folders(message) == "compiling x.cu failed: 1/2 of torch/ext.h, see a.log"


def test_the_head_says_where_and_when(monkeypatch):
    monkeypatch.setenv(results.COMMIT_VARIABLE, "abc")
    head = results.head(["attn-backends", "demo"])
    assert (head.device, head.commit, head.command) == ("CPU", "abc", "attn-backends demo")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", head.date)
    assert {"python", "torch"} <= head.versions.keys()


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    command = ("git", "-C", str(folder), *identity, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_checkout_and_says_if_code_differs(monkeypatch, tmp_path):
    monkeypatch.delenv(results.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(heads, "ROOT", tmp_path)
    assert results.commit() == "unknown"
    git(tmp_path, "init", "--quiet")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/x.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "x")
    head = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "docs" / "x.json").write_text("2")
    assert results.commit() == head
    (tmp_path / "code.py").write_text("2")
    assert results.commit() == head + "+dirty"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_committed_results_have_the_shape_and_name_no_machine(path):
    found = results.read(path)
    assert found.rows
    assert "" not in (found.head.device, found.head.date, found.head.command)
    assert "torch" in found.head.versions
    assert not re.search(r"(?<![\w.])/(?:root|home|tmp|work|usr|opt)/", path.read_text())
    if path.parent.name != "results":
        assert re.fullmatch(r"[0-9a-f]{40}", found.head.commit), "a result of a machine is of a commit"


def test_the_matrix_shows_a_demo_where_there_is_one():
    text = page(Results(HEAD, (DEMO_ROW,)), Results(HEAD, (BENCH_ROW,)))
    assert "| fa3 | torch | gqa | tree | graph | bfloat16 | bfloat16 | 3.86 | no | yes |" in text
    assert text.count("on NVIDIA H200") == 1
    assert "at commit 0123456789ab, 2026-11-20; torch 2.11.0+cu130." in text


def test_reports_of_one_device_are_one_table():
    row = {"kernel": "torch", "check": "math.decode", "case": None, "path": "eager", "status": "pass"}
    one, other = (Results(HEAD, ({"backend": name} | row,), {"suite_version": "1"}) for name in ("fa3", "reference"))
    text = page(one, other)
    assert text.count("## What the suite found") == 1
    assert "| check | fa3/torch | reference/torch |" in text
    assert "executed: 2 cases of 1 checks, of " in text


def test_kernels_that_were_not_run_share_a_row_and_have_no_column():
    ran = {"backend": "fa3", "kernel": "torch", "check": "math.decode", "case": None, "path": "eager", "status": "pass"}
    absent = [ran | {"kernel": name, "check": "*", "status": "not_run", "reason": "no GPU"} for name in ("a", "b")]
    text = page(Results(HEAD, (ran, *absent), {"suite_version": "1"}))
    assert "| check | fa3/torch |\n" in text
    assert "| not_run | fa3/a, fa3/b | `*` | 2 | no GPU |" in text


def test_the_committed_matrix_is_what_the_committed_results_and_the_records_give():
    files = shown(ROOT / "docs" / "results")
    assert files
    assert (ROOT / "docs" / "matrix.md").read_text() == page(*map(results.read, files)), f"stale; run {COMMAND}"


def test_the_committed_reports_are_of_this_catalogue():
    found = [results.read(path) for path in shown(ROOT / "docs" / "results")]
    for report in (Report.of(result) for result in found if "suite_version" in result.own):
        assert {row.check for row in report.rows if row.status in EXECUTED} <= CATALOGUE.keys()


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Two parts that write their file, on a machine that seems to have a GPU; returns the folder and what ran."""
    ran = []

    def run_part(name, path):
        ran.append(name)
        results.write(path, replace(HEAD, commit=results.commit()), [])
        return 0

    monkeypatch.setattr(gpu_results, "PARTS", {"a": "", "b": ""})
    monkeypatch.setattr(gpu_results, "run_part", run_part)
    monkeypatch.setattr(results, "device_name", {"cuda": "NVIDIA H200", "cpu": "CPU"}.get)
    monkeypatch.setenv(results.COMMIT_VARIABLE, HEAD.commit)
    return tmp_path / "out", ran


@pytest.mark.parametrize("name", gpu_results.PARTS)
def test_every_part_of_the_gpu_results_is_understood(name, tmp_path):
    module, *words = gpu_results.words(name, tmp_path / "of two words.json")
    assert find_spec(module) is not None
    assert str(tmp_path / "of two words.json") in words
    if module == gpu_results.CLI:
        cli._parser().parse_args(words)


def test_gpu_results_go_on_where_they_were(parts, monkeypatch):
    out, ran = parts
    assert gpu_results.run(["a"], out) == 0
    assert gpu_results.run(["a", "b"], out) == 0
    assert ran == ["a", "b"]
    for commit, times in (("another", 1), (HEAD.commit + "+dirty", 2), ("unknown", 2)):
        ran.clear()
        monkeypatch.setenv(results.COMMIT_VARIABLE, commit)
        assert gpu_results.run(["a"], out) == gpu_results.run(["a"], out) == 0
        assert ran == ["a"] * times, commit


def test_a_result_that_needs_no_gpu_is_of_any_machine(parts):
    out, ran = parts
    out.mkdir()
    results.write(out / "a.json", replace(HEAD, device="CPU"), [])
    assert gpu_results.run(["b"], out) == 0
    assert ran == ["b"]


def test_gpu_results_come_from_one_machine(parts, monkeypatch, capsys):
    out, ran = parts
    assert gpu_results.run(["a"], out) == 0
    monkeypatch.setattr(results, "device_name", {"cuda": "NVIDIA H100", "cpu": "CPU"}.get)
    monkeypatch.setattr("sys.argv", ["results", "--out", str(out), "b"])
    assert gpu_results.main() == 2
    assert "holds results of NVIDIA H200, this is NVIDIA H100" in capsys.readouterr().err
    monkeypatch.setattr(results, "device_name", lambda device: "CUDA")
    assert gpu_results.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert ran == ["a"]


LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void flashinfer::mla::Kernel<int>(Params)+0x1f0
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Invalid __global__ write of size 16 bytes
=========     at tree_attention_kernel+0x40 in triton_tree.py:10
=========     by thread (1,0,0) in block (0,0,0)
=========
========= Invalid __global__ write of size 16 bytes
=========     at tree_attention_kernel+0x40 in triton_tree.py:10
=========     by thread (2,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 4 errors
"""
PASSED = {"status": "pass", "backend": "fa3", "kernel": "torch", "case": "x", "reason": ""}
RAN = [PASSED | {"path": path} for path in ("eager", "graph")]
LOGS = {"eager": LOG, "graph": LOG}


def test_memory_errors_are_told_apart_by_whose_kernel_it_was():
    found = memory_errors(LOG)
    assert [(error["kernel"], error["whose"], error["count"]) for error in found] == [
        ("void flashinfer::mla::Kernel<int>(Params)", "FlashInfer", 1),
        ("tree_attention_kernel", "ours", 2),
        ("", "ours", 1),
    ]
    status, reason = verdict(RAN, found, LOGS)
    assert status == "fail"
    assert "2 x Invalid __global__ write of size 16 bytes in tree_attention_kernel" in reason
    assert verdict(RAN, found[:1], LOGS) == ("pass", "")
    assert memory_errors("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []


def test_memcheck_that_can_not_run_is_not_run_and_a_case_that_breaks_is_a_failure():
    refused = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\n"
    assert verdict([], [], {"eager": refused, "graph": "exit code 1"}) == (
        "not_run",
        "========= Error: Device not supported; exit code 1",
    )
    broken = [RAN[0], RAN[1] | {"status": "error", "reason": "no such kernel"}]
    assert verdict(broken, [], LOGS) == ("fail", "torch x: no such kernel")
    assert verdict([RAN[0], RAN[1] | {"status": "fail"}], [], LOGS) == ("pass", ""), "numbers are conformance's affair"
    late = [*RAN, RAN[0] | {"kernel": "triton", "status": "not_run"}, RAN[0] | {"case": "y", "status": "not_run"}]
    assert verdict(late, [], LOGS) == ("fail", "fa3/triton was not reached, eager")
    absent = RAN[0] | {"kernel": "sgl_kernel", "status": "not_run", "excused": True}
    assert verdict([*RAN, absent], [], LOGS) == ("pass", "")
    killed = LOGS | {"graph": "no end after 300 s"}
    assert verdict(RAN[:1], [], killed) == ("fail", "memcheck wrote no summary of the graph cases")


def test_a_folder_is_refused_before_anything_is_computed(tmp_path):
    with pytest.raises(ConfigError, match=r"--json .* is a folder; name a file in it"):
        results.check_output("--json", tmp_path)
