"""The suite inside pytest: one item for each case, the report at the end. `attn_backends_pytest` loads it on demand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.expectations import ExpectedFailure, check_expectations, known_failures, unmet
from attn_backends.conformance.failures import explained
from attn_backends.conformance.foreign.isolation import running
from attn_backends.conformance.outcomes import Outcome, Report, Row
from attn_backends.conformance.profiles import told
from attn_backends.conformance.runner import judged, profile_cases_of, report_of
from attn_backends.conformance.selection import Selection
from attn_backends.conformance.subjects import Backend, resolve_subjects
from attn_backends.errors import AttnBackendsError
from attn_backends.results import Results, write_text

ROW = "attn_backends_row"  # the property of an item that holds its row as JSON, also on its way from an xdist worker
_ENDS = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_TOLD = (Outcome.REFUSED, Outcome.XFAIL, Outcome.NOT_RUN)


@dataclass(frozen=True)
class Planned:
    """An item to be: its id, what makes its row, and the command that runs it alone."""

    id: str
    run: Callable[[], Row]
    again: str = ""


class Suite:
    """The plugin of a run that names backends with `--attn-backend`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: list[Row] = []

    @property
    def require_run(self) -> bool:
        """Whether what this machine can't run is a failure."""
        return bool(self._config.getoption("attn_require_run"))

    @property
    def selection(self) -> Selection:
        """The selection that pytest's options ask for."""
        names = ("select", "quick", "profile", "effort", "seed", "contract")
        given = {name: self._config.getoption(f"attn_{name}") for name in names}
        return Selection(**{name: value for name, value in given.items() if value is not None})

    @property
    def report(self) -> Report:
        """The report of all that has run so far."""
        command = ("pytest", *map(str, self._config.invocation_params.args))
        device = self._config.getoption("attn_device")
        sizes = self._profile_cases if self._rows else {}  # without rows, perhaps because a name is of no backend
        return report_of(device, self._rows, command, self.selection, sizes)

    @cached_property
    def _profile_cases(self) -> dict[str, dict[str, int]]:
        option = self._config.getoption
        return profile_cases_of(option("attn_backend"), option("attn_kernel"), option("attn_device"), self.selection)

    def planned(self) -> list[Planned]:
        """All items; what can't be used stops the collection."""
        try:
            return list(self._planned())
        except AttnBackendsError as error:
            raise pytest.Collector.CollectError(f"error: {error}") from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the row of an item that ran here or in a worker."""
        if report.when == "call":
            self._rows += [Row.from_dict(json.loads(str(row))) for name, row in report.user_properties if name == ROW]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report, and exit as the other two doors do: 1 for a fail, 2 for an error or if nothing ran."""
        if hasattr(self._config, "workerinput") or self._config.getoption("collectonly"):
            return
        came_to_its_end = exitstatus in _ENDS
        path = self._config.getoption("attn_json")
        if path is not None:
            found = Results.from_json(self.report.to_json())
            write_text(path, (found if came_to_its_end else found.as_incomplete()).to_json())
        if came_to_its_end:
            others_failed = exitstatus == pytest.ExitCode.TESTS_FAILED
            session.exitstatus = max(self.report.exit_code(self.require_run), int(others_failed))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The six counts, and the reasons of the cases of which pytest itself shows none."""
        if self._config.getoption("collectonly"):
            return
        terminalreporter.section("conformance of attention backends")
        terminalreporter.line(", ".join(f"{count} {outcome}" for outcome, count in self.report.counts.items()))
        reasons = [(row.status, row.check, row.reason) for row in self._rows if row.status in _TOLD]
        for (status, check, reason), count in Counter(reasons).items():
            terminalreporter.line(f"{status} {check} ({count}): {reason}")
        if self.selection.complete_profiles:
            for kernel, names in self.report.profiles.items():
                terminalreporter.line(f"{kernel} {told(names)}")
        if not self.report.executed:
            terminalreporter.line("error: no check was executed", red=True)

    def _planned(self) -> Iterator[Planned]:
        option = self._config.getoption
        kernel, device = option("attn_kernel"), option("attn_device")
        for backend in option("attn_backend"):
            expected = known_failures(backend, option("attn_config"))
            check_expectations(expected)
            door = f"pytest --pyargs attn_backends.conformance --attn-backend {backend}"
            yield from items(backend, kernel, device, self.selection, expected, door)


def items(
    backend: Backend, kernel: str, device: str, selection: Selection, expected: Sequence[ExpectedFailure], door: str
) -> Iterator[Planned]:
    """The items of one backend: one for each case, kernel that can't run here, and expected failure without a case.
    door: the command that runs them, or "" where a test file of the user's own does.
    """
    subjects, absent = resolve_subjects(backend, kernel, device)
    for subject in subjects:
        name = subject.backend.name if len(subjects) == 1 else f"{subject.backend.name}-{subject.kernel}"
        cases = selection.cases(subject)
        for case in cases:
            again = f"{door} --attn-kernel {subject.kernel} --attn-device {device} -k {case.name}"
            again = again if door else f"pytest -k {case.name}"
            yield Planned(f"{name}-{case.check}-{case.name}", partial(_run, subject, case, expected), again)
        for number, row in enumerate(unmet(subject, expected, cases)):
            yield Planned(f"{name}-{row.check}-expected_failure{number}", partial(_same, row))
    yield from (Planned(f"{row.backend}-{row.kernel}-{row.status}", partial(_same, row)) for row in absent)


def parameters(
    backends: Sequence[Backend],
    kernel: str,
    device: str,
    expected: Sequence[ExpectedFailure],
    *,
    require_run: bool,
    asked: Mapping[str, Any],
) -> dict[str, Callable[[], None]]:
    """Functions that run and conclude each item, by its id, for `attn_backends_pytest.parametrize_with_checks`."""
    check_expectations(expected)
    selection = Selection(**asked)
    planned = [item for each in backends for item in items(each, kernel, device, selection, expected, "")]
    return {item.id: partial(_run_and_conclude, item, require_run) for item in planned}


def _run_and_conclude(item: Planned, require_run: bool) -> None:
    conclude(item.run(), item.again, require_run)


def _run(subject: Subject, case: Case, expected: Sequence[ExpectedFailure]) -> Row:
    with running(subject) as run:
        return judged(run(case), expected)


def _same(row: Row) -> Row:
    return row


def conclude(row: Row, again: str, require_run: bool) -> None:
    """End an item as its row says."""
    if row.status is Outcome.XFAIL:
        pytest.xfail(row.reason)
    if row.status is Outcome.NOT_RUN and (row.excused or not require_run):
        pytest.skip(row.reason)
    if row.status not in (Outcome.PASS, Outcome.REFUSED):
        pytest.fail(explained(row, again), pytrace=False)
