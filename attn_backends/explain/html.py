"""Pictures as one HTML page that needs no other file: buffers stand beside the grids, on a narrow screen below them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from attn_backends.explain.grids import grouped
from attn_backends.explain.picture import Picture
from attn_backends.explain.svg import COLUMNS, QUIET, WRONG, grids_to_svg, legend_to_svg
from attn_backends.explain.tables import Line, Table
from attn_backends.explain.text import titles_of

_STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 100rem; padding: 0 1rem; color: #1a1a1a }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.05rem; margin: 0 0 .3rem }}
section {{ border-top: 1px solid #ccc; padding: 1rem 0 }} .quiet {{ color: {QUIET} }} p {{ margin: .3rem 0 }}
section > div {{ display: grid; grid-template-columns: minmax(0, max-content) minmax(20rem, 1fr); gap: 1rem 2rem }}
section > div > div {{ display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-content: flex-start }}
@media (max-width: 55rem) {{ section > div {{ grid-template-columns: minmax(0, 1fr) }} }}
figure {{ margin: 0; overflow-x: auto }} .legend svg {{ max-width: 100%; height: auto }}
article {{ flex: 1 1 18rem; min-width: 0; max-width: 44rem }}
dt {{ font-weight: 600; margin-top: .5rem }} dt span, dd p {{ color: {QUIET}; font-weight: 400; font-size: .85rem }}
dd {{ margin: 0; overflow-x: auto }} dd p, pre {{ margin: 0 }} pre {{ font: 12px/1.5 ui-monospace, monospace }}
mark {{ background: none; color: {WRONG}; font-weight: 700; text-decoration: underline }} .wrong {{ color: {WRONG} }}
"""


def to_html(pictures: Sequence[Picture], title: str = "What the kernels of a step get") -> str:
    """The page. title: its heading."""
    head = f'<meta charset=utf-8><meta name=viewport content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(_section(group) for group in grouped(pictures))
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        f"<div class=legend>{legend_to_svg()}</div><p class=quiet>{escape(COLUMNS)}</p>\n{body}\n</body></html>\n"
    )


def _section(group: Sequence[Picture]) -> str:
    """Pictures whose kernels read the same: the grids once, and the buffers of each."""
    first = group[0]
    verdict = escape(first.verdict)
    verdict = f"<p>{verdict}</p>" if first.is_right else f"<p class=wrong>✗ {verdict}</p>"
    about = f"<p class=quiet>{escape(first.step)}; pages of {first.geometry.page_size}</p>"
    columns = f"<figure>{grids_to_svg(first)}</figure><div>{''.join(map(_article, group))}</div>"
    return f"<section><h2>{escape(titles_of(group))}</h2>{about}{verdict}<div>{columns}</div></section>"


def _article(picture: Picture) -> str:
    tables = "".join(map(_table, picture.buffers))
    return f"<article><h2>declared buffers of {escape(picture.backend)}</h2><dl>{tables}</dl></article>"


def _table(table: Table) -> str:
    left = max([len(line.label) for line in table.lines if line.values] + [0])
    lines = "\n".join(_line(line, left) for line in table.lines)
    mark = "✗ " if table.is_marked else ""
    return (
        f"<dt>{mark}{escape(table.name)} <span>{escape(table.shape)}</span></dt>"
        f"<dd><p>{escape(table.about)}</p><pre>{lines}</pre></dd>"
    )


def _line(line: Line, left: int) -> str:
    label = f"{escape(line.label):{left}}  " if left or line.label else ""
    return label + " ".join(_values(line))


def _values(line: Line) -> Iterator[str]:
    for value, marked in zip(line.values, line.marked, strict=True):
        yield f"<mark>{escape(value)}</mark>" if marked else escape(value)
