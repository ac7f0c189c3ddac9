"""What commands share: the run that options describe, why which kernel runs it, consoles, a benchmark's gaps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attn_backends.base import AttentionBackend
from attn_backends.bench.rows import Missing, by_reason
from attn_backends.config import RunConfig, load_run_config
from attn_backends.eagle.options import PhaseBackends
from attn_backends.errors import ConfigError
from spec_metadata import StepKind

DENSE_BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3")
FILE_WIDTH = 240  # more than any table takes
RUNTIME_KEYS = ("kernel", "dtype", "cache_dtype", "device", "max_new_tokens")


def load_config(args: argparse.Namespace, config: str, backend: str | None, **runtime: object) -> RunConfig:
    """A run from a file or preset; keys of [runtime] on the command line, then `runtime`, replace the file's."""
    given = {key: value for key, value in vars(args).items() if key in RUNTIME_KEYS and value is not None}
    flags = {key: f"--{key.replace('_', '-')}" for key in given}
    return load_run_config(config, backend=backend, runtime=given | runtime, flags=flags)


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


def output_console() -> Console:
    """The console of standard output. A file or pipe gets tables as wide as they are, whatever COLUMNS says of the
    terminal that they are not shown on.
    """
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, width=FILE_WIDTH)


@contextmanager
def token_progress(what: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal, that counts tokens; yields the function that advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task(what, total=num_tokens)
        yield lambda number: progress.advance(task, number)


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
