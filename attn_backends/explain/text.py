"""A picture as text: a terminal's, of any width that a step needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from attn_backends.explain.grids import Grid, GridRow, Mark, grids, grouped
from attn_backends.explain.picture import Picture
from attn_backends.explain.tables import Line, Table

LEGEND = """\
█ sees  · does not see  w writes  ✗ does not see what it must  ! sees what it must not  >value< of a wrong row
columns: token positions; +i the i-th slot that the step writes for the request; @s slot s; eN entries of N tokens"""


def to_text(pictures: Sequence[Picture]) -> str:
    """Pictures of one step or several, each with its buffers; backends whose kernels read the same share the grids."""
    blocks = [LEGEND]
    for group in grouped(pictures):
        blocks.append("\n".join(_head(group)))
        blocks += ["\n".join(_grid(grid)) for grid in grids(group[0])]
        blocks += ["\n".join(_buffers(picture)) for picture in group]
    return "\n\n".join(blocks) + "\n"


def titles_of(group: Sequence[Picture]) -> str:
    """Names of backends, with the kernel, the planner and the path of each, told once where they are the same."""
    ways = [f"kernel {picture.kernel}, planner {picture.planner}, {picture.path}" for picture in group]
    names = [picture.backend for picture in group]
    if len(set(ways)) == 1:
        return f"{', '.join(names)} ({ways[0]})"
    return ", ".join(f"{name} ({way})" for name, way in zip(names, ways, strict=True))


def _head(group: Sequence[Picture]) -> Iterator[str]:
    yield titles_of(group)
    yield f"{group[0].step}; pages of {group[0].geometry.page_size}"
    yield f"{'right' if group[0].is_right else 'WRONG'}: {group[0].verdict}"
    for forward, row in group[0].wrong_rows if not group[0].misses_last_keys else ():
        yield f"  forward {forward}, row {row.number} ({row.name}): {'; '.join(row.faults)}"


def _grid(grid: Grid) -> Iterator[str]:
    """Pages and positions over the rows."""
    labels = [_pool(column.pool) + column.label for column in grid.columns]
    widths = [max(len(label), 3) for label in labels]
    left = max([len(_name(row)) for row in grid.rows] + [4])
    yield grid.title
    pages = []
    for page, own in groupby(range(len(widths)), key=lambda i: (grid.columns[i].page, grid.columns[i].pool)):
        width = sum(widths[i] + 1 for i in own) - 1
        pages.append(f"p{page[0]}"[:width].ljust(width))
    yield f"  {'page':{left}}  {' '.join(pages)}".rstrip()
    yield f"  {'':{left}}  {' '.join(label.rjust(width) for label, width in zip(labels, widths, strict=True))}"
    for row in grid.rows:
        cells = (
            _cell(mark, written, width) for mark, written, width in zip(row.marks, row.written, widths, strict=True)
        )
        yield f"{'!' if row.row.faults else ' '} {_name(row):{left}}  {' '.join(cells)}".rstrip()


def _cell(mark: Mark, written: bool, width: int) -> str:
    sign = (mark * 2 if mark is Mark.SEEN else str(mark)) + ("w" if written else "")
    return (mark * width if mark is Mark.SEEN and not written and width > 3 else sign).rjust(width)


def _name(row: GridRow) -> str:
    return f"row {row.row.number} {row.row.name}"


def _pool(pool: int) -> str:
    return f"e{pool}:" if pool else ""


def _buffers(picture: Picture) -> Iterator[str]:
    yield f"declared buffers of {picture.backend}"
    for table in picture.buffers:
        yield f"{'!' if table.is_marked else ' '} {table.name} {table.shape}: {table.about}"
        yield from _lines(table)


def _lines(table: Table) -> Iterator[str]:
    left = max(len(line.label) for line in table.lines) if table.lines else 0
    for line in table.lines:
        yield f"      {line.label:{left}}  {' '.join(_values(line))}".rstrip()


def _values(line: Line) -> Iterator[str]:
    for value, marked in zip(line.values, line.marked, strict=True):
        yield f">{value}<" if marked else value
