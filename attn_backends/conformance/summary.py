"""Conformance reports small enough to be kept: cases of one check that came to the same are one row, with their number.

python -m attn_backends.conformance.summary [--joined FILE] REPORT.json ...

Rewrites the files, or joins runs of parts of the suite, such as one process for each `--select`, in one file. Refusals
of a check have the reason of the first. A row that failed, broke, failed as expected or was not run stays as it is,
with its case. Of a backend of another project (`project:backend`) the first failure or refusal of a check stands for
all, with their number, and what passed is one row, eager and through graphs. A cause stands in one row. Others that
have it, but for numbers, are one more row, which names all their checks and that row's.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attn_backends.conformance.outcomes import Outcome, Report, Row
from attn_backends.conformance.profiles import lacking, passed
from attn_backends.errors import AttnBackendsError, ConfigError
from attn_backends.results import read, write_text

COMMAND = "python -m attn_backends.conformance.summary"
_SAME = "the cause is that of"
_NUMBERS = re.compile(r"[\d,… ]+")
_PLACES = re.compile(r"(row#belongs#to#slot#and#is#(nowhere|at#slot#);?#?)+")


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite reports; 2 if one can't be read or written."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--joined", type=Path, metavar="FILE", help="of reports that together are one whole run")
    args = parser.parse_args(arguments)
    try:
        if args.joined:
            whole = joined([Report.of(read(path)) for path in args.reports])
            write_text(args.joined, summary(whole).to_json())
            sys.stderr.writelines(f"note: {line}\n" for line in _left_out(whole))
            return 0
        for path in args.reports:
            write_text(path, summary(Report.of(read(path))).to_json())
    except (AttnBackendsError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def joined(reports: Sequence[Report]) -> Report:
    """The report of a whole run whose cases were shared out. Raises `ConfigError` where two are of different runs, or
    hold the same case.

    Its command is all of theirs. It names the profiles that pass, of those of which the reports together have all
    cases; none where they do not say how many there are, as those of earlier versions. What all of them left out stands
    there once.
    """
    first = reports[0]
    for report in reports[1:]:
        for what in ("device", "versions", "commit", "suite_version", "contract"):
            one, two = getattr(first, what), getattr(report, what)
            if one != two:
                raise ConfigError(f"reports of different runs: {what} is {one} of the first and {two} of another")
    rows = tuple(row for report in reports for row in report.rows)
    if any(row.cases > 1 for row in rows):
        raise ConfigError("a report is a summary already; join the reports that the runs wrote")
    cases = Counter((row.backend, row.kernel, row.check, row.case.name) for row in rows if row.case is not None)
    twice = [place for place, number in cases.items() if number > 1]
    if twice:
        raise ConfigError(f"{len(twice)} cases are in two reports, such as {', '.join(twice[0])}")
    command, sizes = "; ".join(report.command for report in reports), dict[str, Mapping[str, int]]()
    for kernel, known in (item for report in reports for item in report.profile_cases.items()):
        if sizes.setdefault(kernel, known) != known:
            raise ConfigError(f"reports of different runs: {kernel} has other numbers of cases in them")
    whole = replace(first, rows=tuple(dict.fromkeys(rows)), command=command, floors=(), wall_s=0.0)
    return replace(whole, profiles=passed(rows, sizes), profile_cases=sizes)


def _left_out(report: Report) -> list[str]:
    """Lines on profiles of this project's backends that a joined report does not name, for lack of cases."""
    if not report.profile_cases and any(":" not in row.backend for row in report.rows):
        return ["the reports do not say how many cases a profile has; the joined one names no profile"]
    return [
        f"{kernel}: the reports lack cases of {', '.join(f'{name} ({number})' for name, number in names.items())}; the "
        "joined one does not name these profiles"
        for kernel, names in lacking(report.rows, report.profile_cases).items()
    ]


def summary(report: Report) -> Report:
    """The report with the passed and the refused cases of a check as one row for each path."""
    groups: dict[object, list[Row]] = {}
    for number, row in enumerate(report.rows):
        groups.setdefault(_sort(row, number), []).append(row)
    return replace(report, rows=tuple(_told_once(_one(rows) for rows in groups.values())))


def _sort(row: Row, number: int) -> object:
    """What rows that become one have in common. number: of the row."""
    of_check = (row.backend, row.kernel, row.check, row.status)
    if ":" in row.backend:
        return of_check if row.status in (Outcome.PASS, Outcome.REFUSED, Outcome.FAIL) else number
    return (*of_check, row.path) if row.status in (Outcome.PASS, Outcome.REFUSED) else number


def _one(rows: Sequence[Row]) -> Row:
    """Rows that came to the same: the number of cases, their time, and the error that is closest to its budget."""
    if len(rows) == 1:
        return replace(rows[0], case=None) if ":" in rows[0].backend and rows[0].status is Outcome.PASS else rows[0]
    cases, ms = sum(row.cases for row in rows), round(sum(row.ms for row in rows), 1)
    if rows[0].status is Outcome.FAIL or (rows[0].status is Outcome.REFUSED and ":" in rows[0].backend):
        return replace(rows[0], cases=cases, ms=ms)
    path = rows[0].path if len({row.path for row in rows}) == 1 else ""
    return replace(max(rows, key=_part_of_budget), case=None, path=path, cases=cases, ms=ms)


def _told_once(rows: Iterable[Row]) -> list[Row]:
    """The rows; those of a cause that another row of the backend has, but for numbers, become one that names it."""
    told: dict[object, Row] = {}
    found: dict[object, Row] = {}
    for number, row in enumerate(rows):
        _, has_cause, cause = row.reason.partition("Cause: ")
        if row.status is Outcome.FAIL and has_cause and not cause.startswith("none was found"):
            sort = _PLACES.sub("places", _NUMBERS.sub("#", cause))
            first = told.setdefault((row.backend, row.kernel, sort), row)
            if first is not row:
                row = replace(row, case=None, reason=f"{_SAME} {first.check}, {first.path}")
        is_same = row.reason.startswith(_SAME)
        place = (row.backend, row.kernel, row.reason) if is_same else number
        found[place] = _joined(found[place], row) if place in found else row
    return list(found.values())


def _joined(one: Row, two: Row) -> Row:
    """Rows of several checks as one."""
    path = one.path if one.path == two.path else ""
    cases, ms = one.cases + two.cases, round(one.ms + two.ms, 1)
    return replace(one, check=f"{one.check}, {two.check}", case=None, path=path, cases=cases, ms=ms)


def _part_of_budget(row: Row) -> float:
    return -1.0 if row.max_err is None or not row.budget else row.max_err / row.budget


if __name__ == "__main__":
    raise SystemExit(main())
