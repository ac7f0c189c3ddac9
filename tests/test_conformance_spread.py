"""A run of the suite over several processes is one run, and a second one resumes where the first was ended."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from attn_backends import results
from attn_backends.conformance import Subject, run_conformance
from attn_backends.conformance.outcomes import Report
from attn_backends.conformance.selection import Selection
from attn_backends.conformance.spread import _is_done, main, shares
from attn_backends.errors import ConfigError
from attn_backends.registry import get_backend

SELECTED = "plan.padding,api.idle,refusals.width"


def run(folder: Path, *more: str) -> int:
    given = ["fa3", "--kernel", "torch", "--select", SELECTED, "--folder", str(folder / "parts")]
    return main([*given, "--json", str(folder / "whole.json"), *more])


def test_checks_are_shared_out_by_their_cases() -> None:
    assert shares(Counter(a=9, b=5, c=4, d=1), 2) == [["a,d"], ["b,c"]]
    assert shares(Counter(a=9), 3) == [["a"]]


def test_a_check_of_many_cases_is_shared_out_itself() -> None:
    parts = shares(Counter(a=90, b=5, c=4, d=1), 5)
    assert parts == [["a"], ["b"], ["c"], ["d"]], "its five parts would leave the others no process"
    parts = shares(Counter(a=50, b=20, c=20, d=10), 4)
    assert parts == [["a", "--share", "1/2"], ["a", "--share", "2/2"], ["b,d"], ["c"]]


def test_shares_are_the_whole_and_no_case_is_in_two() -> None:
    subject = Subject(get_backend("fa3"), "torch")
    whole = Selection("math.*").cases(subject)
    parts = [Selection("math.*", share=f"{number}/3").cases(subject) for number in (1, 2, 3)]
    assert sorted(case.to_json() for part in parts for case in part) == sorted(case.to_json() for case in whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert not Selection(share="1/3").is_whole
    for wrong in ("0/3", "4/3", "1", "x/3", "1/-3"):
        with pytest.raises(ConfigError, match="the second of five"):
            Selection(share=wrong)


def test_processes_together_report_what_one_does_and_are_not_run_twice(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(results.COMMIT_VARIABLE, "a" * 40)
    assert run(tmp_path) == 0
    assert capsys.readouterr().err.count(" is done: ") == 2
    found = Report.of(results.read(tmp_path / "whole.json"))
    assert 0.1 < found.wall_s < 600
    assert found.counts == run_conformance("fa3", kernel="torch", select=SELECTED).counts
    parts = sorted((tmp_path / "parts").glob("*.json"))
    times = [part.stat().st_mtime_ns for part in parts]
    assert len(parts) == 2
    parts[0].write_text("{")
    assert run(tmp_path) == 0
    assert "wall_s" not in results.read(tmp_path / "whole.json").own, "a part of the run was an earlier one"
    assert [part.stat().st_mtime_ns > before for part, before in zip(parts, times, strict=True)] == [True, False]
    named = ["fa3", "--kernel", "torch", "--device", "cpu", "--select"]
    (selected,) = re.findall(r"--select (\S+)", results.read(parts[1]).head.command)
    assert _is_done(parts[1], [*named, selected])
    assert not _is_done(parts[1], [*named, selected[:-1]]), "of other checks"
    monkeypatch.setenv(results.COMMIT_VARIABLE, "b" * 40)
    assert not _is_done(parts[1], [*named, selected]), "another commit's"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    assert run(tmp_path) == 2, "a report of another commit is not taken for that of a process that wrote none"
    assert "wrote no whole report" in capsys.readouterr().err


def test_a_process_without_a_report_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fa3", "--kernel", "triton", "--device", "nothing", "--folder", str(tmp_path), "--json", "x"]) == 2
    assert "error: " in capsys.readouterr().err
