"""What commands share: the console of standard output."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 240  # more than any table takes


def output_console() -> Console:
    """The console of standard output. A file or pipe gets tables as wide as they are, whatever COLUMNS says of the
    terminal that they are not shown on.
    """
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, width=FILE_WIDTH)
