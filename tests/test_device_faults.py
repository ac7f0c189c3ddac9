"""The faults that are planted for compute-sanitizer stand in the kernels, and its reports are read as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_backends.conformance import Subject, selected_cases
from attn_backends.registry import get_backend
from tests.device_faults import JOBS, ROOT, judged, races

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _attend+0x40 in gluon_groups.py:238
=========     and Read access at _attend+0x90 in gluon_groups.py:241 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
READ = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _merge+0x40 in triton_merge.py:77
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
SILENT = "========= COMPUTE-SANITIZER\n========= {} SUMMARY: 0 errors\n"


@pytest.mark.parametrize("name", JOBS)
def test_a_planted_fault_changes_one_place_of_a_copy_and_nothing_here(name: str, tmp_path: Path) -> None:
    file, old, new = JOBS[name].edit
    before = (ROOT / file).read_text(encoding="utf-8")
    JOBS[name].planted(tmp_path)
    assert (ROOT / file).read_text(encoding="utf-8") == before
    changed = (tmp_path / file).read_text(encoding="utf-8")
    assert changed == before.replace(old, new) != before
    compile(changed, file, "exec")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_a_case(name: str) -> None:
    job = JOBS[name]
    cases = selected_cases(Subject(get_backend(job.backend), job.kernel), job.check)
    cases = [case for case in cases if case.path == "eager" and case.kind in ("decode", "prefill") and case.lens]
    assert [case for case in cases if max(case.lens) >= job.most and min(case.lens) <= job.least]


@pytest.mark.parametrize(("name", "log"), [("unwritten part", READ), ("latents", RACE)])
def test_a_report_is_a_failure_of_the_kernel_and_wanted_of_a_planted_fault(name: str, log: str) -> None:
    job, silent = JOBS[name], SILENT.format("RACECHECK" if JOBS[name].tool == "racecheck" else "ERROR")
    assert judged(job, True, log, "", "pass")[0] == "pass"
    assert judged(job, True, log.replace(job.at, "another"), "", "pass")[0] == "fail"
    assert judged(job, True, silent, "", "pass")[:2] == ("fail", f"nothing was reported in {job.at}")
    assert judged(job, False, log, "", "pass")[0] == "fail"
    assert judged(job, False, silent, "", "pass")[:2] == ("pass", "")
    assert judged(job, False, silent, "", "")[:2] == ("fail", "the case broke")
    assert judged(job, False, "", "no end after 130 s", "")[:2] == ("not_run", "no end after 130 s")


def test_a_race_is_told_by_its_kernel() -> None:
    (found,) = races(RACE)
    assert (found["kernel"], found["what"]) == ("_attend", "Error: Race reported between Write access")
