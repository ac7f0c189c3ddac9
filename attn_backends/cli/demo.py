"""`demo`: speculative decoding held against plain decoding, on every dense backend, eagerly and through graphs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attn_backends.cli.options import load_config, token_progress
from attn_backends.eagle.report import Row, demo_prompts, run_row
from attn_backends.errors import ConfigError

BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3")
PRESETS = ("chain", "tree")
PATHS = ("eager", "graph")


def run(args: argparse.Namespace) -> int:
    """Run every row, print the table, write the JSON; 1 if a row failed."""
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}")
    configs = [
        load_config(args, preset, backend, path=path) for backend, preset, path in product(BACKENDS, PRESETS, PATHS)
    ]
    prompts = demo_prompts()
    num_tokens = sum(2 * len(prompts) * config.runtime.max_new_tokens for config in configs)
    with token_progress("decoding", num_tokens) as advance:
        rows = [run_row(config, prompts, advance) for config in configs]
    Console(highlight=False).print(_table(rows))
    if args.json is not None:
        write_json(args.json, rows)
    return 0 if all(row.passed for row in rows) else 1


def write_json(path: Path, rows: list[Row]) -> None:
    """Write {"rows": [...]}, one object a row."""
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8")


def _table(rows: list[Row]) -> Table:
    table = Table("backend", "kernel", "model", "mode", "tokens a cycle", "verdict")
    for row in rows:
        mode = f"{row.draft}, {row.path}"
        table.add_row(row.backend, row.kernel, row.model, mode, f"{row.tokens_per_cycle:.2f}", _verdict(row))
    return table


def _verdict(row: Row) -> str:
    if row.identical:
        return "[green]identical[/]"
    color, verdict = ("yellow", "consistent") if row.passed else ("red", "WRONG")
    return f"[{color}]{verdict}[/]: {row.divergences} of {row.batch_size} differ, gap {row.max_gap:.2g}"
