"""Expected failures of a backend, as strict data: each names a check, has a reason and a link, and really fails."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field

from attn_backends.config.backend_files import ExpectedFailureOptions, backend_options
from attn_backends.config.toml_options import Options, read_toml, validated
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CATALOGUE, Subject
from attn_backends.conformance.outcomes import Outcome, Row
from attn_backends.errors import ConfigError


@dataclass(frozen=True)
class ExpectedFailure:
    """One known failure. check: its id. case: a case's name, or a pattern. reason: why. link: of a report."""

    check: str
    case: str
    reason: str
    link: str

    def names(self, row: Row) -> bool:
        """Whether a row is meant."""
        return row.case is not None and row.check == self.check and fnmatchcase(row.case.name, self.case)

    def judge(self, row: Row) -> Row:
        """A failure becomes an xfail, a pass a failure."""
        if row.status is Outcome.FAIL:
            return replace(row, status=Outcome.XFAIL, reason=f"{self.reason} ({self.link}): {row.reason}")
        if row.status in (Outcome.PASS, Outcome.REFUSED):
            return replace(
                row, status=Outcome.FAIL, reason=f"unexpected pass; it was to fail: {self.reason} ({self.link})"
            )
        return row


class ConformanceOptions(Options):
    """The file that a conformance run of another package's backend is given."""

    expected_failures: Annotated[tuple[ExpectedFailureOptions, ...], Field(strict=False)] = ()


def known_failures(name: str, config: Path | None = None) -> tuple[ExpectedFailure, ...]:
    """Expected failures of a backend, from its file in `configs/backends` or the given file."""
    found = _conformance_options(config) if config else backend_options(name)
    return tuple(ExpectedFailure(**each.model_dump()) for each in found.expected_failures) if found else ()


def _conformance_options(path: Path) -> ConformanceOptions:
    """What a file says of a backend that has none in `configs/backends`."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file")
    return validated(ConformanceOptions, read_toml(path), path)


def check_expectations(expected: Iterable[ExpectedFailure]) -> None:
    """Refuse an expected failure that names no check, or gives no reason or link."""
    for known in expected:
        if known.check not in CATALOGUE:
            raise ConfigError(
                f"expected failure of {known.check!r}: no check has this id; there are {', '.join(CATALOGUE)}"
            )
        if not (known.reason and known.link and known.case):
            raise ConfigError(f"expected failure of {known.check}: case, reason and link must all say something")


def unmet(subject: Subject, expected: Iterable[ExpectedFailure], cases: Collection[Case]) -> list[Row]:
    """A row for every expected failure that no case of a run can show.

    cases: what is run. One that names no case of the subject's has failed; one whose cases are not among these was not
    looked for, and its row records that.
    """
    ran = {(case.check, case.name) for case in cases}
    rows = []
    for known in expected:
        names = [case.name for case in CATALOGUE[known.check].cases(subject)]
        meant = [name for name in names if fnmatchcase(name, known.case)]
        of = (subject.backend.name, subject.kernel, known.check, None, "")
        if not meant:
            reason = f"expected failure names no case: {known.case!r}; there are {', '.join(names) or 'none'}"
            rows.append(Row(*of, Outcome.FAIL, reason))
        elif not any((known.check, name) in ran for name in meant):
            reason = f"expected failure not looked for: none of the {len(meant)} cases of {known.case!r} was selected"
            rows.append(Row(*of, Outcome.NOT_RUN, reason, excused=True))
    return rows
