"""What a person is told of failures: the most basic first, what was promised, why, and what was not looked for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.cli import main
from attn_backends.conformance import (
    CATALOGUE,
    ExpectedFailure,
    Outcome,
    resolve_subjects,
    run_conformance,
    selected_cases,
)
from attn_backends.conformance.catalogue import GROUPS, group_of
from attn_backends.conformance.report import html_page
from attn_backends.layer import AttentionOutput
from tests.torch_kernels import torch_kernel

DOCS = Path(__file__).parent.parent / "docs"
KNOWN = {"reason": "it is known", "link": "https://example.org/issues/12"}
RIGHT = torch_kernel(FA3Backend)


def in_base_two(q, cache, plan, layer):
    """The right output with a log-sum-exp of another base than is declared."""
    out, lse = RIGHT.launch(q, cache, plan, layer)
    return AttentionOutput(out, lse / math.log(2))


class WrongBase(FA3Backend):
    """A backend whose log-sum-exp is not what it declares."""

    formats = frozenset({CacheFormat.KV})
    kernels = (replace(RIGHT, launch=in_base_two),)


class OwnStore(FA3Backend):
    """A backend that writes its cache itself, and right, and declares no window."""

    formats = frozenset({CacheFormat.KV})
    kernels = (replace(RIGHT, capabilities={kind: replace(c, window=False) for kind, c in RIGHT.capabilities.items()}),)

    def store(self, inputs, cache, meta, layer):
        cache.store(inputs, meta.write_slots, layer.k_scale, layer.v_scale)


class PlainTuple(WrongBase):
    """A backend whose kernel returns a tuple without names."""

    kernels = (replace(RIGHT, launch=lambda *args: tuple(RIGHT.launch(*args))),)


class KeepsOldLengths(WrongBase):
    """A backend whose plans hold lengths that no replay writes."""

    kernels = (RIGHT,)

    def plans(self, step, buffers):
        return tuple(replace(plan, seqused_k=plan.seqused_k.clone()) for plan in super().plans(step, buffers))


WRONG_BASE = "tests.test_conformance_failures:WrongBase"


def test_the_most_basic_failures_come_first_with_what_the_check_holds(capsys):
    assert main(["conformance", WRONG_BASE, "--quick", "--select", "[apmg]*"]) == 1
    output = capsys.readouterr().out
    told = re.findall(
        r"^fail: (\S+) on fa3 \(torch\)\n  (.*)\n  check: (.*)\n  case: .*\n  again: ", output, re.MULTILINE
    )
    assert [check for check, _, _ in told] == ["math.decode", "math.draft_decode", "math.draft_block"]
    assert output.count("\nfail: ") == 3
    for check, reason, about in told:
        assert reason.startswith("LSE of forward 0, row 0: ")
        assert about == CATALOGUE[check].about
    counted = re.findall(r"^(\w+) failed, (.*?): (.*); --select '(\w+)\.\*' ", output, re.MULTILINE)
    groups = [group for group, *_ in counted]
    assert groups == [group for group in GROUPS if group in groups]
    assert groups[0] == "math"
    assert {"graph", "api"} < set(groups)
    assert re.fullmatch(r"\d+ more of \d+", counted[0][1])
    assert "math.decode (3)" in counted[0][2]


def test_a_kernel_that_returns_no_attention_output_is_named():
    rows = run_conformance(PlainTuple, select="math.decode,math.draft_decode", quick=True).rows
    told = "TypeError: a kernel returns AttentionOutput(out, lse), and kernel torch returned a tuple "
    assert {row.check for row in rows if row.reason.startswith(told)} == {row.check for row in rows}


def test_failures_of_replays_alone_are_told_as_such(capsys):
    words = ["--quick", "--select", "math.decode"]
    assert main(["conformance", "tests.test_conformance_failures:KeepsOldLengths", *words]) == 1
    told = "fa3 (torch): all failures (2) are replays; eager cases (1) pass"
    assert f"\n{told}\n" in capsys.readouterr().out
    assert f"<p>{told}</p>" in html_page(run_conformance(KeepsOldLengths, select="math.decode", quick=True))
    assert "are replays" not in html_page(run_conformance(WrongBase, select="plan.w*,math.de*", quick=True))


def test_a_single_failure_is_told_alone(capsys):
    assert main(["conformance", WRONG_BASE, "--select", "api.keeps_no_state", "--quick"]) == 1
    output = capsys.readouterr().out
    assert output.count("\nfail: ") == 3
    assert " failed, " not in output.replace("api failed, ", "")


def test_a_case_that_fails_again_stays_in_its_file(tmp_path, capsys):
    case, *_ = selected_cases(resolve_subjects("fa3")[0][0], "api.keeps_no_state", 1)
    file = tmp_path / "case.json"
    file.write_text(case.to_json())
    assert main(["conformance", WRONG_BASE, "--case", str(file)]) == 1
    assert f"--kernel torch --case {file}\n" in capsys.readouterr().out


def test_checks_run_from_the_most_basic_group_on():
    cases = selected_cases(resolve_subjects("fa3")[0][0])
    groups = list(dict.fromkeys(group_of(case.check) for case in cases))
    assert groups == [group for group in GROUPS if group in groups]


def test_the_order_of_groups_is_that_of_the_page():
    table = (DOCS / "conformance.md").read_text().split("## Six")[0].split("## What is")[1]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == GROUPS


def test_the_html_report_says_what_a_failed_check_holds_the_most_basic_first():
    text = html_page(run_conformance(WRONG_BASE, quick=True, select="[am]*.[dk]*"))
    assert text.count(CATALOGUE["math.decode"].about) == 1 + 3, "beside the counts, and with each failure"
    assert text.index(CATALOGUE["math.decode"].about) < text.index(CATALOGUE["api.keeps_no_state"].about)


def test_a_refusal_that_an_own_store_lost_names_it():
    report = run_conformance(OwnStore, quick=True, select="refusals.layer_extras")
    reasons = {row.reason for row in report.rows if row.status is Outcome.FAIL}
    assert reasons
    for reason in reasons:
        assert "not declared, yet taken instead of refused. OwnStore overrides store, and AttentionBackend" in reason
        assert "call super().store" in reason
    right = run_conformance(WRONG_BASE, quick=True, select="refusals.*")
    assert all("overrides" not in row.reason for row in right.rows)
    assert "super().store" in (DOCS / "write-a-backend.md").read_text()


@pytest.mark.parametrize("changes", [{"quick": True}, {"select": "math.de*"}, {}], ids=str)
def test_an_expected_failure_that_names_no_case_has_failed_in_any_selection(changes):
    expected = [ExpectedFailure("math.decode", "no-such-case", **KNOWN)]
    report = run_conformance("fa3", expected_failures=expected, **{"select": "math.decode"} | changes)
    (row,) = [row for row in report.rows if row.status is Outcome.FAIL]
    assert row.check == "math.decode"
    assert row.reason.startswith("expected failure names no case: 'no-such-case'; there are ")


@pytest.mark.parametrize("changes", [{"quick": True, "select": "math.decode"}, {"select": "plan.*"}], ids=str)
def test_an_expected_failure_whose_cases_were_not_selected_was_not_looked_for(changes):
    subject = resolve_subjects("fa3", "torch")[0][0]
    looked_for = {case.name for case in selected_cases(subject, "math.decode", most=3)}
    left_out = next(case.name for case in selected_cases(subject, "math.decode") if case.name not in looked_for)
    expected = [ExpectedFailure("math.decode", left_out, **KNOWN)]
    report = run_conformance("fa3", kernel="torch", expected_failures=expected, **changes)
    (row,) = [row for row in report.rows if row.case is None]
    assert (row.status, row.check, row.excused) == (Outcome.NOT_RUN, "math.decode", True)
    assert row.reason == f"expected failure not looked for: none of the 1 cases of '{left_out}' was selected"
    assert report.exit_code(require_run=True) == 0
