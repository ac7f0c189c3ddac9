"""Kernels beside the vendor's, as one picture that says at a glance which are faster and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import log2
from statistics import median
from typing import Any, NamedTuple

FASTER, SLOWER, EVEN, INK, QUIET, GRID = "#0072b2", "#d55e00", "#6b7280", "#1a1a1a", "#5c6670", "#dfe5ea"
LEFT, WIDTH, RIGHT, ROW, TOP = 286, 280, 108, 18, 62
SAME = 0.05  # a median that is nearer to the vendor's is told as the same
_TICKS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_STYLE = (
    f"text{{font:11px ui-sans-serif,system-ui,sans-serif;fill:{INK}}}.mid{{text-anchor:middle}}"
    f".q{{fill:{QUIET}}}.bold{{font-weight:bold}}"
)

Row = Mapping[str, Any]


class Span(NamedTuple):
    """A kernel of ours, or a tree's, over all sizes: times the peer's time. name: of the kernel and its problem."""

    name: str
    least: float
    middle: float
    most: float
    num_sizes: int


def spans(rows: Iterable[Row], without: str) -> list[Span]:
    """A span for each kernel, number of heads, width and peer. without: a peer that says nothing."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.get("peer", without) != without:
            name = f"{row['backend']} {row['kernel']}: {row['heads']} heads, width {row['width']}"
            groups.setdefault((name, row["peer"]), []).append(row["ratio"])
    return [Span(name, min(own), median(own), max(own), len(own)) for (name, _), own in groups.items()]


def answer(found: Sequence[Span]) -> str:
    """How many medians are on each side of the other's time, and how far they go."""
    medians = [span.middle for span in found]
    faster, slower = (sum(sign * (middle - 1) > SAME for middle in medians) for sign in (-1, 1))
    sides = f"{faster} faster, {len(medians) - faster - slower} as fast, {slower} slower"
    return f"{sides}; medians {min(medians):.2f} to {max(medians):.2f} times the other's time"


def to_svg(question: str, found: Sequence[Span]) -> str:
    """The picture: of each span a bar from the least to the most, and a dot at the median, on a logarithmic axis.

    Left of the line at 1 is faster. question: names whose time is the unit; its answer stands below it.
    """
    least, most = min([span.least for span in found] + [0.75]), max([span.most for span in found] + [1.5])
    low, high = log2(least) - 0.1, log2(most) + 0.1

    def x(ratio: float) -> float:
        return LEFT + (log2(ratio) - low) / (high - low) * WIDTH

    bottom = TOP + ROW * len(found)
    parts = [_text(14, 16, question), _text(14, 30, answer(found), "bold")]
    parts.append(_text(14, 44, "bar: least to most over all sizes; dot: median", "q"))
    parts += [_text(x(1) - 8, 54, "◀ faster", "q", "end"), _text(x(1) + 8, 54, "slower ▶", "q")]
    for tick in (tick for tick in _TICKS if least <= tick <= most):
        dark = tick == 1
        parts.append(_line(x(tick), TOP - 4, x(tick), bottom + 2, INK if dark else GRID, 1.5 if dark else 1))
        parts.append(_text(x(tick), bottom + 15, f"{tick:g}", "mid q"))
    for number, span in enumerate(found):
        parts += _bar(span, TOP + ROW * number + ROW / 2, x)
    width, height = LEFT + WIDTH + RIGHT, bottom + 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _bar(span: Span, y: float, x: Any) -> list[str]:
    is_same = abs(span.middle - 1) <= SAME
    color = EVEN if is_same else FASTER if span.middle < 1 else SLOWER
    return [
        _text(14, y + 4, span.name),
        _line(x(span.least), y, x(span.most), y, color, 4, 0.45),
        f'<circle cx="{x(span.middle):.1f}" cy="{y:g}" r="5" fill="{color}"/>',
        _text(LEFT + WIDTH + 12, y + 4, f"{span.middle:.2f}"),
        _text(LEFT + WIDTH + 42, y + 4, f"{span.num_sizes} size{'s' * (span.num_sizes > 1)}", "q"),
    ]


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "") -> str:
    more = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:g}"{more}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: float, opacity: float = 1) -> str:
    return (
        f'<path d="M{x1:.1f} {y1:g}L{x2:.1f} {y2:g}" stroke="{color}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}" stroke-linecap="round"/>'
    )
