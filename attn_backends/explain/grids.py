"""Rows against slots: what text and SVG draw. Neighbouring slots that no row tells apart are one wide cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from attn_backends.explain.picture import Picture, RowPicture
from attn_backends.explain.probes import ROWS


class Mark(StrEnum):
    """A cell of a row and a slot, as text. MISSING: the row must see the slot and does not. EXTRA: it sees the slot and
    must not, or sees it more than once.
    """

    HIDDEN = "·"
    SEEN = "█"
    MISSING = "✗"
    EXTRA = "!"


@dataclass(frozen=True)
class Column:
    """Neighbouring slots of a page. label: their positions, or the drafted token. pool: as in `probes`."""

    page: int
    label: str
    slots: tuple[int, ...]
    pool: int = ROWS


@dataclass(frozen=True)
class GridRow:
    """marks, written: of each column, what the row does with it, and whether it writes there."""

    row: RowPicture
    marks: tuple[Mark, ...]
    written: tuple[bool, ...]


@dataclass(frozen=True)
class Grid:
    """A request in a forward. title: a sentence; request -1 is padding."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[GridRow, ...]


def grids(picture: Picture) -> Iterator[Grid]:
    """A grid for each request of each forward, then one of its padded rows."""
    many = len(picture.forwards) > 1
    for forward, rows in enumerate(picture.forwards):
        for index, owned in enumerate(picture.requests):
            own = [row for row in rows if row.law is not None and row.law.request == index]
            title = f"request {index}: {owned.committed} committed tokens" + (f", forward {forward}" if many else "")
            yield _grid(title, _columns(picture, index, own), own)
        if padded := [row for row in rows if row.law is None]:
            yield _padding(picture, padded, f", forward {forward}" if many else "")


def _same_reading(picture: Picture) -> object:
    """What two pictures must share so that their grids are the same."""
    rows = [[(r.number, r.name, r.seen, r.writes, r.faults) for r in rows] for rows in picture.forwards]
    return picture.step, picture.path, picture.geometry, picture.problems, rows


def grouped(pictures: Sequence[Picture]) -> list[list[Picture]]:
    """Pictures of the same grids together, in the order in which they come."""
    groups: list[list[Picture]] = []
    for picture in pictures:
        same = next((group for group in groups if _same_reading(group[0]) == _same_reading(picture)), None)
        if same is None:
            groups.append([picture])
        else:
            same.append(picture)
    return groups


def _grid(title: str, columns: Sequence[Column], rows: Sequence[RowPicture]) -> Grid:
    return Grid(title, tuple(columns), tuple(_row(row, columns) for row in rows))


def _row(row: RowPicture, columns: Sequence[Column]) -> GridRow:
    marks = tuple(_mark(row, column.slots[0], column.pool) for column in columns)
    return GridRow(row, marks, tuple(column.pool == ROWS and row.writes in column.slots for column in columns))


def _mark(row: RowPicture, slot: int, pool: int) -> Mark:
    seen = row.seen[pool][slot]
    asked = seen if row.law is None else row.law.sees[pool].count(slot)
    if seen == asked:
        return Mark.SEEN if seen else Mark.HIDDEN
    return Mark.MISSING if seen < asked else Mark.EXTRA


def _columns(picture: Picture, index: int, rows: Sequence[RowPicture]) -> list[Column]:
    """The columns of a request: its own slots, those of others that its rows see or write, and its entries."""
    owned, page_size = picture.requests[index], picture.geometry.page_size
    labels = [str(position) for position in range(owned.committed)]
    labels += [f"+{i}" for i in range(len(owned.slots) - owned.committed)]
    columns = _runs(list(zip(owned.slots, labels, strict=True)), page_size, owned.committed, rows, ROWS)
    touched = {slot for row in rows for slot in (*row.seen[ROWS], row.writes)}
    strange = sorted(touched - set(owned.slots))
    columns += _runs([(slot, f"@{slot}") for slot in strange], page_size, len(strange), rows, ROWS)
    for pool in sorted(pool for pool in (rows[0].seen if rows else ()) if pool != ROWS):
        entries = dict.fromkeys(slot for row in rows if row.law for slot in (*row.law.sees[pool], *row.seen[pool]))
        named = [(slot, f"{i}") for i, slot in enumerate(entries)]
        columns += _runs(named, page_size // pool, len(named), rows, pool)
    return columns


def _runs(
    slots: list[tuple[int, str]], per_page: int, num_joined: int, rows: Sequence[RowPicture], pool: int
) -> list[Column]:
    """Columns of (slot, label); of the first `num_joined`, neighbours of a page that rows do not tell apart are one."""

    def key(entry: tuple[int, tuple[int, str]]) -> object:
        number, (slot, _) = entry
        told = [(_mark(row, slot, pool), row.writes == slot and pool == ROWS) for row in rows]
        alone = number if number >= num_joined or any(written for _, written in told) else -1
        return slot // per_page, alone, told

    columns = []
    for _, run in groupby(enumerate(slots), key):
        own = [entry for _, entry in run]
        first, last = own[0][1], own[-1][1]
        label = first if len(own) == 1 else f"{first}–{last}"
        columns.append(Column(own[0][0] // per_page, label, tuple(slot for slot, _ in own), pool))
    return columns


def _padding(picture: Picture, rows: list[RowPicture], where: str) -> Grid:
    """The padded rows, against all slots that they see or write."""
    page_size = picture.geometry.page_size
    slots = sorted({slot for row in rows for slot in (*row.seen[ROWS], row.writes)})
    columns = _runs([(slot, f"@{slot}") for slot in slots], page_size, len(slots), rows, ROWS)
    return _grid(f"padding: {len(rows)} rows, reserved page {picture.geometry.reserved_page}{where}", columns, rows)
