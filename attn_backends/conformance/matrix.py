"""`docs/matrix.md`: what the kernels declare and what the suite found, from capability records and JSON reports.

python -m attn_backends.conformance.matrix [REPORT.json ...] [--output docs/matrix.md]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attn_backends.capabilities import Capabilities
from attn_backends.conformance.catalogue import CATALOGUE
from attn_backends.conformance.outcomes import Outcome, Report, Row
from attn_backends.conformance.report import WORST_FIRST, by_cell, distinct
from attn_backends.errors import AttnBackendsError
from attn_backends.registry import BUILT_IN, get_backend
from spec_metadata import StepKind

COMMAND = "python -m attn_backends.conformance.matrix"
PAGE = Path("docs/matrix.md")
_COLUMNS = (
    "kernel", "steps", "pages", "head sizes", "query heads", "rows a request", "packed", "trees", "LSE", "graphs",
    "dtypes", "layer extras", "over-read", "host lengths",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 if a report can't be read."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("reports", nargs="*", type=Path, help="default: docs/results/conformance_*.json")
    parser.add_argument("--output", type=Path, default=PAGE, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        reports = read_reports(args.reports or sorted(Path("docs/results").glob("conformance_*.json")))
        args.output.write_text(page(reports), encoding="utf-8")
    except (AttnBackendsError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def read_reports(paths: Iterable[Path]) -> list[Report]:
    """The reports of files."""
    return [Report.from_json(path.read_text(encoding="utf-8")) for path in paths]


def page(reports: Sequence[Report]) -> str:
    """The whole page, the same for the same reports and records."""
    lines = [
        "# Backends: capabilities and outcomes",
        "",
        f"Written by `{COMMAND}` from capability records and from the reports in `docs/results`; not edited by hand.",
        "",
        "## What the kernels declare",
        "",
        "What is not declared is refused. Trees follow from non-causal rows and a log-sum-exp (LSE, with its base).",
        "",
        *_table(_COLUMNS, _capability_rows()),
    ]
    for report in reports:
        lines += ["", *_outcomes(report)]
    checks = ([f"`{check.id}`", check.about] for check in CATALOGUE.values())
    lines += ["", "## What the checks hold", "", *_table(("check", "about"), checks)]
    return "\n".join(lines) + "\n"


def _outcomes(report: Report) -> Iterator[str]:
    cells = by_cell(report.rows)
    columns = distinct(column for _, column in cells)
    checks = distinct(check for check, _ in cells)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield f"## What the suite found on {report.device}"
    yield ""
    yield f"Suite {report.suite_version}; {versions}; {report.executed} checks executed."
    yield ""
    table = [[f"`{check}`", *(_counts(cells.get((check, column), ())) for column in columns)] for check in checks]
    totals = [_counts(row for (_, of), rows in cells.items() if of == column for row in rows) for column in columns]
    yield from _table(("check", *columns), [*table, ["**all**", *totals]])
    noted = [row for row in report.rows if row.status in (Outcome.XFAIL, Outcome.NOT_RUN, Outcome.FAIL, Outcome.ERROR)]
    if noted:
        yield ""
        reasons = Counter((str(row.status), f"{row.backend}/{row.kernel}", row.check, row.reason) for row in noted)
        yield from _table(
            ("outcome", "kernel", "check", "cases", "reason"),
            [[status, kernel, f"`{check}`", str(n), reason] for (status, kernel, check, reason), n in reasons.items()],
        )


def _counts(rows: Iterable[Row]) -> str:
    """The outcomes that occur, the worst first: `1 fail, 12 pass`."""
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in WORST_FIRST if counts[outcome])


def _capability_rows() -> Iterator[list[str]]:
    """A row for each kernel and set of step kinds that share a record."""
    for name in BUILT_IN:
        backend = get_backend(name)
        for kernel in backend.kernels:
            for capabilities, kinds in _grouped(kernel.capabilities).items():
                yield [f"{name}/{kernel.name}", ", ".join(kinds), *_values(capabilities)]


def _grouped(records: Mapping[StepKind, Capabilities]) -> dict[Capabilities, list[str]]:
    groups: dict[Capabilities, list[str]] = {}
    for kind, capabilities in records.items():
        groups.setdefault(capabilities, []).append(str(kind))
    return groups


def _values(record: Capabilities) -> Iterator[str]:
    """The cells of `_COLUMNS` after the first two."""
    extras = ("window", "sinks", "kv_scales")
    yield _limits(record.page_sizes)
    yield _limits(record.head_sizes)
    yield "any" if record.max_query_heads is None else f"up to {record.max_query_heads}"
    yield "any" if record.max_width is None else f"up to {record.max_width}"
    yield _yes(record.packed)
    yield _yes(record.tree)
    yield "none" if record.lse is None else f"base {record.lse}"
    yield _yes(record.graph)
    yield ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in record.dtypes))
    yield ", ".join(extra for extra in extras if getattr(record, extra)) or "none"
    yield _yes(record.over_read)
    yield _yes(record.needs_host_lens)


def _limits(values: Iterable[object] | None) -> str:
    return "any" if values is None else ", ".join(map(str, sorted(values)))  # type: ignore[type-var]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    raise SystemExit(main())
