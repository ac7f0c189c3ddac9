"""Consoles of commands: standard output, errors, and the progress of work that takes longer than two seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

BAR_WIDTH = 20
FILE_WIDTH = 240  # more than any table takes


class CommandConsole(Console):
    """A console whose reader may go away, as `head` does: the command decides what that means."""

    def on_broken_pipe(self) -> None:
        """Raise the error; rich would end the process with code 1, which means that a check failed."""
        raise BrokenPipeError


def output_console() -> Console:
    """The console of standard output. A file or pipe gets tables as wide as they are, whatever COLUMNS says of the
    terminal that they are not shown on.
    """
    console = CommandConsole(highlight=False, emoji=False)
    return console if console.is_terminal else CommandConsole(highlight=False, emoji=False, width=FILE_WIDTH)


def error_console() -> Console:
    """The console of standard error."""
    return CommandConsole(stderr=True, highlight=False, emoji=False)


class Bar:
    """A line of progress: what is done now, how much of all, since when, and what was compiled on the way."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress, self._what = progress, ""
        self._num_compiled, self._compiling_us = 0, 0
        self._task = progress.add_task("", total=total)

    def describe(self, what: str) -> None:
        """Say what is done now."""
        self._what = what
        self._show()

    def advance(self, number: float = 1) -> None:
        """Count what was done."""
        self._progress.advance(self._task, number)

    @contextmanager
    def counting_kernels(self) -> Iterator[None]:
        """Count the kernels that Triton compiles, which it does at the first use of each."""
        if find_spec("triton") is None or not torch.cuda.is_available():
            yield
            return
        from triton import knobs

        before, knobs.compilation.listener = knobs.compilation.listener, self._count
        try:
            yield
        finally:
            knobs.compilation.listener = before

    def _count(self, *, times: Any, cache_hit: bool, **compiled: Any) -> None:
        if not cache_hit:
            self._num_compiled, self._compiling_us = self._num_compiled + 1, self._compiling_us + times.total
            self._show()

    def _show(self) -> None:
        compiled = f"; {self._num_compiled} kernels compiled at their first use, {self._compiling_us / 1e6:.0f} s"
        text = self._what + (compiled if self._num_compiled else "")
        self._progress.update(self._task, description=text, refresh=True)


@contextmanager
def progress(what: str, unit: str, total: int | None = None) -> Iterator[Bar]:
    """A bar on standard error, if that is a terminal. total: of units, None if unknown."""
    console = error_console()
    rest = Column(ratio=1, no_wrap=True)  # on a narrow terminal the words are cut, not the numbers
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False, table_column=rest))
    counted = (BarColumn(BAR_WIDTH), MofNCompleteColumn(), TextColumn(unit)) if total is not None else ()
    shown = Progress(
        *columns,
        *counted,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        expand=True,
        disable=not console.is_terminal,
    )
    with shown:
        bar = Bar(shown, total)
        bar.describe(what)
        if not console.is_terminal:
            yield bar
            return
        with bar.counting_kernels():
            yield bar
