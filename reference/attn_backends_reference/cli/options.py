"""Options of both `generate` and `demo`: the run that they describe, and the choice of its kernel."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from attn_backends.backend import AttentionBackend
from attn_backends.cli import add_threads
from attn_backends.config.toml_options import validated
from attn_backends.errors import ConfigError
from attn_backends_reference.config import RunConfig, load_run_config
from attn_backends_reference.eagle.options import PhaseBackends
from attn_backends_reference.run_options import ModelOptions
from spec_metadata import StepKind

CONFIG = "chain"
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


def add_run(parser: argparse.ArgumentParser) -> None:
    """The options that say which run: a file, a backend for all of its phases, and a draft."""
    parser.add_argument("--config", help=f"a file, or a preset's name (default: {CONFIG}, or what a folder asks for)")
    parser.add_argument("--backend", help="run every phase on this backend instead of the file's")
    parser.add_argument("--draft", metavar="FOLDER", help="the draft's folder, or an embedded one's name")
    parser.add_argument(
        "--draft-positions", type=int, metavar="N", help="that the draft reaches (default: what its folder says)"
    )


def model_of(args: argparse.Namespace) -> ModelOptions | None:
    """The models on the command line, in place of a file's; None if there are none."""
    if args.model is None:
        if args.draft is not None:
            raise ConfigError("--draft names a draft and --model no target; give both, or a file that names them")
        return None
    named = {"target": args.model, "draft": args.draft, "draft_positions": args.draft_positions}
    flags = {"target": "--model", "draft": "--draft", "draft_positions": "--draft-positions"}
    return validated(ModelOptions, named, Path(args.model), flags)


def load_config(args: argparse.Namespace, config: str | None, backend: str | None, **runtime: object) -> RunConfig:
    """A run from a file or preset, or of the models on the command line; keys of [runtime] there, then `runtime`,
    replace the file's.
    """
    model = model_of(args) if hasattr(args, "model") else None
    name = config or (None if model else CONFIG)
    given = {key: value for key, value in vars(args).items() if key in RUNTIME_KEYS and value is not None}
    flags = {key: f"--{key.replace('_', '-')}" for key in given}
    return load_run_config(name, model=model, backend=backend, runtime=given | runtime, flags=flags)


def choices_in_words(backends: PhaseBackends, phases: Mapping[str, StepKind]) -> list[str]:
    """Lines that say which kernel runs which phases, and of each better one why it does not."""
    run_by: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    for phase, kind in phases.items():
        backend: AttentionBackend = getattr(backends, phase)
        choice = backend.choices[kind]
        run_by.setdefault((backend.name, choice.kernel.name), {})[phase] = choice.passed_over
    lines = []
    for (name, kernel), passed_over in run_by.items():
        lines.append(f"{name}, kernel {kernel}: {', '.join(passed_over)}")
        rejected: dict[str, list[str]] = {}
        for each in dict.fromkeys(chain.from_iterable(passed_over.values())):
            better, reason = each.split(": ", 1)
            named = [phase for phase, reasons in passed_over.items() if each in reasons]
            where = "" if len(named) == len(passed_over) else f" ({', '.join(named)})"
            rejected.setdefault(reason + where, []).append(better)
        lines += [f"  passed over {', '.join(names)}: {reason}" for reason, names in rejected.items()]
    return lines


def in_bytes(number: int) -> str:
    """Bytes in the unit that people use for as many."""
    units = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
    size, unit = next((size, unit) for size, unit in units if number >= size or size == 1)
    return f"{number / size:,.3g} {unit}"
