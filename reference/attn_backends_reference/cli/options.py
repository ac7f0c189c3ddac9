"""What `generate` and `demo` share: the run that options describe, and why which kernel runs it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from attn_backends.backend import AttentionBackend
from attn_backends.cli import add_threads
from attn_backends_reference.config import RunConfig, load_run_config
from attn_backends_reference.eagle.options import PhaseBackends
from spec_metadata import StepKind

RUNTIME_KEYS = ("kernel", "dtype", "cache_dtype", "device", "max_new_tokens")


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """The options that replace keys of a file's [runtime]."""
    parser.add_argument("--kernel", help="a kernel's name, or auto (default: the file's)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of the weights (default: the file's)"
    )
    parser.add_argument("--cache-dtype", choices=("float8_e4m3fn",), help="of the cache (default: the weights')")
    parser.add_argument("--device", help="cpu, cuda or one such as cuda:1 (default: the file's)")
    add_threads(parser)


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
