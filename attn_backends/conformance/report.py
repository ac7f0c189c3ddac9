"""A report as one HTML file: a matrix of checks and kernels, and every case, folded under its cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from attn_backends.conformance import commands
from attn_backends.conformance.catalogue import CATALOGUE, GROUPS, group_of
from attn_backends.conformance.failures import has_failed, only_replays
from attn_backends.conformance.floors import Floor, of_report
from attn_backends.conformance.outcomes import Outcome, Report, Row
from attn_backends.conformance.profiles import told
from attn_backends.results import write_text

WORST_FIRST = (Outcome.ERROR, Outcome.FAIL, Outcome.XFAIL, Outcome.NOT_RUN, Outcome.REFUSED, Outcome.PASS)
SHOWN = 3  # failures that are not folded
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
body { overflow-wrap: anywhere } code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { margin: .3rem 0; white-space: pre-wrap } th, td { overflow-wrap: normal }
a { text-decoration: none } details { margin: .3rem 0 } summary { cursor: pointer } .quiet { color: #757575 }
.chip { border-radius: .6rem; color: #fff; display: inline-block; font-size: .85rem; margin: 1px; padding: 0 .55rem }
@media (max-width: 48rem) {
  body { margin: 1rem auto } table, tbody, tr, td { display: block } thead, tr:has(> th) { display: none }
  tr { border: 1px solid #ddd; margin: .4rem 0; padding: .3rem .6rem }
  td { border: 0; overflow-wrap: anywhere; padding: 0 }
  td[data-is]:not(:empty)::before { color: #757575; content: attr(data-is) " " }
}
"""
_OPEN_TARGET = """
const open = () => { const cell = document.getElementById(location.hash.slice(1)); if (cell) cell.open = true };
addEventListener("hashchange", open); open();
"""

Cells = Mapping[tuple[str, str], Sequence[Row]]


def write_html(report: Report, path: Path, names: Mapping[str, str] | None = None) -> None:
    """Write the report to a file that needs no other. names: of backends as commands take them, where that is not the
    name of the row, such as module:Class.
    """
    write_text(path, html_page(report, names))


def html_page(report: Report, names: Mapping[str, str] | None = None) -> str:
    """The report as HTML. names: as of `write_html`."""
    names, device = names or {}, _option(report)
    cells = by_cell(report.rows)
    wrong = sorted(filter(has_failed, report.rows), key=lambda row: GROUPS.index(group_of(row.check)))
    listed = [row for row in report.rows if row.status in (Outcome.REFUSED, Outcome.XFAIL, Outcome.NOT_RUN)]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    totals = [f"{_chip(outcome, count)} {_MEANINGS[outcome]}" for outcome, count in _present(report.rows)]
    body = [
        "<h1>Attention backend conformance</h1>",
        f"<p class=quiet>suite {escape(report.suite_version)} on {escape(report.device)}; {escape(versions)}; "
        f"{report.executed} cases executed</p>",
        f"<p class=quiet>{escape(report.date)} at commit {escape(report.commit or 'unknown')}</p>",
        f"<pre>{escape(report.command)}</pre>",
        f"<p>{'<br>'.join(totals) or 'Nothing was run.'}</p>",
        *(f"<p>{escape(kernel)} {told(names)}</p>" for kernel, names in report.profiles.items()),
        *(f"<p>{escape(line)}</p>" for line in only_replays(report.rows)),
        *_problems([_problem(row, names.get(row.backend, row.backend), device) for row in wrong]),
        "<h2>How fast</h2>",
        *_floors(of_report(report.floors)),
        "<h2>Checks and kernels</h2>",
        "<p class=quiet>A coloured cell leads to its cases, and to the command that runs them again. Kernels of which "
        "nothing was run are listed below.</p>",
        *_matrix(cells),
        *(["<h2>Refused, expected and not run</h2>", *_reasons(listed)] if listed else []),
        "<h2>Cases</h2>",
        *(_cell_details(key, rows, names, device) for key, rows in cells.items()),
    ]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>Attention backend conformance</title><style>{_STYLE}</style>"
    lines = "\n".join([*body, f"<script>{_OPEN_TARGET}</script>"])
    return f"<!doctype html><html lang=en><head>{head}</head><body><main>\n{lines}\n</main></body></html>\n"


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


def _chip(outcome: Outcome, count: int | None = None, text: str = "") -> str:
    text = text or (outcome if count is None else f"{count} {outcome}")
    return f'<span class=chip style="background: var(--{outcome})">{text}</span>'


def _chips(rows: Iterable[Row]) -> str:
    return " ".join(_chip(outcome, count) for outcome, count in _present(rows))


def _anchor(key: tuple[str, str]) -> str:
    return escape("--".join(key).replace(" ", "_"), quote=True)


def _floors(found: Sequence[Floor]) -> Iterable[str]:
    """A line for each floor; none of them fails a run."""
    if not found:
        yield "<p class=quiet>Times are taken in a run of all cases on a GPU.</p>"
        return
    verdicts = {True: _chip(Outcome.PASS, text="fast enough"), False: _chip(Outcome.XFAIL, text="slow"), None: ""}
    yield "<table><thead><tr><th>kernel<th>what<th>measured<th>at most<th>verdict<th></tr></thead>"
    for floor in found:
        value = "not measured" if floor.value is None else f"{floor.value:.2f}"
        kernel = escape(f"{floor.backend}/{floor.kernel}")
        cells = [kernel, escape(floor.floor), value, f"{floor.most:g}", verdicts[floor.met], escape(floor.reason)]
        yield f"<tr>{_labelled(['', '', 'measured', 'at most', '', ''], cells)}</tr>"
    yield "</table>"


def _matrix(cells: Cells) -> Iterable[str]:
    """Checks downward, kernels across, but for those of which nothing was run."""
    ran = [key for key, rows in cells.items() if any(row.status is not Outcome.NOT_RUN for row in rows)]
    columns = distinct(column for _, column in ran)
    names = (escape(column).replace("/", "/<wbr>").replace("_", "_<wbr>") for column in columns)  # broken there alone
    titles = ["check", "what it holds", *names]
    yield f"<table><thead><tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr></thead>"
    for check in distinct(check for check, column in cells if column in columns):
        keys = [(check, column) for column in columns]
        shown = [f'<a href="#{_anchor(key)}">{_chips(cells[key])}</a>' if key in cells else "" for key in keys]
        about = escape(CATALOGUE[check].about) if check in CATALOGUE else ""
        told = [f"<code>{escape(check)}</code>", about, *shown]
        yield f"<tr>{_labelled(['', '', *columns], told)}</tr>"
    yield "</table>"


def _labelled(names: Iterable[str], cells: Iterable[str]) -> str:
    """Cells of a row with the names of their columns, which a phone shows beside each."""
    labels = (f' data-is="{escape(name, quote=True)}"' if name else "" for name in names)
    return "".join(f"<td{label}>{cell}</td>" for label, cell in zip(labels, cells, strict=True))


def _problems(found: Sequence[str]) -> Iterable[str]:
    """The most basic failures, and the others folded: what is wrong there is often wrong in all."""
    if found:
        yield "<h2>What is wrong</h2>"
    yield from found[:SHOWN]
    if found[SHOWN:]:
        more = "".join(found[SHOWN:])
        yield f"<details><summary>{len(found) - SHOWN} more, from basic to derived</summary>{more}</details>"


def _problem(row: Row, backend: str, device: str) -> str:
    """A failure with what shows it again. backend: as commands take it."""
    name, words, shown = "", "", ""
    if row.case is not None:
        name, words, where = f" {row.case.name}", row.case.in_words(), (row, backend, device, row.case.to_json())
        told = ("run it again", commands.again(*where)), ("see its metadata", commands.picture(*where))
        shown = "".join(f"<span class=quiet>{what}:</span><pre>{escape(line)}</pre>" for what, line in told if line)
    about = escape(CATALOGUE[row.check].about)
    title = f"{_chip(row.status)} <code>{escape(f'{row.backend}/{row.kernel} {row.check}{name}')}</code>"
    reason = f"<pre>{escape(row.reason)}</pre>"
    return f"<p>{title}<br>{about}<br><span class=quiet>{escape(words)}</span></p>{reason}{shown}"


def _option(report: Report) -> str:
    """The device of a report, as commands take it."""
    return "cpu" if report.device.lower() == "cpu" else "cuda"


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


def _cell_details(key: tuple[str, str], rows: Sequence[Row], names: Mapping[str, str], device: str) -> str:
    """The cases of a check on a kernel, and what runs them."""
    check, kernel = key
    name, kernel_name = names.get(rows[0].backend, rows[0].backend), rows[0].kernel
    again = f"attn-backends conformance {name} --device {device} --kernel {kernel_name} --select {check}"
    lines = "".join(map(_case_line, rows))
    title = f"<code>{escape(check)}</code> on {escape(kernel)} {_chips(rows)}"
    columns = "<tr><th>outcome</th><th>case</th><th>path</th><th>largest error</th><th>budget</th><th>ms</th></tr>"
    table = f"<table>{columns}{lines}</table>"
    hint = f"<p class=quiet>These cases alone: <code>{escape(again)}</code></p>" if rows[0].case else ""
    return f'<details id="{_anchor(key)}"><summary>{title}</summary>{hint}{table}</details>'


def _case_line(row: Row) -> str:
    colour = f'<span style="color: var(--{row.status})">{row.status}</span>'
    words = f' title="{escape(row.case.in_words(), quote=True)}"' if row.case else ""
    name = escape(row.case.name) if row.case else "-"
    reason = f"<br><span class=quiet>{escape(row.reason)}</span>" if row.reason else ""
    numbers = (f"{value:.3g}" if value is not None else "" for value in (row.max_err, row.budget))
    cells = _labelled(("", "error", "budget", "ms"), (escape(row.path), *numbers, f"{row.ms:.0f}"))
    return f"<tr><td>{colour}</td><td{words}><code>{name}</code>{reason}</td>{cells}</tr>"
