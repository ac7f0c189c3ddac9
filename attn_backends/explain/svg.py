"""A picture as SVG, one column wide. What is wrong differs in shape as well as in colour (Okabe and Ito's palette)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from textwrap import wrap

from attn_backends.explain.grids import Column, Grid, GridRow, Mark, grids, grouped
from attn_backends.explain.picture import Picture
from attn_backends.explain.tables import Line, Table
from attn_backends.explain.text import titles_of

SEEN, WRONG, HIDDEN, INK, QUIET = "#0072b2", "#d55e00", "#eef1f4", "#1a1a1a", "#5c6670"
PAGES = ("#dfe5ea", "#c9d2da")
LEFT, CELL, ROW, MARGIN = 130, 26, 20, 14
MONO, SANS = 6.65, 5.9  # most of a character's width at 11 and 10 px
_STYLE = (
    "text{font:11px ui-sans-serif,system-ui,Helvetica,Arial,sans-serif;fill:" + INK + "}"
    ".mono{font-family:ui-monospace,Menlo,Consolas,monospace;white-space:pre}.small,.on,.label{font-size:10px}"
    ".quiet,.label{fill:" + QUIET + "}.head{font-size:13px;font-weight:600}.strong{font-weight:600}"
    ".wrong{fill:"
    + WRONG
    + ";font-weight:700}.on{fill:#fff}.mid,.on,.label{text-anchor:middle}circle{fill:none;stroke-width:2}"
)
_LEGEND = (
    ("sees", Mark.SEEN, False),
    ("sees and writes", Mark.SEEN, True),
    ("does not see", Mark.HIDDEN, False),
    ("misses", Mark.MISSING, False),
    ("must not see", Mark.EXTRA, False),
)
COLUMNS = (
    "Columns are token positions; a run that no row tells apart is one column with its number of tokens. +i is the "
    "i-th slot that the step writes for the request, @s is slot s, eN are entries of N tokens."
)


class Canvas:
    """Elements of an SVG from top to bottom. y: where the next goes. width: of the widest so far, in pixels. Boxes lie
    below words and circles, those of one look in one path.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._boxes: dict[str, list[str]] = {}
        self.y, self.width = float(MARGIN), 0.0

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Words on a base line."""
        style = f' class="{style}"' if style else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}"{style}>{words if words.startswith("<") else escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, more: str = "") -> None:
        """A rectangle."""
        outline = f"M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"
        self._boxes.setdefault(f'fill="{fill}"{more}', []).append(outline)
        self.width = max(self.width, x + width)

    def line(self, words: str, style: str = "", x: float = MARGIN, height: float = 16) -> None:
        """Words on a line of their own. They may hold tspans."""
        self.y += height
        self.text(x, self.y - 4, words, style)

    def paragraph(self, words: str, style: str = "", x: float = MARGIN, columns: int = 84) -> None:
        """Words on as many lines as they need."""
        for line in wrap(words, columns):
            self.line(line, style, x, 14)
            self.width = max(self.width, x + len(line) * SANS)

    def to_svg(self) -> str:
        """The document."""
        width, height = max(self.width, 440) + MARGIN, self.y + MARGIN
        boxes = [f'<path {look} d="{"".join(outlines)}"/>' for look, outlines in self._boxes.items()]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>\n'
            + "\n".join([*boxes, *self.parts])
            + "\n</svg>\n"
        )


def to_svg(pictures: Sequence[Picture]) -> str:
    """Pictures of one step or several, each with its buffers; backends whose kernels read the same share the grids."""
    canvas = Canvas()
    _legend(canvas)
    canvas.paragraph(COLUMNS, "small quiet")
    for group in grouped(pictures):
        _grids(canvas, group)
        for picture in group:
            _buffers(canvas, picture)
    return canvas.to_svg()


def grids_to_svg(picture: Picture) -> str:
    """The grids of a picture alone."""
    canvas = Canvas()
    for grid in grids(picture):
        _grid(canvas, grid)
    return canvas.to_svg()


def legend_to_svg() -> str:
    """The legend of grids' cells, as SVG."""
    canvas = Canvas()
    _legend(canvas)
    return canvas.to_svg()


def _legend(canvas: Canvas) -> None:
    x = float(MARGIN)
    for words, mark, written in _LEGEND:
        _cell(canvas, x, canvas.y, 18, mark, written)
        canvas.text(x + 22, canvas.y + 13, words, "small")
        x += 31 + len(words) * SANS
    canvas.y += ROW
    canvas.width = max(canvas.width, x)


def _grids(canvas: Canvas, group: Sequence[Picture]) -> None:
    first = group[0]
    canvas.y += 8
    canvas.paragraph(titles_of(group), "strong", columns=72)
    canvas.paragraph(f"{first.step}; pages of {first.geometry.page_size}", "quiet", columns=76)
    if not first.is_right:
        canvas.paragraph(f"✗ {first.verdict}", "wrong", columns=72)
    for grid in grids(first):
        _grid(canvas, grid)


def _grid(canvas: Canvas, grid: Grid) -> None:
    canvas.y += 6
    canvas.line(grid.title, "strong")
    places = list(_places(grid.columns))
    for page, own in groupby(range(len(places)), key=lambda i: (grid.columns[i].page, grid.columns[i].pool)):
        numbers = list(own)
        x, end = places[numbers[0]][0], sum(places[numbers[-1]])
        canvas.box(x, canvas.y, end - x - 2, 15, PAGES[page[0] % 2])
        words = f"page {page[0]}" if end - x > 46 else f"p{page[0]}"
        words = (
            f"{words}, entries of {page[1]}"
            if page[1] and end - x > 120
            else f"{words} e{page[1]}"
            if page[1]
            else words
        )
        canvas.text((x + end - 2) / 2, canvas.y + 11, words, "small mid")
    canvas.y += 15
    for column, (x, width) in zip(grid.columns, places, strict=True):
        canvas.text(x + (width - 2) / 2, canvas.y + 12, column.label, "label")
    canvas.y += 16
    for row in grid.rows:
        _row(canvas, row, grid.columns, places)
    canvas.y += 4


def _row(canvas: Canvas, row: GridRow, columns: Sequence[Column], places: Sequence[tuple[float, float]]) -> None:
    name = f"row {row.row.number}" + ("" if row.row.law is None else f" · {row.row.name}")
    canvas.text(MARGIN, canvas.y + 14, f"✗ {name}" if row.row.faults else name, "wrong" if row.row.faults else "")
    for column, mark, written, (x, width) in zip(columns, row.marks, row.written, places, strict=True):
        number = len(column.slots) if len(column.slots) > 1 else 0
        _cell(canvas, x, canvas.y, width - 2, mark, written, number)
    canvas.y += ROW
    for fault in row.row.faults:
        canvas.paragraph(fault, "small wrong", MARGIN + 12)


def _cell(canvas: Canvas, x: float, y: float, width: float, mark: Mark, written: bool, number: int = 0) -> None:
    """A slot, or a run of `number`."""
    middle, height = x + width / 2, ROW - 2
    if mark is Mark.MISSING:
        canvas.box(x + 1.25, y + 1.25, width - 2.5, height - 2.5, "#fff", f' stroke="{WRONG}" stroke-width="2.5"')
        canvas.text(middle, y + 13, "✗", "wrong mid")
        return
    canvas.box(x, y, width, height, {Mark.SEEN: SEEN, Mark.EXTRA: WRONG}.get(mark, HIDDEN))
    if written:
        ring = "#fff" if mark is not Mark.HIDDEN else INK
        at = f'cx="{middle:g}" cy="{y + height / 2:g}" r="4.5"'
        canvas.parts.append(f'<circle {at} stroke="{ring}"/>')
    elif mark is Mark.EXTRA or (number and mark is Mark.SEEN):
        canvas.text(middle, y + 13, "!" if mark is Mark.EXTRA else str(number), "on")


def _places(columns: Sequence[Column]) -> Iterator[tuple[float, float]]:
    """Where each column begins, and its width."""
    x = float(LEFT)
    for number, column in enumerate(columns):
        if number and column.pool != columns[number - 1].pool:
            x += 8
        width = max(46 if column.pool else CELL, len(column.label) * SANS + 6)
        yield x, width
        x += width


def _buffers(canvas: Canvas, picture: Picture) -> None:
    canvas.y += 10
    canvas.line(f"declared buffers of {picture.backend}", "strong")
    for table in picture.buffers:
        _table(canvas, table)


def _table(canvas: Canvas, table: Table) -> None:
    canvas.y += 2
    mark = "✗ " if table.is_marked else ""
    style = "wrong" if mark else "strong"
    shape = f'<tspan class="quiet small">{escape(table.shape)}</tspan>'
    canvas.line(f'<tspan class="{style}">{mark}{escape(table.name)}</tspan> {shape}')
    canvas.paragraph(table.about, "small quiet", MARGIN + 12)
    left = max([len(line.label) for line in table.lines if line.values] + [0])
    for line in table.lines:
        words, length = _values(line, left)
        canvas.line(words, "mono", MARGIN + 12, 14)
        canvas.width = max(canvas.width, MARGIN + 12 + length * MONO)


def _values(line: Line, left: int) -> tuple[str, int]:
    """A line's words, marked values in tspans, and how many characters they are."""
    label = f"{line.label:{left}}  " if left or line.label else ""
    told = [
        f'<tspan class="wrong" text-decoration="underline">{escape(value)}</tspan>' if marked else escape(value)
        for value, marked in zip(line.values, line.marked, strict=True)
    ]
    quiet = f'<tspan class="quiet">{escape(label)}</tspan>' if label or any(line.marked) else ""  # tags begin with one
    return quiet + " ".join(told), len(label) + len(" ".join(line.values))
