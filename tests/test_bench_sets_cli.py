"""The command of `benchmarks attention` for the sets of kernels and trees: what it writes, shows and refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import cli_attention as bench
from benchmarks.__main__ import main
from benchmarks.ceilings import Ceilings
from benchmarks.rows import KernelRow, Missing, Row


@pytest.fixture
def fake_gpu(monkeypatch):
    """A command that measures nothing: what the sets give is up to the test."""
    measured = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "runnable_kernels", lambda backends, device: ({"fa3": ["triton"]}, []))
    monkeypatch.setattr(bench, "measure_ceilings", lambda stage: Ceilings(4.1, 790.0))
    monkeypatch.setattr(bench, "measure_kernels", lambda *args: iter(measured))
    monkeypatch.setattr(bench, "measure_trees", lambda *args: iter(measured))
    monkeypatch.setattr(bench.results, "device_name", lambda device: "NVIDIA H200")
    return measured


ROW = KernelRow("kernels", "fa3", "triton", 8, 4096, 32, 1, 10.2, "vllm_flash_attn", 10.0, 1.02, 3.3, 44.0)


def test_the_command_writes_rates_and_ceilings(fake_gpu, tmp_path, capsys):
    fake_gpu += [ROW, *[Missing("fa3", "torch", f"batch {n}", "many keys", False) for n in (1, 2, 3)]]
    path = tmp_path / "rows.json"
    assert main(["attention", "--set", "kernels", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["rows"] == [asdict(ROW)]
    assert written["ceilings"] == {"copy_tb_per_s": 4.1, "matmul_tflop_per_s": 790.0}
    cases = ["batch 1", "batch 2", "batch 3"]
    assert written["missing"] == [
        {"backend": "fa3", "kernel": "torch", "reason": "many keys", "failed": False, "cases": cases}
    ]
    output = capsys.readouterr().out
    assert "not measured: fa3/torch batch 1; batch 2 and 1 more: many keys" in output
    assert "copies 4.10 TB/s and multiplies 790 TFLOP/s" in output
    assert all(word in output for word in ("TFLOP/s", "3.30", "1.020"))


def test_a_table_in_a_file_is_not_cut_to_a_terminal(fake_gpu, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fake_gpu += [replace(ROW, backend="flashinfer_mla", kernel="flashinfer_fa3", batch_size=128, context=131072)]
    assert main(["attention", "--set", "kernels"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "131072" in line)
    words = ("flashinfer_mla", "flashinfer_fa3", "vllm_flash_attn", "128", "131072", "10.2", "1.020", "3.30", "44")
    assert all(word in row for word in words)


def test_the_command_measures_trees(fake_gpu, tmp_path):
    row = Row("trees", "fa3", "triton", 8, 4096, 32, 16, 12.0, "triton, a chain", 10.0, 1.2)
    fake_gpu += [row]
    path = tmp_path / "rows.json"
    assert main(["attention", "--set", "trees", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["rows"] == [asdict(row)]
    assert "ceilings" not in written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "no/a.json", "--set", "kernels"], "there is no folder no"),
        (["--set", "kernels", "--context", "16"], "--context must be over 16"),
        (["--set", "trees", "--context", "16"], "--context must be over 16"),
    ],
)
def test_the_command_refuses_with_a_reason(fake_gpu, arguments, message, capsys):
    assert main(["attention", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
