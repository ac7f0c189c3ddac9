"""Matplotlib's figure, as far as the benchmarks' pictures use it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np

from benchmarks import plot


class Figure:
    """Keeps what is drawn, in order: titles, lines as (label, x, y), bars and marks as (names, heights, ...)."""

    drawn: list

    def __init__(self, **_):
        Figure.drawn = []

    def suptitle(self, text):
        Figure.drawn.append(text)

    def subplots(self, rows, columns, **_):
        grid = np.empty((rows, columns), dtype=object)
        for place in np.ndindex(rows, columns):
            grid[place] = _axes()
        return grid

    def savefig(self, path, **_):
        path.write_text("picture")


def _axes():
    return SimpleNamespace(
        plot=lambda x, y, label, **_: Figure.drawn.append((label, x, y)),
        scatter=lambda x, y, label=None, **_: Figure.drawn.append((x, y) if label is None else (label, x, y)),
        bar=lambda names, heights, color: Figure.drawn.append((names, heights, color)),
        bar_label=lambda bars, labels, **_: Figure.drawn.append(labels),
        set=lambda title, **_: Figure.drawn.append(title),
        set_xlabel=lambda text: None,
        set_xticks=lambda *_, **__: None,
        legend=lambda **_: None,
    )


def install_matplotlib(monkeypatch):
    """From now on it is there, and is this."""
    module = ModuleType("matplotlib.figure")
    module.Figure = Figure
    monkeypatch.setattr(plot, "is_installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
