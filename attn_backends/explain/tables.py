"""Declared buffers as lines of a page: what a kernel got, with the values of wrong rows marked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product

import torch
from torch import Tensor

from spec_metadata import BufferSpec, Extent
from spec_metadata.buffers import BS, MAX_PAGES, NUM_FORWARDS, NUM_TOKENS

SHOWN, LINES = 12, 8  # values of a line, lines of a buffer; of what is marked, as many more lines
AROUND = 3  # values from the first one that is wrong behind those
_INDPTR = (BS + 1).text
_LISTS = (BS * MAX_PAGES).text


@dataclass(frozen=True)
class Line:
    """label: of what, such as a request. values, marked: as many."""

    label: str
    values: tuple[str, ...]
    marked: tuple[bool, ...]


@dataclass(frozen=True)
class Table:
    """A buffer. shape: as it is declared, dtype with it. about: what an element is. lines: not all of a long one."""

    name: str
    shape: str
    about: str
    lines: tuple[Line, ...]

    @property
    def is_marked(self) -> bool:
        """Whether a value of it is marked."""
        return any(any(line.marked) for line in self.lines)


@dataclass(frozen=True)
class Wrong:
    """Rows that are wrong: (forward, row), and the requests that they are of, (forward, request). values: slots that
    such rows must not see, and the pages of those.
    """

    rows: Collection[tuple[int, int]] = ()
    requests: Collection[tuple[int, int]] = ()
    values: Collection[int] = ()


def table_of(spec: BufferSpec, tensor: Tensor, extent: Extent, wrong: Wrong, right: Tensor | None = None) -> Table:
    """A declared buffer, with the values marked that wrong rows are read from and those outside of its range. right: of
    a buffer that no row shows; what differs from it is marked instead.
    """
    tensor, axes = tensor.cpu(), [dim.text for dim in spec.shape]
    if axes == [_LISTS]:
        tensor, axes = tensor.view(extent.bs, extent.max_pages), [BS.text, MAX_PAGES.text]
    shape = f"[{', '.join(dim.text for dim in spec.shape)}] {str(spec.dtype).removeprefix('torch.')}"
    if right is None:
        lines = list(_lines(tensor, _outside(spec, tensor, extent), axes, wrong))
    else:
        lines = list(_lines(tensor, tensor != right.cpu(), axes, Wrong()))
    return Table(spec.name, shape, spec.doc, _shortened(lines, wrong))


def tree_tables(trees: Sequence[Mapping[str, Tensor]], wrong: Wrong) -> list[Table]:
    """The drafted tokens that forwards read by slot. trees: `ForwardReading.tree` of each forward."""
    if not any(trees):
        return []
    many = len(trees) > 1
    slots: list[Line] = []
    masks: list[Line] = []
    for forward, tree in enumerate(trees):
        rows = zip(tree["tree.slots"].tolist(), tree["tree.mask"].int().tolist(), strict=True)
        for request, (own, mask) in enumerate(rows):
            label = (f"forward {forward}, " if many else "") + f"request {request}"
            is_wrong = (forward, request) in wrong.requests
            slots.append(_line(label, own, is_wrong))
            masks.append(_line(label, ["".join(map(str, row)) for row in mask], is_wrong))
    return [
        Table("tree.slots", "[bs, keys] int64", "slots of drafted tokens", _shortened(slots, wrong)),
        Table("tree.mask", "[bs, width, keys] bool", "of each row, the keys that it sees", _shortened(masks, wrong)),
    ]


def _line(label: str, values: Sequence[object], is_wrong: bool) -> Line:
    return Line(label, tuple(map(str, values)), (is_wrong,) * len(values))


def _outside(spec: BufferSpec, tensor: Tensor, extent: Extent) -> Tensor:
    """[shape of the buffer] bool: values that its declaration does not allow."""
    if spec.high is None:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return (tensor < (spec.low or 0)) | (tensor >= spec.high.of(extent))


def _lines(tensor: Tensor, outside: Tensor, axes: list[str], wrong: Wrong) -> Iterator[Line]:
    """A line for each index of all axes but the last."""
    for index in product(*map(range, tensor.shape[:-1])):
        at = dict(zip(axes, index, strict=False))
        values, bad = tensor[index].tolist(), outside[index].tolist()
        marked = tuple(is_bad or _is_marked({**at, axes[-1]: i}, axes[-1], wrong) for i, is_bad in enumerate(bad))
        yield Line(_label(at, tensor, axes), tuple(map(str, values)), marked)


def _is_marked(at: Mapping[str, int], last: str, wrong: Wrong) -> bool:
    """Whether an element belongs to a wrong row or its request. at: its index by axis."""
    forwards = [at[NUM_FORWARDS.text]] if NUM_FORWARDS.text in at else [f for f, _ in (*wrong.rows, *wrong.requests)]
    if NUM_TOKENS.text in at:
        return any((forward, at[NUM_TOKENS.text]) in wrong.rows for forward in forwards)
    if BS.text in at:
        return any((forward, at[BS.text]) in wrong.requests for forward in forwards)
    if last == _INDPTR:
        ends = (at[last] - 1, at[last])
        return any((forward, request) in wrong.requests for forward in forwards for request in ends)
    return False


def _label(at: Mapping[str, int], tensor: Tensor, axes: list[str]) -> str:
    """What a line is of, by the axes that have more than one index."""
    names = {NUM_FORWARDS.text: "forward", BS.text: "request", NUM_TOKENS.text: "row"}
    sizes = dict(zip(axes, tensor.shape, strict=False))
    return ", ".join(
        f"{names.get(axis, 'line')} {i}" for axis, i in at.items() if axis != NUM_FORWARDS.text or sizes[axis] > 1
    )


def _shortened(lines: list[Line], wrong: Wrong) -> tuple[Line, ...]:
    """The first lines and those that are marked, of many the ones with a value of `wrong` before others."""
    strange = frozenset(map(str, wrong.values))
    cut = [_cut(line, strange) for line in lines]

    def rank(number: int) -> tuple[bool, bool, int]:
        line = lines[number]
        return number >= LINES, not strange.intersection(compress(line.values, line.marked)), number

    wanted = sorted((n for n, line in enumerate(lines) if n < LINES or any(line.marked)), key=rank)
    shown = [cut[number] for number in sorted(wanted[: 2 * LINES])]
    if len(lines) > len(shown):
        marked = f", {more} of them marked" if (more := len(wanted[2 * LINES :])) else ""
        shown.append(Line(f"{len(lines) - len(shown)} lines more{marked}", (), ()))
    return tuple(shown)


def _cut(line: Line, strange: Collection[str]) -> Line:
    """The first values, and behind them, with their position, those from the first one that is wrong. That is a marked
    one of `strange` or, where not all are marked, any.
    """
    if len(line.values) <= SHOWN + 1:
        return line
    marked = [i for i in range(SHOWN, len(line.values)) if line.marked[i]]
    wrong = [i for i in marked if line.values[i] in strange] or ([] if all(line.marked) else marked)
    end, values, marks = SHOWN, list(line.values[:SHOWN]), list(line.marked[:SHOWN])
    if wrong:
        start, end = wrong[0], wrong[0] + AROUND
        values += [*["…"] * (start > SHOWN), f"[{start}]", *line.values[start:end]]
        marks += [*[False] * (1 + (start > SHOWN)), *line.marked[start:end]]
    if more := len(line.values[end:]):
        values.append(f"+{more}")
        marks.append(any(line.marked[end:]))
    return Line(line.label, tuple(values), tuple(marks))
