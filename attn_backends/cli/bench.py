"""`bench`: what a layer costs beside the vendor's raw call."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_backends import results
from attn_backends.bench.attention import BUDGET, Missing, Row, Stage, contenders, measure_attention
from attn_backends.bench.shapes import BATCH_SIZES, CONTEXTS, WIDTHS
from attn_backends.bench.timing import CudaClock
from attn_backends.cli.options import DENSE_BACKENDS
from attn_backends.errors import BackendUnavailableError, ConfigError
from attn_backends.graphs import CudaGraph
from attn_backends.registry import get_backend

ROUNDS, QUICK_ROUNDS = 50, 5


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; 1 if a comparison failed, 2 if nothing can be measured here."""
    results.check_output("--json", args.json)
    batch_sizes, contexts = _sizes(args)
    if not torch.cuda.is_available():
        raise BackendUnavailableError("bench attention", ["torch sees no CUDA device"], "It times a GPU's kernels.")
    backends = [get_backend(name) for name in args.backend or DENSE_BACKENDS]
    stage = Stage(torch.device("cuda"), CudaGraph, CudaClock(), QUICK_ROUNDS if args.quick else ROUNDS)
    found, missing = contenders(backends, stage.device)
    if not found:
        reasons = [f"{absent.backend}/{absent.kernel}: {absent.reason}" for absent in missing]
        raise BackendUnavailableError("bench attention", reasons)
    console = Console(highlight=False)
    rows = []
    for measured in measure_attention(found, batch_sizes, contexts, stage):
        if isinstance(measured, Row):
            rows.append(measured)
        else:
            missing.append(measured)
    console.print(_table(rows))
    for absent in missing:
        what = f"{absent.backend}/{absent.kernel} {absent.case}".rstrip()
        console.print(f"{'failed' if absent.failed else 'not measured'}: {escape(what)}: {escape(absent.reason)}")
    if args.json is not None:
        head = results.head(args.words, "cuda")
        results.write(args.json, head, map(asdict, rows), rounds=stage.rounds, missing=[asdict(m) for m in missing])
    return _exit_code(rows, missing)


def _sizes(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    """The batch sizes and contexts to run."""
    batch_sizes = args.batch_size or list(BATCH_SIZES[:2] if args.quick else BATCH_SIZES)
    contexts = args.context or list(CONTEXTS[:1] if args.quick else CONTEXTS)
    if min(batch_sizes) < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {min(batch_sizes)}")
    if min(contexts) <= max(WIDTHS):
        raise ConfigError(f"--context must be over {max(WIDTHS)}, the query rows of a request; got {min(contexts)}")
    return batch_sizes, contexts


def _exit_code(rows: list[Row], missing: list[Missing]) -> int:
    if not rows:
        return 2
    return 1 if any(absent.failed for absent in missing) else 0


def _table(rows: list[Row]) -> Table:
    table = Table(
        title=f"a layer beside the raw call, device time under graphs; at most {BUDGET}", title_justify="left"
    )
    for column in ("backend", "kernel", "raw call"):
        table.add_column(column)
    for column in ("batch", "context", "heads", "width", "us", "raw us", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = (row.batch_size, row.context, row.heads, row.width)
        ratio = f"[{'green' if row.ratio <= BUDGET else 'red'}]{row.ratio:.3f}[/]"
        times = (f"{row.us:.1f}", f"{row.peer_us:.1f}", ratio)
        table.add_row(row.backend, row.kernel, escape(row.peer), *map(str, sizes), *times)
    return table
