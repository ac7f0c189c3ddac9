"""What the commands of the benchmarks share: options that one does not have, and what was not measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

from rich.console import Console
from rich.markup import escape

from attn_backends.cli.consoles import progress
from attn_backends.errors import ConfigError
from attn_backends.results import Recording
from benchmarks.rows import Missing, by_reason

DENSE_BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3")


@contextmanager
def recorded(recording: Recording, what: str) -> Iterator[Callable[[Any], None]]:
    """What takes each row of a benchmark as it comes: writes it, and reports it on a line of progress."""
    with progress(what, "rows") as bar:
        num_rows = count(1)

        def on_row(row: Any) -> None:
            recording.add(asdict(row))
            bar.describe(f"{what}: {next(num_rows)} rows, last {row.backend}")

        yield on_row


def refuse_options(args: argparse.Namespace, *names: str) -> None:
    """Refuse options that a benchmark does not have."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"benchmarks {args.what} has no {' or '.join(given)}; see python -m benchmarks --help")


def show_missing(console: Console, missing: Iterable[Missing]) -> None:
    """Print what a benchmark has no row of, a line for each kernel and reason."""
    for absent in by_reason(missing):
        what = f"{absent.backend}/{absent.kernel} {'; '.join(absent.cases[:2])}".rstrip()
        more = f" and {len(absent.cases) - 2} more" if len(absent.cases) > 2 else ""
        console.print(f"{'failed' if absent.failed else 'not measured'}: {escape(what)}{more}: {escape(absent.reason)}")
