"""What a run of the suite ends with: expected failures, exit codes, refusals, and its command line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attn_backends import BackendUnavailableError, ConfigError
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cli import main
from attn_backends.conformance import (
    Case,
    ExpectedFailure,
    Outcome,
    Report,
    Row,
    run_conformance,
)
from spec_metadata import StepKind
from tests.torch_kernels import torch_kernel

KNOWN = {"reason": "the plan needs uniform widths", "link": "https://example.org/issues/12"}


def test_a_constructor_that_raises():
    class Broken(FA3Backend):
        def __init__(self, *args, **kwargs):
            raise RuntimeError("no memory for the workspace")

    with pytest.raises(BackendUnavailableError, match=r"no memory for the workspace.*flashinfer_mla"):
        run_conformance(Broken)


def test_a_first_case_that_its_constructor_refuses_is_run():
    report = run_conformance("dsv4", kernel="torch", select="compressed.refuses_cut_blocks")
    assert [row.status for row in report.rows] == [Outcome.REFUSED]


def test_expected_failures_are_strict():
    with pytest.raises(ConfigError, match=r"'math.none'.*math.decode"):
        run_conformance("fa3", expected_failures=[ExpectedFailure("math.none", "*", **KNOWN)])
    with pytest.raises(ConfigError, match="reason and link"):
        run_conformance("fa3", expected_failures=[ExpectedFailure("math.decode", "*", "", "")])
    expected = [ExpectedFailure("math.decode", "*", **KNOWN)]
    passing = run_conformance("fa3", kernel="torch", quick=True, select="math.decode", expected_failures=expected)
    assert {row.status for row in passing.rows} == {Outcome.FAIL}
    assert all(row.reason.startswith("unexpected pass") for row in passing.rows)


def test_an_expected_failure_is_no_failure():
    class Stale(FA3Backend):
        def copy_inputs(self, meta, step):
            pass

    expected = [ExpectedFailure("graph.equals_eager", "*", **KNOWN)]
    report = run_conformance(Stale, kernel="torch", quick=True, select="graph.equals_eager", expected_failures=expected)
    assert report.counts[Outcome.XFAIL] == len(report.rows)
    assert report.exit_code(require_run=True) == 0


def row(status):
    return Row("b", "k", "math.decode", Case("math.decode", StepKind.DECODE, lens=(3,)), "eager", status)


@pytest.mark.parametrize(
    ("statuses", "code", "strict_code"),
    [
        ([Outcome.PASS, Outcome.REFUSED, Outcome.XFAIL], 0, 0),
        ([Outcome.PASS, Outcome.NOT_RUN], 0, 1),
        ([Outcome.PASS, Outcome.FAIL], 1, 1),
        ([Outcome.FAIL, Outcome.ERROR], 2, 2),
        ([Outcome.NOT_RUN], 2, 2),
        ([], 2, 2),
    ],
)
def test_exit_codes(statuses, code, strict_code):
    report = Report("1", "cpu", {}, tuple(map(row, statuses)))
    assert (report.exit_code(False), report.exit_code(True)) == (code, strict_code)
    assert Report.from_json(report.to_json()) == report


def absent(name, **what):
    """A kernel that can't run here."""
    present = torch_kernel(FA3Backend)
    return replace(present, name=name, unavailable_reasons=lambda device: [f"{name} is not here"], **what)


@pytest.mark.parametrize(
    ("what", "code"),
    [({}, 1), ({"architectures": frozenset({9})}, 0), ({"source": "fa3"}, 0), ({"source": "another"}, 1)],
)
def test_require_run_excuses_other_architectures_and_second_sources(what, code):
    """Every kernel of a backend is run or listed; what is missing fails only if it could have been here."""
    here = replace(torch_kernel(FA3Backend), name="here", source="fa3")
    kernels = (here, absent("elsewhere", **what))
    subject = type("TwoKernels", (FA3Backend,), {"kernels": kernels})
    report = run_conformance(subject, quick=True, select="math.decode")
    listed = [row for row in report.rows if row.status is Outcome.NOT_RUN]
    assert [(row.kernel, row.reason) for row in listed] == [("elsewhere", "elsewhere is not here")]
    assert report.exit_code(require_run=True) == code
    assert report.exit_code(require_run=False) == 0


def test_a_malformed_case_says_all_that_is_wrong():
    with pytest.raises(ConfigError, match=r"kind is 'dance'.*unknown key 'color'.*check is missing"):
        Case.from_json(json.dumps({"kind": "dance", "color": 1}))
    wanted = r"page_size is 0, not an integer of at least 1; lens is \[-1\], not a list of integers of at least 0"
    with pytest.raises(ConfigError, match=wanted):
        Case.from_json(json.dumps({"check": "math.decode", "kind": "decode", "page_size": 0, "lens": [-1]}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonesuch"], "reference"),
        (["json:JSONDecoder"], "no subclass"),
        (["fa3", "--kernel", "nonesuch"], "torch"),
        (["fa3", "--select", "nonesuch"], "math.*"),
        (["fa3", "--device", "abacus"], "cpu or cuda"),
        (["fa3", "--case", "nonesuch.json"], "error: --case nonesuch.json: No such file or directory"),
        (["fa3", "--case", '{"check": "math.decod", "kind": "decode"}'], "'math.decod'. Did you mean 'math.decode'?"),
        (["fa3", "--case", '{"check": "nonesuch", "kind": "decode"}'], "'nonesuch'. The groups are plan.*, math.*"),
        (["fa3", "--config", "nonesuch.toml"], "nonesuch.toml"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert main(["conformance", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_expected_failure_in_a_file_must_name_a_check(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text('[[expected_failures]]\ncheck = "nonesuch"\ncase = "*"\nreason = "x"\nlink = "y"\n')
    assert main(["conformance", "fa3", "--config", str(path)]) == 2
    assert "math.decode" in capsys.readouterr().err


def test_the_command_line_writes_a_report_and_runs_one_case(tmp_path, capsys):
    path, case = tmp_path / "report.json", tmp_path / "case.json"
    assert main(["conformance", "fa3", "--quick", "--select", "math.*", "--json", str(path)]) == 0
    report = Report.from_json(path.read_text())
    assert report.executed > 10
    output = capsys.readouterr().out
    assert "exit code 0" in output
    assert "not_run fa3 (sgl_kernel) *: " in output
    case.write_text(report.rows[0].case.to_json())
    assert main(["conformance", "fa3", "--kernel", "torch", "--case", str(case)]) == 0
    assert "executed 1 of 1" in capsys.readouterr().out
