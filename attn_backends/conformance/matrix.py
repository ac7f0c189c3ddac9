"""`docs/matrix.md`: what the kernels declare, what the suite found, what the demo gave.

python -m attn_backends.conformance.matrix [RESULT.json ...] [--output docs/matrix.md]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attn_backends.conformance.catalogue import CATALOGUE
from attn_backends.conformance.outcomes import Outcome, Report, Row
from attn_backends.conformance.profiles import told
from attn_backends.conformance.report import WORST_FIRST, by_cell, distinct
from attn_backends.contract import CONTRACT
from attn_backends.contract.capabilities import Capabilities, listed
from attn_backends.errors import AttnBackendsError, ConfigError
from attn_backends.registry import BUILT_IN, get_backend
from attn_backends.results import Head, Results, read
from spec_metadata import StepKind

COMMAND = "python -m attn_backends.conformance.matrix"
PAGE, RESULTS = Path("docs/matrix.md"), Path("docs/results")
SHOWN = ("conformance", "demo")  # how the names of files begin
_COLUMNS = (
    "kernel", "steps", "pages", "head sizes", "query heads", "rows per request", "packed", "trees", "LSE", "graphs",
    "packed graphs", "dtypes", "cache dtypes", "layer extras", "over-read", "host lengths",
)  # fmt: skip
_DECODED_ABOUT = (
    "Speculative decoding gives plain decoding's tokens: identical, or consistent (they differ only where rounding "
    "decides)."
)
_DECODED = (
    "backend", "kernel", "model", "draft", "path", "dtype", "cache_dtype", "tokens_per_cycle", "identical",
    "consistent",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 if a result can't be read."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help=f"default: those of {RESULTS} that the page shows")
    parser.add_argument("--output", type=Path, default=PAGE, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        args.output.write_text(page(*map(_complete, args.results or shown(RESULTS))), encoding="utf-8")
    except (AttnBackendsError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _complete(path: Path) -> Results:
    found = read(path)
    if not found.is_complete:
        raise ConfigError(f"{path}: the run was interrupted after {len(found.rows)} rows; run its command again")
    return found


def shown(folder: Path) -> list[Path]:
    """The files of a folder of results that the page is made from."""
    return [
        path for form in SHOWN for path in sorted((*folder.glob(f"{form}_*.json"), *folder.glob(f"*/{form}_*.json")))
    ]


def page(*results: Results) -> str:
    """The whole page, the same for the same results and records."""
    lines = [
        "# Backends: capabilities and outcomes",
        "",
        f"Written by `{COMMAND}` from capability records and from the files in `docs/results`; not edited by hand.",
        "",
        "## What the kernels declare",
        "",
        "What is not declared is refused. Trees follow from non-causal rows and a log-sum-exp (LSE, with its base). A "
        "packed step has requests of different numbers of rows. Over-read: masked keys are multiplied by 0, so they "
        "must be finite. Host lengths: the kernel plans on the host, from exact lengths.",
        "",
        *_table(_COLUMNS, _capability_rows()),
    ]
    for heads, report in _merged(filter(is_of_this_contract, results)):
        lines += ["", *_outcomes(heads, report)]
    for found in (found for found in results if found.rows and "tokens_per_cycle" in found.rows[0]):
        lines += ["", f"## Speculative decoding on {found.head.device}", "", f"{'; '.join(_source(found.head))}.", ""]
        lines += [_DECODED_ABOUT, ""]
        lines += _table(_DECODED, ([_shown(row.get(name)) for name in _DECODED] for row in found.rows))
    checks = ([f"`{check.id}`", check.about] for check in CATALOGUE.values())
    lines += ["", "## What the checks hold", "", *_table(("check", "about"), checks)]
    return "\n".join(lines) + "\n"


def is_of_this_contract(found: Results) -> bool:
    """Whether it is a report of conformance; refuses one of another contract, whose outcomes mean something else."""
    if "suite_version" not in found.own:
        return False
    contract = found.own.get("contract", CONTRACT)  # none: from before it had a version, and shown as that
    if contract != CONTRACT:
        raise ConfigError(
            f"a report of contract {contract} ({found.head.command}, {found.head.date}): this page is of contract "
            f"{CONTRACT}, so run the suite again, or make the page with a suite of contract {contract}"
        )
    return True


def _merged(results: Iterable[Results]) -> list[tuple[list[Head], Report]]:
    """One report of each device, suite and contract, from the runs of several backends, and what each run was."""
    runs: dict[tuple[str, ...], list[Report]] = {}
    for report in map(Report.of, results):
        runs.setdefault((report.device, report.suite_version, report.contract), []).append(report)
    return [([each.head for each in of_one], _joined(of_one)) for of_one in runs.values()]


def _joined(reports: Sequence[Report]) -> Report:
    """All rows and profiles, with the first one's head."""
    rows = tuple(row for report in reports for row in report.rows)
    profiles = {name: told for report in reports for name, told in report.profiles.items()}
    return replace(reports[0], rows=rows, profiles=profiles)


def _source(head: Head) -> tuple[str, str]:
    """Where numbers come from: the command, and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in head.versions.items())
    commit = f" at commit {head.commit[:12]}" if head.commit else ""
    return f"`{head.command}`{commit}, {head.date}", versions


def _outcomes(heads: Sequence[Head], report: Report) -> Iterator[str]:
    started = [row for row in report.rows if row.check != "*"]
    cells = by_cell(started)
    columns = distinct(column for _, column in cells)
    checks = distinct(check for check, _ in cells)
    yield f"## What the suite found on {report.device}"
    yield ""
    sources = [_source(head) for head in heads]
    for versions in distinct(versions for _, versions in sources):
        yield f"- {versions}:"
        yield from (f"    - {run}" for run in distinct(run for run, of in sources if of == versions))
    yield ""
    of_contract = f"contract {report.contract}" if report.contract else "before contracts had versions"
    known = sum(check in CATALOGUE for check in checks)
    executed = f"{report.executed} cases of {known} checks, of {len(CATALOGUE)} that there are now"
    star = " `*` stands for all checks of a kernel that was not run." if len(started) < len(report.rows) else ""
    yield f"Suite {report.suite_version}, {of_contract}; executed: {executed}.{star}"
    for kernel, names in report.profiles.items():
        yield f"`{kernel}` {told(names)}."
    yield ""
    table = [[f"`{check}`", *(_counts(cells.get((check, column), ())) for column in columns)] for check in checks]
    totals = [_counts(row for (_, of), rows in cells.items() if of == column for row in rows) for column in columns]
    yield from _table(("check", *columns), [*table, ["**all**", *totals]])
    noted = [row for row in report.rows if row.status in (Outcome.XFAIL, Outcome.NOT_RUN, Outcome.FAIL, Outcome.ERROR)]
    if noted:
        yield ""
        reasons: dict[tuple[str, str, str], list[Row]] = {}
        for row in noted:
            reasons.setdefault((str(row.status), row.check, row.reason), []).append(row)
        yield from _table(
            ("outcome", "kernels", "check", "cases", "reason"),
            [
                [status, _kernels(rows), f"`{check}`", str(sum(row.cases for row in rows)), reason]
                for (status, check, reason), rows in reasons.items()
            ],
        )


def _kernels(rows: Iterable[Row]) -> str:
    return ", ".join(distinct(f"{row.backend}/{row.kernel}" for row in rows))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return _yes(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _counts(rows: Iterable[Row]) -> str:
    """The outcomes that occur, the worst first: `1 fail, 12 pass`."""
    counts: Counter[Outcome] = Counter()
    for row in rows:
        counts[row.status] += row.cases
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in WORST_FIRST if counts[outcome])


def _capability_rows() -> Iterator[list[str]]:
    """A row for each kernel and set of step kinds that share a record."""
    for name in BUILT_IN:
        backend = get_backend(name)
        for kernel in backend.kernels:
            for capabilities, kinds in _grouped(kernel.capabilities).items():
                pages = _pages(capabilities, backend.page_multiple())
                yield [f"{name}/{kernel.name}", ", ".join(kinds), pages, *_values(capabilities)]


def _grouped(records: Mapping[StepKind, Capabilities]) -> dict[Capabilities, list[str]]:
    groups: dict[Capabilities, list[str]] = {}
    for kind, capabilities in records.items():
        groups.setdefault(capabilities, []).append(str(kind))
    return groups


def _pages(record: Capabilities, multiple: int) -> str:
    """The page sizes of a kernel in a backend that takes multiples only."""
    return f"multiples of {multiple}" if record.page_sizes is None and multiple > 1 else _limits(record.page_sizes)


def _values(record: Capabilities) -> Iterator[str]:
    """The cells of `_COLUMNS` after the first three."""
    limits = f"sinks ({_types(record.sink_types)}, of at most {record.most_sinks} heads, no LSE beside them)"
    named = {"sinks": limits} if record.most_sinks else {}
    extras = ("window", "tree_window", "sinks", "kv_scales")
    yield _limits(record.head_sizes)
    yield _limits(record.query_heads)
    yield "any" if record.max_width is None else f"up to {record.max_width}"
    yield _yes(record.packed)
    yield _yes(record.tree)
    yield "none" if record.lse is None else f"base {record.lse}"
    yield _yes(record.graph)
    yield _yes(record.captures_packed)
    yield _types(record.dtypes)
    yield _types(record.cache_dtypes) or "none but these"
    yield ", ".join(named.get(extra, extra) for extra in extras if getattr(record, extra)) or "none"
    yield _yes(record.over_read)
    yield _yes(record.needs_host_lens)


def _types(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _limits(values: Iterable[object] | None) -> str:
    return "any" if values is None else listed(values)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", r"\|") for cell in row)
        yield f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


if __name__ == "__main__":
    raise SystemExit(main())
