"""What initcheck is run on: the planted fault is reached, and reports are read as what they are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import initcheck
from tests.commands import run_module
from tests.initcheck import FAULT, KERNEL, ROOT, copy_packages, judged

READ = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _merge+0x40 in triton_merge.py:77
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
SILENT = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
FULL = "========= COMPUTE-SANITIZER\n========= 24160 errors were skipped (error buffer overflow).\n" + SILENT
RAN = [{"backend": "fa3", "kernel": "triton", "case": "one", "status": "pass", "reason": ""}]
ON_CPU = """
import sys
from dataclasses import replace
import torch
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.conformance import Subject, run_case
from attn_backends.kernels import paged_operators
from tests.initcheck import leave_scratch_unwritten, split_case
from tests.triton_interpreter import interpreted
if sys.argv[1] == "unwritten":
    leave_scratch_unwritten()
interpreted("triton_decode", "_attend")
(kernel,) = (kernel for kernel in FA3Backend.kernels if kernel.name == "triton")
kernel = replace(kernel, unavailable_reasons=lambda device: [])
library = torch.library.Library("attn_backends", "IMPL")
library.impl("paged_attention", paged_operators._paged_attention_cuda, "CPU", allow_override=True)
subject = Subject(type("fa3", (FA3Backend,), {"kernels": (kernel,)}), "triton")
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True, warn_only=True)
row = run_case(subject, split_case(subject))
print(row.status, row.reason)
"""


def test_the_planted_fault_is_one_line_of_a_copy(tmp_path: Path) -> None:
    file, old, new = FAULT
    before = (ROOT / file).read_text(encoding="utf-8")
    copy_packages(tmp_path, planted=True)
    assert (ROOT / file).read_text(encoding="utf-8") == before
    assert (tmp_path / file).read_text(encoding="utf-8") == before.replace(old, new) != before


@pytest.mark.parametrize(
    ("planted", "scratch", "wanted"),
    [
        (True, "unwritten", "here is NaN"),
        pytest.param(True, "filled", "rows are wrong; here by 1", marks=pytest.mark.full),
        pytest.param(False, "unwritten", "pass", marks=pytest.mark.full),
    ],
)
def test_only_the_planted_fault_reads_scratch_that_nobody_wrote(planted, scratch, wanted, tmp_path: Path) -> None:
    """On Triton's interpreter, where what is allocated and not written holds NaN. Filled scratch has been written."""
    copy_packages(tmp_path, planted=planted)
    (tmp_path / "on_cpu.py").write_text(ON_CPU)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    code, output = run_module(["on_cpu", scratch], tmp_path, environment)
    assert (code, wanted in output) == (0, True), output


def test_a_planted_read_must_be_reported_in_the_kernel_that_reads() -> None:
    assert judged("planted", READ, "", RAN)["status"] == "pass"
    assert judged("planted", READ.replace(KERNEL, "_other"), "", RAN)["status"] == "fail"
    assert judged("planted", SILENT, "", RAN)["reason"].startswith("THE PLANTED READ WAS NOT REPORTED")
    assert judged("planted", "", "no end after 160 s", [])["status"] == "not_run"


@pytest.mark.parametrize("run", ["cases", "right"])
def test_a_read_in_a_kernel_of_ours_or_a_broken_case_fails(run: str) -> None:
    assert judged(run, SILENT, "", RAN)["status"] == "pass"
    assert (
        judged(run, READ, "", RAN)["reason"] == f"1 x Uninitialized __global__ memory read of size 4 bytes in {KERNEL}"
    )
    assert judged(run, READ.replace(KERNEL, "void at::native::copy"), "", RAN)["status"] == "pass"
    full = judged(run, FULL, "", RAN)
    assert (full["status"], full["reason"]) == ("not_run", "24160 errors were skipped (error buffer overflow).")
    assert judged(run, FULL.replace("skipped (error buffer overflow)", "found"), "", RAN)["status"] == "fail"
    assert judged(run, SILENT, "", [RAN[0] | {"status": "error"}])["status"] == "fail"
    assert judged(run, SILENT, "", [RAN[0] | {"status": "fail"}])["status"] == "fail"
    assert judged(run, SILENT, "", [RAN[0] | {"status": "not_run"}])["status"] == "fail"
    assert judged(run, SILENT, "", [])["status"] == "fail"
    assert judged(run, "", "no end after 160 s", RAN)["status"] == "not_run"


def test_without_the_tool_nothing_is_run(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(initcheck, "SANITIZER", str(tmp_path / "compute-sanitizer"))
    monkeypatch.setattr(sys, "argv", ["initcheck", "--json", str(tmp_path / "out.json")])
    assert initcheck.main() == 0
    assert {row["status"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]} == {"not_run"}
    assert "planted: not_run: compute-sanitizer: No such file" in capsys.readouterr().out
