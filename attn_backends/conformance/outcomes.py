"""Results of cases and of runs: six outcomes, rows, and a report with documented exit codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from attn_backends.conformance.cases import Case
from attn_backends.errors import ConfigError
from attn_backends.results import Head, Results

SUITE_VERSION = "2026.11.3"
EXECUTED_OK, FAILED, BROKEN = 0, 1, 2


class Outcome(StrEnum):
    """PASS, FAIL: a declared capability was checked. REFUSED: an undeclared one was fed in and refused, as it must be.
    XFAIL: failed as the backend's file says it does. NOT_RUN: the environment lacks something. ERROR: a check broke.
    """

    PASS = "pass"
    FAIL = "fail"
    REFUSED = "refused"
    XFAIL = "xfail"
    NOT_RUN = "not_run"
    ERROR = "error"


_OWN = (
    "suite_version",
    "contract",
    "profiles",
    "profile_cases",
    "floors",
    "wall_s",
)  # of a report, beside the head and rows of every result
EXECUTED = frozenset({Outcome.PASS, Outcome.FAIL, Outcome.REFUSED, Outcome.XFAIL})


@dataclass(frozen=True)
class Row:
    """One executed or listed case, or several that came to the same (`summary`).

    case: None where nothing was run, or where there are several. cases: how many. reason: why it is not a plain pass.
    max_err, budget: the largest error and its limit, where the check compares numbers; of several cases, of the one
    closest to its budget. ms: wall time of all. excused: not run, and no failure even where everything must run: a
    kernel for another architecture, or a second source of one that ran.
    """

    backend: str
    kernel: str
    check: str
    case: Case | None
    path: str
    status: Outcome
    reason: str = ""
    max_err: float | None = None
    budget: float | None = None
    ms: float = 0.0
    excused: bool = False
    cases: int = 1

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, without those that are the default; errors and budgets to three digits, and the case
        without the check and path that the row has.
        """
        case = {k: v for k, v in self.case.to_dict().items() if k not in ("check", "path")} if self.case else None
        values = asdict(self) | {"case": case, "status": str(self.status)}
        rounded = {name: _three_digits(values[name]) for name in ("max_err", "budget")}
        defaults = {field.name: field.default for field in fields(self)} | {"case": None}
        return {name: value for name, value in (values | rounded).items() if value != defaults[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Row:
        """The row of `to_dict`'s values."""
        given = dict(values)
        case, status = given.pop("case", None), given.pop("status", None)
        try:
            if isinstance(case, Mapping):
                case = Case.from_dict({"check": given["check"], "path": given["path"], **case})
            return cls(case=case, status=Outcome(str(status)), **given)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a row of a conformance report: {error}") from None


def _three_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


@dataclass(frozen=True)
class Report:
    """All rows of a run. device: the name of what it ran on. versions, date, commit, command: as in `results.Head`.
    contract: that was checked, "" in reports from before it had a version. profiles: that each `backend/kernel` passes,
    of those that the run has all cases of. profile_cases: how many cases of each profile each `backend/kernel` has,
    whatever was selected, but in a quick run. floors: how fast kernels are beside what their device allows (`Floor`),
    of a run of all cases on a GPU. wall_s: seconds of a run over several processes, floors included; 0.0 where it went
    on with what an earlier run had left.
    """

    suite_version: str
    device: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    date: str = ""
    commit: str = ""
    command: str = ""
    contract: str = ""
    profiles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    profile_cases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    floors: Sequence[Mapping[str, Any]] = ()
    wall_s: float = 0.0

    @property
    def head(self) -> Head:
        """The origin of the rows."""
        return Head(self.device, self.versions, self.date, self.commit, self.command)

    @property
    def counts(self) -> dict[Outcome, int]:
        """Cases of each outcome, all six."""
        return {outcome: sum(row.cases for row in self.rows if row.status is outcome) for outcome in Outcome}

    @property
    def executed(self) -> int:
        """Cases that ran."""
        return sum(row.cases for row in self.rows if row.status in EXECUTED)

    def exit_code(self, require_run: bool) -> int:
        """0: nothing failed. 1: a fail, or under require_run an unexcused not_run. 2: an error, or no check ran."""
        counts = self.counts
        missing = any(row.status is Outcome.NOT_RUN and not row.excused for row in self.rows)
        if counts[Outcome.ERROR] or self.executed == 0:
            return BROKEN
        return FAILED if counts[Outcome.FAIL] or (require_run and missing) else EXECUTED_OK

    @property
    def own(self) -> dict[str, Any]:
        """Fields of a report beside the head and rows of every result."""
        own = {name: getattr(self, name) for name in _OWN}
        return {name: value for name, value in own.items() if value}

    def to_json(self) -> str:
        """JSON with a row on each line, in the shape of every result."""
        rows = tuple(row.to_dict() for row in self.rows)
        return Results(self.head, rows, self.own).to_json()

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote."""
        return cls.of(Results.from_json(text))

    @classmethod
    def of(cls, results: Results) -> Report:
        """The report that results hold."""
        if "suite_version" not in results.own:
            raise ConfigError("not a conformance report: it names no suite_version")
        if not results.is_complete:
            raise ConfigError(f"the run was interrupted after {len(results.rows)} rows; run its command again")
        own = {name: results.own[name] for name in _OWN if name in results.own}
        return cls(rows=tuple(map(Row.from_dict, results.rows)), **own, **asdict(results.head))
