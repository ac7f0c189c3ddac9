"""`conformance`: runs the suite on backends; prints outcomes, and every failure with how to repeat it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from attn_backends.cli import Command, add_threads
from attn_backends.cli.consoles import output_console, progress
from attn_backends.conformance import (
    Case,
    Outcome,
    Report,
    Row,
    commands,
    known_failures,
    resolve_subjects,
)
from attn_backends.conformance.catalogue import group_of
from attn_backends.conformance.expectations import ExpectedFailure, check_expectations, unmet
from attn_backends.conformance.failures import FailedGroup, explained, failed_groups, only_replays
from attn_backends.conformance.floors import of_report
from attn_backends.conformance.foreign.isolation import running
from attn_backends.conformance.profiles import PROFILES, passed, told
from attn_backends.conformance.report import write_html
from attn_backends.conformance.runner import conformance_rows, floors_of, judged, profile_cases_of, report_of
from attn_backends.conformance.selection import Selection
from attn_backends.conformance.subjects import resolve
from attn_backends.contract import CONTRACT
from attn_backends.errors import ConfigError
from attn_backends.registry import list_backends
from attn_backends.results import Recording, check_output, write_text

_COLORS = {
    Outcome.PASS: "green",
    Outcome.FAIL: "red",
    Outcome.REFUSED: "blue",
    Outcome.XFAIL: "yellow",
    Outcome.NOT_RUN: "bright_black",
    Outcome.ERROR: "magenta",
}


def run(args: argparse.Namespace) -> int:
    """Run the suite, write each row as it comes, print what came of it; the report's exit code."""
    check_device(args.device)
    check_output("--json", args.json)
    check_output("--report", args.report)
    case = read_case(args.case) if args.case else None
    asked = args.quick, args.profile, args.effort, args.seed, args.contract, args.share
    selection = Selection(",".join(args.select or "*"), *asked)
    names = args.backends or list(list_backends())
    known = {name: known_failures(name, args.config) for name in names}
    for expected in known.values():
        check_expectations(expected)
    sizes = {name: 1 if case else _num_cases(name, args, selection) for name in names}
    profile_cases = {} if case else profile_cases_of(names, args.kernel, args.device, selection)
    report = report_of(args.device, (), args.words, selection, profile_cases)
    rows: list[Row] = []
    with (
        Recording(args.json, report.head, **report.own) as recording,
        progress("checking", "cases", sum(sizes.values())) as bar,
    ):
        for row in (row for name in names for row in _rows(name, args, case or selection, known[name])):
            rows.append(row)
            recording.add(row.to_dict())
            bar.describe(f"{row.backend} ({row.kernel}) {row.check}")
            bar.advance()
    profiles = passed(rows, profile_cases, selection.complete_profiles)
    report = replace(report, rows=tuple(rows), profiles=profiles)
    if selection.is_whole and not case:
        report = replace(report, floors=floors_of(names, args.kernel, args.device))
    try:
        recording.finish(**report.own)
        if args.report:
            write_html(report, args.report, {resolve(name).name: name for name in names})
    finally:
        code = report.exit_code(args.require_run)
        _print(report, code, args)
    return code


def _rows(
    name: str, args: argparse.Namespace, asked: Case | Selection, expected: tuple[ExpectedFailure, ...]
) -> Iterator[Row]:
    if isinstance(asked, Selection):
        yield from conformance_rows(resolve(name), args.kernel, args.device, asked, expected)
        return
    subjects, absent = resolve_subjects(name, args.kernel, args.device)
    for subject in subjects:
        with running(subject) as run:
            yield judged(run(asked), expected)
        yield from unmet(subject, expected, [asked])
    yield from absent


def check_device(device: str) -> None:
    """Refuse what is no device to run on."""
    try:
        known = torch.device(device).type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(f"--device {device!r} is not a device to run on; give cpu or cuda")


def read_case(given: str) -> Case:
    """The case of a file, or of JSON itself; `ConfigError` says what is wrong with it."""
    try:
        return Case.from_json(given if given.startswith("{") else Path(given).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--case {given}: {getattr(error, 'strerror', None) or error}") from None


def _num_cases(name: str, args: argparse.Namespace, selection: Selection) -> int:
    subjects, absent = resolve_subjects(name, args.kernel, args.device)
    return sum(len(selection.cases(subject)) for subject in subjects) + len(absent)


def _print(report: Report, code: int, args: argparse.Namespace) -> None:
    """Counts of each backend and group of checks, then what failed, the most basic of it in full."""
    console = output_console()
    by_kernel = [list(rows) for _, rows in groupby(report.rows, key=lambda row: (row.backend, row.kernel))]
    for rows in by_kernel:
        console.print(f"[bold]{escape(rows[0].backend)}[/] ({escape(rows[0].kernel)}) on {escape(report.device)}")
        for group in dict.fromkeys(group_of(row.check) for row in rows):
            console.print(f"  {escape(group):10}{_counts([row for row in rows if group_of(row.check) == group])}")
    for row in report.rows:
        if row.status in (Outcome.NOT_RUN, Outcome.XFAIL):
            what = escape(f"{row.backend} ({row.kernel}) {row.check}: {row.reason}")
            console.print(f"[{_COLORS[row.status]}]{row.status}[/] {what}", soft_wrap=True)
    if args.effort:
        _print_random(console, report.rows)
    for rows in by_kernel:
        _print_failures(console, failed_groups(rows), args)
    for line in only_replays(report.rows):
        console.print(escape(line), soft_wrap=True)
    for kernel, names in report.profiles.items():
        console.print(f"{escape(kernel)} {told(names)}", soft_wrap=True)
    for floor in of_report(report.floors):
        verdict = {True: "[green]fast enough[/]", False: "[yellow]slow[/]", None: "[bright_black]no time[/]"}[floor.met]
        console.print(f"{verdict} {escape(str(floor))}", soft_wrap=True)
    console.print(f"executed {report.executed} of {len(report.rows)}:{_counts(report.rows)}; exit code {code}")


def _print_random(console: Console, rows: Sequence[Row]) -> None:
    """Each random case with what repeats it alone."""
    for row in rows:
        if row.case is not None and row.case.drawn:
            shown = escape(f"{row.check} of {row.backend} ({row.kernel}) --case '{row.case.to_json()}'")
            console.print(f"random [{_COLORS[row.status]}]{row.status}[/] {shown}", soft_wrap=True)


def _counts(rows: list[Row] | tuple[Row, ...]) -> str:
    counts = {outcome: sum(row.status is outcome for row in rows) for outcome in Outcome}
    return ",".join(f" [{_COLORS[outcome]}]{count} {outcome}[/]" for outcome, count in counts.items() if count)


def _print_failures(console: Console, groups: Sequence[FailedGroup], args: argparse.Namespace) -> None:
    """The failures of one kernel to look at first, how many more there are, and which groups failed besides."""
    for row in (row for group in groups[:1] for row in group.shown):
        again, picture = _commands(row, args)
        title, _, rest = explained(row, again, picture).partition("\n")
        console.print(f"\n[{_COLORS[row.status]}]{escape(title)}[/]", soft_wrap=True)
        for line in rest.splitlines():
            console.print(f"  {escape(line)}", soft_wrap=True)
    for number, group in enumerate(groups):
        counts = ", ".join(f"{check} ({count})" for check, count in group.counts.items())
        more = f"{group.num_more} more of {sum(group.counts.values())}" if number == 0 else "later, if they still do"
        if number or group.num_more:
            hint = f"--select '{group.name}.*' and --json or --report show all"
            console.print(f"[red]{escape(group.name)}[/] failed, {more}: {escape(counts)}; {hint}", soft_wrap=True)


@cache
def _case_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="attn-backends-cases-"))


def _name_of(row: Row, args: argparse.Namespace) -> str:
    """As the backend of a row was named."""
    return next((name for name in args.backends or list_backends() if resolve(name).name == row.backend), row.backend)


def _case_file(row: Row, given: str | None) -> str:
    """A file that holds a row's case: the given one, unless that is none or JSON itself."""
    assert row.case is not None, "the caller looks"
    if given and not given.startswith("{"):
        return given
    path = _case_folder() / f"{row.check}-{row.case.name}.json"
    write_text(path, row.case.to_json() + "\n")
    return str(path)


def _commands(row: Row, args: argparse.Namespace) -> tuple[str, str]:
    """What runs a row's case alone, and what draws its metadata; the case is in a file."""
    if row.case is None:
        return "", ""
    where = row, _name_of(row, args), args.device, _case_file(row, args.case)
    return commands.again(*where), commands.picture(*where)


def _add_arguments(suite: argparse.ArgumentParser) -> None:
    suite.add_argument("backends", nargs="*", metavar="NAME", help="names, or module:Class (default: all known)")
    suite.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    suite.add_argument("--kernel", default="auto", help="one of its kernels (default: auto, every one that runs)")
    suite.add_argument(
        "--quick",
        action="store_true",
        help="three cases of each check: its first, its last, and one between that --seed picks",
    )
    suite.add_argument(
        "--select",
        action="append",
        metavar="PATTERN",
        help="ids of checks, such as 'graph.*,math.decode'; may be repeated",
    )
    suite.add_argument("--profile", default="", metavar="NAME", help=f"one part of the suite: {', '.join(PROFILES)}")
    suite.add_argument(
        "--effort", type=int, default=0, metavar="N", help="N random cases more of each group of checks, each printed"
    )
    suite.add_argument(
        "--seed", type=int, default=0, help="of the quick and of the random cases (default: %(default)s)"
    )
    suite.add_argument("--contract", default=CONTRACT, metavar="VERSION", help="to check (default: %(default)s)")
    suite.add_argument("--share", default="", metavar="I/N", help="every Nth of the cases, from the Ith (default: all)")
    suite.add_argument("--require-run", action="store_true", help="fail if something could not be run here")
    suite.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    suite.add_argument("--report", type=Path, metavar="FILE", help="write the report as an HTML page")
    suite.add_argument("--case", metavar="FILE|JSON", help="run the one case of a JSON file, or as it is printed")
    suite.add_argument("--config", type=Path, metavar="FILE", help="TOML with [[expected_failures]]")
    add_threads(suite)


COMMAND = Command(
    "Whether backends are right: every check that their capabilities call for, eagerly and through graphs. A check "
    "that failed makes the exit code 1; one that broke, or no check at all, makes it 2.",
    _add_arguments,
    run,
    "attn-backends conformance fa3 --quick --json report.json --report report.html",
)
