"""`demo`: speculative decoding held against plain decoding, on every vendor's backend, eagerly and through graphs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import product
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from attn_backends import results
from attn_backends.cli import Command
from attn_backends.cli.options import output_console
from attn_backends.errors import ConfigError
from attn_backends_reference.cli.options import add_runtime, choices_in_words, load_config, token_progress
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.report import Row, demo_prompts, run_row

DENSE_BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3")
RUNS = (
    *product(DENSE_BACKENDS, ("chain", "tree")),
    ("fa3", "eagle3"),
    ("fa3", "eagle3-tree"),
    ("flashinfer_mla", "mtp"),
    ("dsv4", "chain"),
)
"""Backends and presets."""
BACKENDS = tuple(dict.fromkeys(backend for backend, _ in RUNS))
PATHS = ("eager", "graph")


def run(args: argparse.Namespace) -> int:
    """Run every row, print the table and why which kernel ran, write the JSON; 1 if a row failed."""
    results.check_output("--json", args.json)
    for name in args.backend:
        if name not in BACKENDS:
            raise ConfigError(f"the demo has no backend {name!r}; it has {', '.join(BACKENDS)}")
    runs = [run for run in RUNS if run[0] in (args.backend or BACKENDS)]
    configs = [load_config(args, preset, backend, path=path) for (backend, preset), path in product(runs, PATHS)]
    prompts = demo_prompts()
    num_tokens = sum(2 * len(prompts) * config.runtime.max_new_tokens for config in configs)
    rows: list[Row] = []
    chosen: dict[tuple[str, ...], None] = {}
    with token_progress("decoding", num_tokens) as advance:
        for config in configs:
            engine = build_engine(config)
            rows.append(run_row(engine, prompts, advance))
            chosen[tuple(choices_in_words(engine.backends, config.phases))] = None
    console = output_console()
    console.print(_table(rows))
    lines = [line for of_backend in chosen for line in of_backend]
    for line in lines:
        console.print(escape(line), soft_wrap=True)
    if args.json is not None:
        head = results.head(args.words, str(configs[0].device))
        results.write(args.json, head, map(asdict, rows), kernels=lines)
    return 0 if all(row.passed for row in rows) else 1


def _table(rows: list[Row]) -> Table:
    table = Table("backend", "kernel", "model", Column("mode", no_wrap=True), "tokens a cycle", "verdict")
    for row in rows:
        mode = f"{row.draft}, {row.path}"
        table.add_row(row.backend, row.kernel, row.model, mode, f"{row.tokens_per_cycle:.2f}", _verdict(row))
    return table


def _verdict(row: Row) -> str:
    if row.identical:
        return "[green]identical[/]"
    color, verdict = ("yellow", "consistent") if row.passed else ("red", "WRONG")
    return f"[{color}]{verdict}[/]: {row.divergences} of {row.batch_size} differ, gap {row.max_gap:.2g}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    add_runtime(parser)


COMMAND = Command(
    "Exit code 0: every row is what its precision promises. 1: one is not. 2: bad input.", _add_arguments, run
)
