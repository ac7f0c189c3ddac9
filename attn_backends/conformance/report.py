"""A report as one HTML file: a matrix of checks and kernels, and every case, folded under its cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from attn_backends.conformance.catalogue import CATALOGUE, GROUPS, group_of
from attn_backends.conformance.failures import has_failed
from attn_backends.conformance.outcomes import Outcome, Report, Row
from attn_backends.conformance.profiles import told
from attn_backends.results import write_text

WORST_FIRST = (Outcome.ERROR, Outcome.FAIL, Outcome.XFAIL, Outcome.NOT_RUN, Outcome.REFUSED, Outcome.PASS)
_MEANINGS = {
    Outcome.PASS: "a declared capability was checked and is right",
    Outcome.FAIL: "a declared capability is wrong, or an undeclared one was not refused",
    Outcome.REFUSED: "an undeclared capability was asked for and refused, as it must be",
    Outcome.XFAIL: "failed as the backend's file says it does",
    Outcome.NOT_RUN: "this machine lacks what it needs",
    Outcome.ERROR: "the check, or the backend outside its contract, broke",
}
_STYLE = """
:root { --pass: #2e7d32; --fail: #c62828; --refused: #5c6bc0; --xfail: #b26a00; --not_run: #757575; --error: #8e24aa }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #212121 }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { border: 1px solid #ddd; padding: .25rem .6rem; text-align: left }
th { background: #f5f5f5; font-weight: 600 } td { vertical-align: top } thead th { position: sticky; top: 0 }
code, pre { font: 13px/1.45 ui-monospace, monospace } pre { margin: .3rem 0; white-space: pre-wrap }
a { text-decoration: none } details { margin: .3rem 0 } summary { cursor: pointer } .quiet { color: #757575 }
.chip { border-radius: .6rem; color: #fff; display: inline-block; font-size: .85rem; margin: 1px; padding: 0 .55rem }
"""
_OPEN_TARGET = """
const open = () => { const cell = document.getElementById(location.hash.slice(1)); if (cell) cell.open = true };
addEventListener("hashchange", open); open();
"""

Cells = Mapping[tuple[str, str], Sequence[Row]]


def write_html(report: Report, path: Path) -> None:
    """Write the report to a file that needs no other."""
    write_text(path, html_page(report))


def html_page(report: Report) -> str:
    """The report as HTML."""
    cells = by_cell(report.rows)
    wrong = sorted(filter(has_failed, report.rows), key=lambda row: GROUPS.index(group_of(row.check)))
    listed = [row for row in report.rows if row.status in (Outcome.REFUSED, Outcome.XFAIL, Outcome.NOT_RUN)]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    totals = [f"{_chip(outcome, count)} {_MEANINGS[outcome]}" for outcome, count in _present(report.rows)]
    body = [
        "<h1>Attention backend conformance</h1>",
        f"<p class=quiet>suite {escape(report.suite_version)} on {escape(report.device)}; {escape(versions)}; "
        f"{report.executed} checks executed</p>",
        f"<p>{'<br>'.join(totals) or 'Nothing was run.'}</p>",
        *(f"<p>{escape(kernel)} {told(names)}</p>" for kernel, names in report.profiles.items()),
        *(["<h2>What is wrong</h2>", *map(_problem, wrong)] if wrong else []),
        "<h2>Checks and kernels</h2>",
        *_matrix(cells),
        *(["<h2>Refused, expected and not run</h2>", *_reasons(listed)] if listed else []),
        "<h2>Cases</h2>",
        *(_cell_details(key, rows) for key, rows in cells.items()),
    ]
    head = f"<meta charset=utf-8><title>Attention backend conformance</title><style>{_STYLE}</style>"
    lines = "\n".join([*body, f"<script>{_OPEN_TARGET}</script>"])
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n{lines}\n</body></html>\n"


def by_cell(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by check and `backend/kernel`, in the order in which either first appears."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.check, f"{row.backend}/{row.kernel}"), []).append(row)
    return cells


def distinct(values: Iterable[str]) -> list[str]:
    """Values, each once, in order."""
    return list(dict.fromkeys(values))


def _present(rows: Iterable[Row]) -> list[tuple[Outcome, int]]:
    """The outcomes that occur and how often, the worst first."""
    counts = Counter(row.status for row in rows)
    return [(outcome, counts[outcome]) for outcome in WORST_FIRST if counts[outcome]]


def _chip(outcome: Outcome, count: int | None = None) -> str:
    text = outcome if count is None else f"{count} {outcome}"
    return f'<span class=chip style="background: var(--{outcome})">{text}</span>'


def _chips(rows: Iterable[Row]) -> str:
    return " ".join(_chip(outcome, count) for outcome, count in _present(rows))


def _anchor(key: tuple[str, str]) -> str:
    return escape("--".join(key).replace(" ", "_"), quote=True)


def _matrix(cells: Cells) -> Iterable[str]:
    """Checks downward, kernels across."""
    columns = distinct(column for _, column in cells)
    yield f"<table><thead><tr><th>check</th>{''.join(f'<th>{escape(column)}</th>' for column in columns)}</tr></thead>"
    for check in distinct(check for check, _ in cells):
        keys = [(check, column) for column in columns]
        shown = [f'<a href="#{_anchor(key)}">{_chips(cells[key])}</a>' if key in cells else "" for key in keys]
        yield f"<tr><td><code>{escape(check)}</code></td>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>"
    yield "</table>"


def _problem(row: Row) -> str:
    name, words = (f" {row.case.name}", row.case.in_words()) if row.case else ("", "")
    about = escape(CATALOGUE[row.check].about)
    title = f"{_chip(row.status)} <code>{escape(f'{row.backend}/{row.kernel} {row.check}{name}')}</code>"
    return f"<p>{title}<br>{about}<br><span class=quiet>{escape(words)}</span></p><pre>{escape(row.reason)}</pre>"


def _reasons(rows: Sequence[Row]) -> Iterable[str]:
    """Each reason once, with how often and for what."""
    counts = Counter((row.status, f"{row.backend}/{row.kernel}", row.check, row.reason) for row in rows)
    yield "<table><thead><tr><th>outcome</th><th>kernel</th><th>check</th><th>reason</th></tr></thead>"
    for outcome in WORST_FIRST:
        for (status, kernel, check, reason), count in counts.items():
            if status is outcome:
                cells = f"<td>{escape(kernel)}</td><td><code>{escape(check)}</code></td><td>{escape(reason)}</td>"
                yield f"<tr><td>{_chip(status, count)}</td>{cells}</tr>"
    yield "</table>"


def _cell_details(key: tuple[str, str], rows: Sequence[Row]) -> str:
    check, kernel = key
    lines = "".join(map(_case_line, rows))
    title = f"<code>{escape(check)}</code> on {escape(kernel)} {_chips(rows)}"
    columns = "<tr><th>outcome</th><th>case</th><th>path</th><th>largest error</th><th>budget</th><th>ms</th></tr>"
    table = f"<table>{columns}{lines}</table>"
    return f'<details id="{_anchor(key)}"><summary>{title}</summary>{table}</details>'


def _case_line(row: Row) -> str:
    colour = f'<span style="color: var(--{row.status})">{row.status}</span>'
    words = f' title="{escape(row.case.in_words(), quote=True)}"' if row.case else ""
    name = escape(row.case.name) if row.case else "-"
    reason = f"<br><span class=quiet>{escape(row.reason)}</span>" if row.reason else ""
    numbers = (f"{value:.3g}" if value is not None else "" for value in (row.max_err, row.budget))
    cells = "".join(f"<td>{cell}</td>" for cell in (escape(row.path), *numbers, f"{row.ms:.0f}"))
    return f"<tr><td>{colour}</td><td{words}><code>{name}</code>{reason}</td>{cells}</tr>"
