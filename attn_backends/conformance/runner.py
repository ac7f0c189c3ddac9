"""Runs the catalogue on backends: the library's door, which the command line and pytest open too."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import attn_backends
import spec_metadata
from attn_backends.backend import AttentionBackend
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CATALOGUE, CheckFailure, Measured, Subject, group_of
from attn_backends.conformance.expectations import ExpectedFailure, check_expectations, unmet
from attn_backends.conformance.failures import lost_refusals
from attn_backends.conformance.outcomes import SUITE_VERSION, Outcome, Report, Row
from attn_backends.conformance.profiles import passed
from attn_backends.conformance.selection import Selection
from attn_backends.conformance.subjects import Backend, check_constructor, resolve, resolve_subjects
from attn_backends.contract import CONTRACT
from attn_backends.errors import AttnBackendsError, ConfigError, PlanError
from attn_backends.results import head
from spec_metadata import InvalidStepError

_TORCH = Path(torch.__file__).parent
_OURS = {Path(folder) for package in (attn_backends, spec_metadata) for folder in package.__path__}


def run_case(subject: Subject, case: Case) -> Row:
    """Run one case; never raises for what a backend does."""
    if case.check not in CATALOGUE:
        raise ConfigError(f"no check has the id {case.check!r}; there are {', '.join(CATALOGUE)}")
    start = time.perf_counter()
    measured, status, reason = Measured(), Outcome.PASS, ""
    try:
        measured = CATALOGUE[case.check].run(subject, case)
    except (CheckFailure, PlanError) as failure:
        status, reason = Outcome.FAIL, str(failure)
        if group_of(case.check) == "refusals":
            reason += lost_refusals(subject)
    except AssertionError as failure:
        status, reason = Outcome.FAIL, f"{str(failure) or 'an assertion failed'} ({_place(failure)})"
    except (AttnBackendsError, InvalidStepError) as refusal:
        status, reason = Outcome.FAIL, f"declared, yet refused: {refusal}"
    except Exception as error:
        status, reason = Outcome.ERROR, f"{type(error).__name__}: {error} ({_place(error)})"
    if measured.refusal:
        status, reason = Outcome.REFUSED, measured.refusal
    ms = round((time.perf_counter() - start) * 1e3, 1)
    return Row(
        subject.backend.name,
        subject.kernel,
        case.check,
        case,
        case.path,
        status,
        reason,
        measured.max_err,
        measured.budget,
        ms,
    )


def _place(error: Exception) -> str:
    """Where an error was raised, without folders: the innermost place outside of torch, and of this library if any."""
    frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [found for found in frames if _TORCH not in found[0].parents]
    path, frame = ([found for found in frames if not _OURS.intersection(found[0].parents)] or frames)[-1]
    return f"{path.name}:{frame.lineno} in {frame.name}"


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
    which cases, as of `Selection`: select, quick, profile, effort, seed, contract.
    """
    check_expectations(expected_failures)
    found, selection = resolve(backend), Selection(**asked)
    rows = []
    for row in conformance_rows(found, kernel, device, selection, expected_failures):
        rows.append(row)
        if on_row:
            on_row(row)
    return report_of(device, rows, ["run_conformance", found.name, device], selection)


def report_of(device: str, rows: Sequence[Row], command: Sequence[str], selection: Selection) -> Report:
    """A report of rows that ran here. command: the words that made them. selection: of which they are all rows."""
    profiles = passed(rows, selection.complete_profiles)
    return Report(
        SUITE_VERSION, rows=tuple(rows), contract=CONTRACT, profiles=profiles, **asdict(head(command, device))
    )


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
        for case in cases:
            yield judged(run_case(subject, case), expected)
        yield from unmet(subject, expected, cases)
    yield from absent


def judged(row: Row, expected: Sequence[ExpectedFailure]) -> Row:
    """A row in the light of what is known to fail: strictly."""
    for known in expected:
        if known.names(row):
            return known.judge(row)
    return row
