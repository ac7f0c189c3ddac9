"""What commands share: the run that options describe, why which kernel runs it, and a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attn_backends.base import AttentionBackend
from attn_backends.config import RunConfig, load_run_config
from attn_backends.eagle.options import PhaseBackends
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
def token_progress(what: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal, that counts tokens; yields the function that advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task(what, total=num_tokens)
        yield lambda number: progress.advance(task, number)
