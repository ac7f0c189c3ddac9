"""`conformance`: runs the suite on backends; prints outcomes, and every failure with how to repeat it."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attn_backends.cli import Command
from attn_backends.cli.options import output_console
from attn_backends.conformance import (
    Case,
    Outcome,
    Report,
    Row,
    known_failures,
    resolve_subjects,
    run_case,
    run_conformance,
    selected_cases,
)
from attn_backends.conformance.expectations import ExpectedFailure, check_expectations
from attn_backends.conformance.report import write_html
from attn_backends.conformance.runner import QUICK_CASES, judged, report_of, resolve
from attn_backends.errors import ConfigError
from attn_backends.registry import list_backends
from attn_backends.results import check_output

_COLORS = {
    Outcome.PASS: "green",
    Outcome.FAIL: "red",
    Outcome.REFUSED: "blue",
    Outcome.XFAIL: "yellow",
    Outcome.NOT_RUN: "bright_black",
    Outcome.ERROR: "magenta",
}


def run(args: argparse.Namespace) -> int:
    """Run the suite, print and write what was asked for; the report's exit code."""
    _check_device(args.device)
    check_output("--json", args.json)
    check_output("--report", args.report)
    case = _read_case(args.case) if args.case else None
    names = args.backends or list(list_backends())
    known = {name: known_failures(name, args.config) for name in names}
    for expected in known.values():
        check_expectations(expected)
    sizes = {name: 1 if case else _num_cases(name, args) for name in names}
    rows: list[Row] = []
    with _progress("checking", sum(sizes.values())) as advance:
        for name in names:
            rows += _rows(name, args, case, known[name], advance)
    report = report_of(args.device, rows, args.words)
    code = report.exit_code(args.require_run)
    _print(report, code, args)
    if args.json:
        args.json.write_text(report.to_json(), encoding="utf-8")
    if args.report:
        write_html(report, args.report)
    return code


def _rows(
    name: str,
    args: argparse.Namespace,
    case: Case | None,
    expected: tuple[ExpectedFailure, ...],
    advance: Callable[[Row], None],
) -> tuple[Row, ...]:
    if case is None:
        return run_conformance(
            name,
            kernel=args.kernel,
            device=args.device,
            quick=args.quick,
            select=args.select,
            expected_failures=expected,
            on_row=advance,
        ).rows
    subjects, absent = resolve_subjects(name, args.kernel, args.device)
    return (*(judged(run_case(subject, case), expected) for subject in subjects), *absent)


def _check_device(device: str) -> None:
    try:
        known = torch.device(device).type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(f"--device {device!r} is not a device to run on; give cpu or cuda")


def _read_case(path: Path) -> Case:
    try:
        return Case.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--case {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"--case {path}: {error}") from None


def _num_cases(name: str, args: argparse.Namespace) -> int:
    subjects, absent = resolve_subjects(name, args.kernel, args.device)
    most = QUICK_CASES if args.quick else None
    return sum(len(selected_cases(subject, args.select, most)) for subject in subjects) + len(absent)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[Row], None]]:
    """A bar on standard error, if that is a terminal, that says which check runs and counts cases."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cases"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task(what, total=total)
        yield lambda row: progress.update(task, advance=1, description=f"{row.backend} {row.check}")


def _print(report: Report, code: int, args: argparse.Namespace) -> None:
    """Counts of each backend and group of checks, then every failure."""
    console = output_console()
    for (backend, kernel), rows in groupby(report.rows, key=lambda row: (row.backend, row.kernel)):
        listed = list(rows)
        console.print(f"[bold]{escape(backend)}[/] ({escape(kernel)}) on {escape(report.device)}")
        groups = dict.fromkeys(row.check.partition(".")[0] for row in listed)
        for group in groups:
            console.print(f"  {escape(group):10}{_counts([r for r in listed if r.check.partition('.')[0] == group])}")
    for row in report.rows:
        if row.status in (Outcome.FAIL, Outcome.ERROR):
            _print_failure(console, row, args)
        elif row.status in (Outcome.NOT_RUN, Outcome.XFAIL):
            what = escape(f"{row.backend} ({row.kernel}) {row.check}: {row.reason}")
            console.print(f"[{_COLORS[row.status]}]{row.status}[/] {what}", soft_wrap=True)
    console.print(f"executed {report.executed} of {len(report.rows)}:{_counts(report.rows)}; exit code {code}")


def _counts(rows: list[Row] | tuple[Row, ...]) -> str:
    counts = {outcome: sum(row.status is outcome for row in rows) for outcome in Outcome}
    return ",".join(f" [{_COLORS[outcome]}]{count} {outcome}[/]" for outcome, count in counts.items() if count)


def _print_failure(console: Console, row: Row, args: argparse.Namespace) -> None:
    """What a person needs: check, case in words, what differs, and the command that runs this case alone."""
    backend = escape(f"{row.backend} ({row.kernel})")
    console.print(f"\n[{_COLORS[row.status]}]{row.status}[/] {backend} [bold]{row.check}[/]")
    if row.case is not None:
        console.print(f"  case: {escape(row.case.in_words())}", soft_wrap=True)
    console.print(f"  {escape(row.reason)}", soft_wrap=True)
    if row.case is not None:
        console.print(f"  again: {escape(_again(row, row.case, args))}", soft_wrap=True)


@cache
def _case_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="attn-backends-cases-"))


def _again(row: Row, case: Case, args: argparse.Namespace) -> str:
    """The command that runs a case alone; the case is written to a file."""
    path = _case_folder() / f"{row.check}-{case.name}.json"
    path.write_text(case.to_json() + "\n", encoding="utf-8")
    name = next((n for n in args.backends or list_backends() if resolve(n).name == row.backend), row.backend)
    words = ["attn-backends", "conformance", name, "--device", args.device, "--kernel", row.kernel, "--case", str(path)]
    return shlex.join(words)


def _add_arguments(suite: argparse.ArgumentParser) -> None:
    suite.add_argument("backends", nargs="*", metavar="NAME", help="names, or module:Class (default: all known)")
    suite.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    suite.add_argument("--kernel", default="auto", help="one of its kernels (default: auto, every one that runs)")
    suite.add_argument("--quick", action="store_true", help="a few cases of each check, spread evenly")
    suite.add_argument("--select", default="*", metavar="PATTERN", help="ids of checks, such as 'graph.*'")
    suite.add_argument("--require-run", action="store_true", help="fail if something could not be run here")
    suite.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    suite.add_argument("--report", type=Path, metavar="FILE", help="write the report as an HTML page")
    suite.add_argument("--case", type=Path, metavar="FILE", help="run the one case of a JSON file")
    suite.add_argument("--config", type=Path, metavar="FILE", help="TOML with [[expected_failures]]")


COMMAND = Command(
    "Exit code 0: nothing failed. 1: a check failed. 2: a check broke, nothing ran, or bad input.",
    _add_arguments,
    run,
)
