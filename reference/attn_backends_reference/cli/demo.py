"""`demo`: speculative and plain decoding compared on every backend but the reference, eagerly and through graphs."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from attn_backends import results
from attn_backends.backend import AttentionBackend
from attn_backends.cli import Command
from attn_backends.cli.consoles import error_console, output_console, progress
from attn_backends.registry import get_backend
from attn_backends_reference.cli.options import add_runtime, choices_in_words, load_config
from attn_backends_reference.eagle.engine import Engine, build_engine
from attn_backends_reference.eagle.report import ExactScores, Row, demo_prompts, run_row
from spec_metadata import StepKind

DENSE_BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3")
RUNS = (
    *product(DENSE_BACKENDS, ("chain", "tree")),
    ("fa3", "eagle3"),
    ("fa3", "eagle3-tree"),
    ("fa3", "block"),
    ("flashinfer_mla", "mtp"),
    ("dsv4", "chain"),
)
"""Backends and presets."""
BACKENDS = tuple(dict.fromkeys(backend for backend, _ in RUNS))
PATHS = ("eager", "graph")
BUCKETS = (8,)  # one graph of each phase, which every batch of the prompts fits; each more takes time to compile
SHOWN_TOKENS = 48  # of the text that is printed first


def run(args: argparse.Namespace) -> int:
    """Run every row, write each as it comes, print the table, why which kernel ran, the verdict; 1 if a row failed."""
    results.check_output("--json", args.json)
    runs = list(_runs(args.backend or BACKENDS))
    configs = [
        load_config(args, preset, backend, path=path, buckets=BUCKETS)
        for (backend, preset), path in product(runs, PATHS)
    ]
    prompts = demo_prompts()
    num_tokens = sum(2 * len(prompts) * config.runtime.max_new_tokens for config in configs)
    rows: list[Row] = []
    chosen: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    exact = ExactScores()
    head = results.head(args.words, str(configs[0].device))
    with results.Recording(args.json, head) as recording, progress("decoding", "tokens", num_tokens) as bar:
        for (backend, preset), config in zip((run for run in runs for _ in PATHS), configs, strict=True):
            what = f"{backend} {preset}, {config.runtime.path}"
            bar.describe(f"{what}: loading models")
            engine = build_engine(config)
            bar.describe(f"{what}: decoding; the first step of each kind makes its kernels and graphs")
            if not rows:
                _show_text(engine, what, min(prompts, key=len))
            rows.append(run_row(engine, prompts, bar.advance, exact))
            recording.add(asdict(rows[-1]))
            if not (console := error_console()).is_terminal:
                console.print(f"{escape(what)}: {_verdict(rows[-1])}", soft_wrap=True)
            words = tuple(choices_in_words(engine.backends, config.phases))
            chosen.setdefault((backend, words), {})[preset] = None
    lines = list(_with_modes(chosen))
    try:
        recording.finish(kernels=lines)
    finally:
        _print(rows, [*lines, *_left_out(runs)])
    return 0 if all(row.passed for row in rows) else 1


def _runs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The backends and presets of the names: ours, then chains and, where they are declared, trees of the others."""
    yield from (run for run in RUNS if run[0] in names)
    for name in dict.fromkeys(name for name in names if name not in BACKENDS):
        yield name, "chain"
        if _has_trees(get_backend(name)):
            yield name, "tree"


def _with_modes(chosen: Mapping[tuple[str, tuple[str, ...]], Iterable[str]]) -> Iterator[str]:
    """The choices of each backend; where its modes differ in them, the modes are named. chosen: modes of choices."""
    several = Counter(backend for backend, _ in chosen)
    for (backend, words), modes in chosen.items():
        named = f" ({', '.join(modes)}), kernel " if several[backend] > 1 else ", kernel "
        yield from (line if line.startswith(" ") else line.replace(", kernel ", named, 1) for line in words)


def _left_out(runs: Sequence[tuple[str, str]]) -> Iterator[str]:
    for backend, _ in runs:
        if not any(run == (backend, "tree") for run in runs) and backend not in BACKENDS:
            yield f"{backend}: chains only; its kernels declare no trees"


def _has_trees(backend: type[AttentionBackend]) -> bool:
    kinds = (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)
    return all(any(kind in k.capabilities and k.capabilities[kind].tree for k in backend.kernels) for kind in kinds)


def _show_text(engine: Engine, what: str, prompt: str) -> None:
    """Print what one prompt is continued by, before the long comparison."""
    (completion,) = engine.generate([engine.tokenizer.encode(prompt)], SHOWN_TOKENS)
    text = engine.tokenizer.decode(completion.tokens)
    output_console().print(escape(f"{what}: after {prompt!r} comes\n{text}\n"), soft_wrap=True)


def _print(rows: Sequence[Row], lines: Iterable[str]) -> None:
    console = output_console()
    table = Table("backend", "kernel", "model", Column("mode", no_wrap=True), "tokens a cycle", "verdict")
    for row in rows:
        mode = f"{row.draft}, {row.path}"
        name = escape(row.backend)
        table.add_row(name, row.kernel, row.model, mode, f"{row.tokens_per_cycle:.2f}", _verdict(row))
    console.print(table)
    for line in lines:
        console.print(escape(line), soft_wrap=True)
    counts = Counter(map(_word, rows))
    console.print(", ".join(f"{number} of {len(rows)} rows {word}" for word, number in counts.items()))


def _word(row: Row) -> str:
    if row.identical:
        return "[green]identical[/]"
    return "[yellow]consistent[/]" if row.passed else "[red]WRONG[/]"


def _verdict(row: Row) -> str:
    differ = f": {row.divergences} of {row.batch_size} differ, gap {row.max_gap:.2g}"
    return _word(row) + differ * (not row.identical)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a name, or module:Class; may be repeated (default: all but reference)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    add_runtime(parser)


COMMAND = Command(
    "Speculative decoding compared with plain decoding, eagerly and through graphs. A row that is not what its "
    "precision promises makes the exit code 1.",
    _add_arguments,
    run,
    "attn-backends demo --backend fa3 --json rows.json",
)
