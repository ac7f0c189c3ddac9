"""What the commands of the benchmarks share: options that one does not have, and what was not measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from attn_backends.errors import ConfigError
from benchmarks.rows import Missing, by_reason

DENSE_BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3")


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
