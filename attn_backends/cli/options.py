"""What commands share: the run that options describe, why which kernel runs it, a benchmark's gaps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

from rich.console import Console
from rich.markup import escape

from attn_backends.base import AttentionBackend
from attn_backends.bench.rows import Missing, by_reason
from attn_backends.cli.consoles import progress
from attn_backends.config import RunConfig, load_run_config
from attn_backends.eagle.options import PhaseBackends
from attn_backends.errors import ConfigError
from attn_backends.results import Recording
from spec_metadata import StepKind

DENSE_BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3")
RUNTIME_KEYS = ("kernel", "dtype", "cache_dtype", "device", "max_new_tokens")


def load_config(args: argparse.Namespace, config: str, backend: str | None, **runtime: object) -> RunConfig:
    """A run from a file or preset; keys of [runtime] on the command line, then `runtime`, replace the file's."""
    given = {key: value for key, value in vars(args).items() if key in RUNTIME_KEYS and value is not None}
    return load_run_config(config, backend=backend, runtime=given | runtime)


def choices_in_words(backends: PhaseBackends, phases: Mapping[str, StepKind]) -> list[str]:
    """Lines that say which kernel runs which phases, and of each better one why it does not."""
    run_by: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for phase, kind in phases.items():
        backend: AttentionBackend = getattr(backends, phase)
        choice = backend.choices[kind]
        run_by.setdefault((backend.name, choice.kernel.name, choice.passed_over), []).append(phase)
    lines = []
    for (name, kernel, passed_over), named in run_by.items():
        lines.append(f"{name}, kernel {kernel}: {', '.join(named)}")
        lines += [f"  passed over {reason}" for reason in passed_over]
    return lines


@contextmanager
def recorded(recording: Recording, what: str) -> Iterator[Callable[[Any], None]]:
    """What takes each row of a benchmark as it comes: writes it, and says so on a line of progress."""
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
        raise ConfigError(f"bench {args.what} has no {' or '.join(given)}; see attn-backends bench --help")


def show_missing(console: Console, missing: Iterable[Missing]) -> None:
    """Print what a benchmark has no row of, a line for each kernel and reason."""
    for absent in by_reason(missing):
        what = f"{absent.backend}/{absent.kernel} {'; '.join(absent.cases[:2])}".rstrip()
        more = f" and {len(absent.cases) - 2} more" if len(absent.cases) > 2 else ""
        console.print(f"{'failed' if absent.failed else 'not measured'}: {escape(what)}{more}: {escape(absent.reason)}")
