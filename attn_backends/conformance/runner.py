"""Runs the catalogue on backends: the library's door, which the command line and pytest open too."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import torch

import attn_backends
import spec_metadata
from attn_backends.backend import AttentionBackend
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CATALOGUE, GROUPS, CheckFailure, Measured, Subject, group_of
from attn_backends.conformance.exercise import setup_of, world_of
from attn_backends.conformance.expectations import ExpectedFailure, check_expectations, unmet
from attn_backends.conformance.failures import lost_refusals
from attn_backends.conformance.outcomes import SUITE_VERSION, Outcome, Report, Row
from attn_backends.errors import AttnBackendsError, BackendUnavailableError, ConfigError, PlanError
from attn_backends.registry import get_backend, list_backends
from attn_backends.results import head
from spec_metadata import InvalidStepError

QUICK_CASES = 3  # of each check
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
    backend: str | type[AttentionBackend],
    *,
    kernel: str = "auto",
    device: str = "cpu",
    quick: bool = False,
    select: str = "*",
    expected_failures: Sequence[ExpectedFailure] = (),
    on_row: Callable[[Row], None] | None = None,
) -> Report:
    """Run every check that a pattern selects on every case that the backend's capabilities call for.

    backend: a class, a registered name, or module:Class. quick: a few cases of each check. on_row: called with each.
    """
    check_expectations(expected_failures)
    found = resolve(backend)
    rows = []
    for row in conformance_rows(found, kernel, device, select, QUICK_CASES if quick else None, expected_failures):
        rows.append(row)
        if on_row:
            on_row(row)
    return report_of(device, rows, ["run_conformance", found.name, device])


def report_of(device: str, rows: Iterable[Row], command: Sequence[str]) -> Report:
    """A report of rows that ran here. command: the words that made them."""
    return Report(SUITE_VERSION, rows=tuple(rows), **asdict(head(command, device)))


def resolve(backend: str | type[AttentionBackend]) -> type[AttentionBackend]:
    """The class of a backend; refuses what is none."""
    if isinstance(backend, str):
        return get_backend(backend)
    if not (inspect.isclass(backend) and issubclass(backend, AttentionBackend)):
        raise BackendUnavailableError(f"backend {backend!r}", ["it is no subclass of attn_backends.AttentionBackend"])
    return backend


def resolve_subjects(
    backend: str | type[AttentionBackend], kernel: str = "auto", device: str = "cpu"
) -> tuple[list[Subject], list[Row]]:
    """The kernels of a backend that run here, and a not_run row for each that does not. "auto" asks for all of them."""
    found, place = resolve(backend), torch.device(device)
    known = {each.name: each for each in found.kernels}
    if kernel not in ("auto", *known):
        raise BackendUnavailableError(
            f"{found.name} kernel {kernel!r}", ["unknown name"], f"It has {', '.join(known)}."
        )
    asked = found.kernels if kernel == "auto" else (known[kernel],)
    reasons = {each.name: each.unavailable_reasons(place) for each in asked}
    subjects = [Subject(found, each.name, device) for each in asked if not reasons[each.name]]
    ran = {known[subject.kernel].source for subject in subjects} - {""}
    absent = []
    for each in (each for each in asked if reasons[each.name]):
        excused = not each.is_built_for(place) or each.source in ran
        reason = "; ".join(reasons[each.name])
        absent.append(Row(found.name, each.name, "*", None, "", Outcome.NOT_RUN, reason, excused=excused))
    return subjects, absent


def selected_cases(subject: Subject, select: str = "*", most: int | None = None) -> list[Case]:
    """The cases of all checks whose id a pattern selects, in the order of `GROUPS`. most: of each check, spread
    evenly.
    """
    chosen = [check for id, check in CATALOGUE.items() if fnmatchcase(id, select)]
    chosen.sort(key=lambda check: GROUPS.index(group_of(check.id)))
    if not chosen:
        raise ConfigError(f"no check's id matches {select!r}; there are {', '.join(CATALOGUE)}")
    return [case for check in chosen for case in _thinned(check.cases(subject), most)]


def check_constructor(subject: Subject, cases: Sequence[Case]) -> None:
    """Refuse a backend that can't even be made."""
    try:
        for case in cases[:1]:
            world_of(setup_of(subject, case))
    except Exception as error:
        reason = f"its constructor raised {type(error).__name__}: {error}"
        hint = f"Backends here: {', '.join(list_backends())}."
        raise BackendUnavailableError(f"backend {subject.backend.name!r}", [reason], hint) from error


def _thinned(cases: list[Case], most: int | None) -> list[Case]:
    if most is None or len(cases) <= most:
        return cases
    return [cases[index * (len(cases) - 1) // (most - 1)] for index in range(most)]


def conformance_rows(
    backend: type[AttentionBackend],
    kernel: str,
    device: str,
    select: str,
    most: int | None,
    expected: Sequence[ExpectedFailure],
) -> Iterator[Row]:
    """The rows of `run_conformance`, as they come. most: cases of each check."""
    subjects, absent = resolve_subjects(backend, kernel, device)
    for subject in subjects:
        cases = selected_cases(subject, select, most)
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
