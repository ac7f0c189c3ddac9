"""What `generate` and `demo` share: the run that the options describe, and a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attn_backends.config import RunConfig, load_run_config

RUNTIME_KEYS = ("kernel", "dtype", "device", "max_new_tokens")


def load_config(args: argparse.Namespace, config: str, backend: str | None, **runtime: object) -> RunConfig:
    """A run from a file or preset; keys of [runtime] on the command line, then `runtime`, replace the file's."""
    given = {key: value for key, value in vars(args).items() if key in RUNTIME_KEYS and value is not None}
    return load_run_config(config, backend=backend, runtime=given | runtime)


@contextmanager
def token_progress(what: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal, that counts tokens; yields the function that advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task(what, total=num_tokens)
        yield lambda number: progress.advance(task, number)
