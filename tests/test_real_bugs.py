"""docs/real-bugs.md is true: its mutants exist and the kill matrix kills them, by the checks that the page names."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS
from tests.mutants.matrix import CHECKS, COMMAND, read_kills
from tests.mutants.real_bugs import PAGE, REASONS, Report, page, read_reports

KILLS, REPORTS = read_kills(), read_reports()
INSIDE = [each for each in REPORTS if not each.outside]


@pytest.mark.parametrize("report", REPORTS, ids=lambda each: each.report)
def test_a_report_is_caught_or_says_why_not(report: Report) -> None:
    ways = [bool(report.mutants), bool(report.missed), bool(report.outside)]
    assert sum(ways) == 1, "one of mutants, missed and outside"
    assert bool(report.cause) != bool(report.outside)
    assert not report.missed or (report.missed in REASONS and report.why), f"missed is one of {REASONS}, with why"


@pytest.mark.parametrize("report", [each for each in REPORTS if each.mutants], ids=lambda each: each.report)
def test_the_mutants_of_a_report_are_killed(report: Report) -> None:
    for name in report.mutants:
        assert name in MUTANTS, f"there is no mutant {name}"
        assert KILLS.get(name, {}).keys() >= set(MUTANTS[name].killed_by) > set(), f"run `{COMMAND}`"
    assert set(report.checks(KILLS)) <= CHECKS.keys()
    assert report.checks(KILLS)


def test_how_many_are_caught() -> None:
    assert (len(REPORTS), len(INSIDE)) == (62, 48)
    assert sum(bool(each.checks(KILLS)) for each in INSIDE) >= 41


def test_the_readme_quotes_the_page() -> None:
    caught = sum(bool(each.checks(KILLS)) for each in INSIDE)
    readme = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"of {len(INSIDE)} that users reported, [{caught} are](docs/real-bugs.md)" in readme


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(KILLS), f"run `{COMMAND}`"


def test_a_report_whose_mutant_survives_is_not_counted() -> None:
    caught = next(each for each in INSIDE if each.mutants)
    assert caught.checks({}) == []
