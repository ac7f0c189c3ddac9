"""Which of the bugs that users reported the suite catches: `real_bugs.json`, and docs/real-bugs.md written from it.

A report is caught by a mutant that models its cause, and by the checks that the kill matrix knows to kill that mutant.
One that is not says why, as one of `REASONS`. A cause outside of an attention backend's contract is not counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_backends.conformance import Case
from tests.mutants.mutant import MUTANTS

ROOT = Path(__file__).parent.parent.parent
REPORTS, PAGE = Path(__file__).with_suffix(".json"), ROOT / "docs" / "real-bugs.md"
REASONS = ("cause not established", "no such format", "speed")

Kills = Mapping[str, Mapping[str, Case]]


@dataclass(frozen=True)
class Report:
    """One report, or several of one cause.

    report: repositories and numbers. when: of the first, year and month. symptom: what users saw. cause: as far as it
    is established. mutants: which model it. note: where a mutant is of another situation than the report. missed: of
    `REASONS`, why no check can catch it, and why, in words. outside: what else it is a bug of, if not of a backend.
    """

    report: str
    when: str
    symptom: str
    cause: str = ""
    mutants: tuple[str, ...] = ()
    note: str = ""
    missed: str = ""
    why: str = ""
    outside: str = ""

    def checks(self, kills: Kills) -> list[str]:
        """The checks that kill its mutants."""
        named = {check: None for name in self.mutants for check in MUTANTS[name].killed_by}
        return [check for check in named if any(check in kills.get(name, ()) for name in self.mutants)]


def read_reports() -> list[Report]:
    """All reports, in their order."""
    found = json.loads(REPORTS.read_text(encoding="utf-8"))
    return [Report(**{**each, "mutants": tuple(each.get("mutants", ()))}) for each in found]


INTRODUCTION = """\
# Bugs that users reported

Written by `python -m tests.mutants.matrix` from `tests/mutants/real_bugs.json`; not edited by hand.

{total} reports of 2024 to 2026 about speculative decoding and attention in SGLang, vLLM, TensorRT-LLM, FlashInfer and
others. They were found by search after the suite was written, not drawn at random; it caught 18 of them then. {inside}
concern promises of an attention backend: **{caught} of these are caught now**; the others are not ({missed}). For
{noted} of the caught ones the model is of a similar situation, named in the last column.

A report is caught if a model of its cause, put into a correct backend, makes a check fail. All models, and what kills
them, are in the [kill matrix](kill-matrix.md).
"""
OUTSIDE = """
## Outside of an attention backend

Schedulers, transfers, loaders and workers: no suite of backends can see them.
"""


def page(kills: Kills) -> str:
    """The page, the same for the same reports, mutants and kills."""
    reports = read_reports()
    inside, outside = ([each for each in reports if bool(each.outside) is out] for out in (False, True))
    caught = [each for each in inside if each.checks(kills)]
    missed = sorted(Counter(each.missed for each in inside if each.missed).items())
    introduction = INTRODUCTION.format(
        total=len(reports),
        inside=len(inside),
        caught=len(caught),
        missed=", ".join(f"{reason}: {count}" for reason, count in missed),
        noted=sum(bool(each.note) for each in caught),
    )
    rows = [_row(number, each, kills) for number, each in enumerate(inside, 1)]
    others = [(each.report, each.when, each.symptom, each.outside) for each in outside]
    columns = ("", "report", "since", "what users saw", "cause", "caught by", "shown by")
    tables = [*_table(columns, rows), *OUTSIDE.splitlines(), "", *_table((*columns[1:4], "of what"), others)]
    return "\n".join([introduction, *tables]) + "\n"


def _row(number: int, report: Report, kills: Kills) -> tuple[str, ...]:
    checks = ", ".join(f"`{check}`" for check in report.checks(kills)) or f"**not: {report.missed}**"
    shown = ", ".join(f"`{name}`" for name in report.mutants) + (f"; {report.note}" if report.note else "")
    return str(number), report.report, report.when, report.symptom, report.cause, checks, shown or report.why


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
