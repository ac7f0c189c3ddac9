"""Runs the catalogue on backends: the library's door, which the command line and pytest open too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.conformance.expectations import ExpectedFailure, check_expectations, unmet
from attn_backends.conformance.floors import floors
from attn_backends.conformance.foreign.driver import ForeignBackend
from attn_backends.conformance.foreign.isolation import running
from attn_backends.conformance.outcomes import SUITE_VERSION, Report, Row
from attn_backends.conformance.profiles import passed, totals
from attn_backends.conformance.selection import Selection, selected_cases
from attn_backends.conformance.subjects import Backend, check_constructor, resolve, resolve_subjects
from attn_backends.contract import CONTRACT
from attn_backends.results import head


def run_conformance(
    backend: Backend,
    *,
    kernel: str = "auto",
    device: str = "cpu",
    expected_failures: Sequence[ExpectedFailure] = (),
    on_row: Callable[[Row], None] | None = None,
    **asked: Any,
) -> Report:
    """Run every check on every case that the backend's capabilities call for.

    backend: a registered name, module:Class, a class, an instance or a factory. on_row: called with each row. asked:
    which cases, as of `Selection`: select, quick, profile, effort, seed, contract, share.
    """
    check_expectations(expected_failures)
    found, selection = resolve(backend), Selection(**asked)
    rows = []
    for row in conformance_rows(found, kernel, device, selection, expected_failures):
        rows.append(row)
        if on_row:
            on_row(row)
    sizes = profile_cases_of([found], kernel, device, selection)
    report = report_of(device, rows, ["run_conformance", found.name, device], selection, sizes)
    return replace(report, floors=floors_of([found], kernel, device)) if selection.is_whole else report


def floors_of(backends: Sequence[Backend], kernel: str, device: str) -> list[dict[str, Any]]:
    """Floors of the kernels that run here, as rows; on a CPU none, because its times mean nothing."""
    if torch.device(device).type != "cuda":
        return []
    ours = [each for each in map(resolve, backends) if not issubclass(each, ForeignBackend)]
    subjects = [subject for each in ours for subject in resolve_subjects(each, kernel, device)[0]]
    return [floor.to_dict() for subject in subjects for floor in floors(subject)]


def profile_cases_of(
    backends: Sequence[Backend], kernel: str, device: str, selection: Selection
) -> dict[str, dict[str, int]]:
    """The number of selected cases of each profile, for each `backend/kernel` that runs here. Empty for a quick run,
    which has all cases of no profile, and for another project's backends.
    """
    ours = [] if selection.quick else [each for each in map(resolve, backends) if not issubclass(each, ForeignBackend)]
    subjects = [subject for each in ours for subject in resolve_subjects(each, kernel, device)[0]]
    return {f"{each.backend.name}/{each.kernel}": totals(selected_cases(each)) for each in subjects}


def report_of(
    device: str,
    rows: Sequence[Row],
    command: Sequence[str],
    selection: Selection,
    profile_cases: Mapping[str, Mapping[str, int]],
) -> Report:
    """A report of rows that ran here. command: the words that made them. selection: what was asked for. profile_cases:
    as of `profile_cases_of`.
    """
    profiles = passed(rows, profile_cases, selection.complete_profiles)
    own: dict[str, Any] = {"profiles": profiles, "profile_cases": profile_cases}
    return Report(SUITE_VERSION, rows=tuple(rows), contract=CONTRACT, **own, **asdict(head(command, device)))


def conformance_rows(
    backend: type[AttentionBackend],
    kernel: str,
    device: str,
    selection: Selection,
    expected: Sequence[ExpectedFailure],
) -> Iterator[Row]:
    """The rows of `run_conformance`, as they come."""
    subjects, absent = resolve_subjects(backend, kernel, device)
    for subject in subjects:
        cases = selection.cases(subject)
        check_constructor(subject, cases)
        with running(subject) as run:
            for case in cases:
                yield judged(run(case), expected)
        yield from unmet(subject, expected, cases)
    yield from absent


def judged(row: Row, expected: Sequence[ExpectedFailure]) -> Row:
    """A row in the light of what is known to fail: strictly."""
    for known in expected:
        if known.names(row):
            return known.judge(row)
    return row
