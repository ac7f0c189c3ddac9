"""What racecheck is run on: each barrier that is left out is there, and its reports are read as what they are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import racecheck
from tests.gluon_replays import CASES
from tests.racecheck import BARRIERS, KERNELS, PACKAGE, ROOT, raced, without

LEFT_OUT = sorted({each for of_kernel in BARRIERS.values() for each in of_kernel})


def test_each_kernel_has_a_case() -> None:
    assert {(backend, name, width) for backend, name, _, width in CASES} >= set(KERNELS.values())


@pytest.mark.parametrize(("module", "statement"), LEFT_OUT)
def test_a_copy_lacks_one_statement_and_differs_in_nothing_else(module: str, statement: str, tmp_path: Path) -> None:
    without(tmp_path, module, statement)
    name = f"{PACKAGE}/kernels/{module}.py"
    here, there = ((root / name).read_text().splitlines() for root in (ROOT, tmp_path))
    changed = [(one, two) for one, two in zip(here, there, strict=True) if one != two]
    assert [(one.strip(), two.strip()) for one, two in changed] == [(statement, "pass")]


@pytest.mark.parametrize(
    ("said", "left_out", "status"),
    [
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", None, "pass"),
        ("RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", None, "fail"),
        ("RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", LEFT_OUT[0], "pass"),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", LEFT_OUT[0], "not_seen"),
        ("Error: Device not supported", None, "not_run"),
    ],
)
def test_a_report_is_read(said, left_out, status, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout=f"========= {said}\n", stderr="")
    monkeypatch.setattr(racecheck, "_inside", lambda *_: answer)
    assert raced("gluon", left_out)["status"] == status
