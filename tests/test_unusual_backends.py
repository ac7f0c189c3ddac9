"""A correct backend passes the suite, however unusual what it declares is."""

from __future__ import annotations

import pytest

from attn_backends.conformance import Outcome, Subject, run_case, run_conformance, selected_cases
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import group_of
from tests.unusual_backends import UNUSUAL

ALL_BUT_SCALE = "[!s]*,streams.*"  # patterns of check ids
SELECTED = ("*", ALL_BUT_SCALE)
WRONG = (Outcome.FAIL, Outcome.ERROR)


def test_there_are_twenty_of_them() -> None:
    assert len(UNUSUAL) >= 20


def test_of_all_groups_only_scale_is_run_in_part() -> None:
    subject = Subject(next(iter(UNUSUAL.values())), "torch")
    groups = {pattern: {group_of(case.check) for case in selected_cases(subject, pattern)} for pattern in SELECTED}
    assert groups[SELECTED[0]] - groups[SELECTED[1]] == {"scale"}


def turn_of(name: str) -> int:
    return list(UNUSUAL).index(name)


def wrong_of(subject: Subject, cases: list[Case]) -> list[tuple[str, str, str]]:
    rows = [run_case(subject, case) for case in cases]
    return [(row.check, row.case, row.reason) for row in rows if row.status in WRONG]


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.one_in(3)
def test_an_unusual_backend_conforms(name: str) -> None:
    """On a case of every fifth check, another fifth for the next backend; all cases are in the full tier."""
    subject = Subject(UNUSUAL[name], "torch")
    first = {case.check: case for case in reversed(selected_cases(subject, ALL_BUT_SCALE))}
    assert wrong_of(subject, list(first.values())[turn_of(name) % 5 :: 5]) == []


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.one_in(3)
def test_an_unusual_backend_conforms_at_scale(name: str) -> None:
    """On every 40th case of larger worlds, half a second each; others for the next backend."""
    subject = Subject(UNUSUAL[name], "torch")
    cases = selected_cases(subject, "scale.*")[turn_of(name) :: 40]
    assert cases
    assert wrong_of(subject, cases) == []


@pytest.mark.full
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_backend_conforms_in_every_case(name: str) -> None:
    report = run_conformance(UNUSUAL[name], kernel="torch", select=ALL_BUT_SCALE)
    assert [(row.check, row.case, row.reason) for row in report.rows if row.status in WRONG] == []
    assert report.counts[Outcome.PASS] > 0
