"""`python -m benchmarks`: what layers, their metadata and the host cost, beside vendors' raw calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from attn_backends import results
from attn_backends.cli import Command, add_threads, guarded, run_command
from attn_backends.cli.consoles import output_console, progress
from attn_backends.errors import BackendUnavailableError, ConfigError
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.registry import get_backend
from benchmarks import host, layers, memory, plans, ragged, sampling
from benchmarks.rows import Asked, Missing, Row, Stage, by_reason
from benchmarks.targets import Reached, by_target, check_targets
from benchmarks.timing import CudaClock

DENSE = ("flashinfer_mla", "trtllm_mla", "fa3")
ALL = (*DENSE, "dsv4")
PLANNED = tuple(plans.PAGE_SIZES)
QUICK_ROUNDS = 5


class Set(NamedTuple):
    """A set of measurements. backends: empty where none is. options: further ones that it takes."""

    measure: Callable[[Asked], Iterator[Row | Missing]]
    about: str
    backends: Sequence[str]
    batch_sizes: Sequence[int]
    contexts: Sequence[int]
    rounds: int = 20
    least_context: int = 1
    options: tuple[str, ...] = ()
    needs_gpu: bool = True


LONG = (4096, 32768)
SETS = {
    "raw": Set(layers.raw, "a layer beside the vendor's raw call", DENSE, (1, 32, 128), LONG, 50, 5),
    "kernels": Set(layers.kernels, "kernels beside each other", ALL, layers.BATCH_SIZES, layers.CONTEXTS, 20, 17),
    "prefill": Set(layers.prefill, "the same of prompts", ALL, (1, 8), (1024, 8192, 32768), 10, 17),
    "trees": Set(layers.trees, "the verify of a tree beside that of a chain", DENSE, (1, 32, 128), LONG, 20, 17),
    "ragged": Set(ragged.ragged, "ragged verifies beside a uniform one", DENSE, (128,), (4096,), 20, 9),
    "mixed": Set(ragged.mixed, "a step of chunks and decodes beside two", DENSE, (32, 128), (4096,), 10, 2049),
    "plans": Set(plans.plans, "planning a cycle", PLANNED, (1, 32, 128, 512), (4096, 131072), 200, 1, ("page_size",)),
    "eager": Set(host.eager, "the host's time of eager layers and metadata", tuple(host.KERNELS), (8,), (4096,), 20, 5),
    "steps": Set(host.steps, "the host's time of making a cycle's steps", (), (1, 32, 128), (4096,), needs_gpu=False),
    "sampling": Set(sampling.choices, "the choice of tokens beside an argmax", (), (1, 32, 128), (1,)),
    "memory": Set(memory.memory, "static buffers", *memory.SIZES, 0, 1, ("page_size", "topk"), needs_gpu=False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: run_command("python -m benchmarks", COMMAND, words))


def _run(args: argparse.Namespace) -> int:
    """Measure, write the JSON, print the table; 1 if a comparison failed, 2 if nothing can be measured here."""
    chosen = SETS[args.what]
    results.check_output("--json", args.json)
    asked = _asked(args, chosen)
    rows, absent = list[Row](), list[Missing]()
    device, what = asked.stage.device.type, f"benchmarks {args.what}"
    rounds = {"rounds": asked.stage.rounds} if chosen.rounds else {}
    recording = results.Recording(args.json, results.head(args.words, device), **rounds)
    with recording, progress(what, "rows") as bar:
        for row in chosen.measure(asked):
            if isinstance(row, Missing):
                absent.append(row)
                continue
            rows.append(row)
            recording.add(row)
            bar.describe(f"{what}: {len(rows)} rows")
    reached = check_targets(rows, asked.own.get("ceilings", {}))
    try:
        recording.finish(**asked.own, missing=by_reason(absent), targets=[Reached._fields, *reached])
    finally:
        _show(chosen.about, rows, absent, reached, asked.own)
    if not rows:
        return 2
    return int(any(each.failed for each in absent))


def _asked(args: argparse.Namespace, chosen: Set) -> Asked:
    """What the arguments ask for; refuses what the set does not have."""
    takes = (*chosen.options, *(("backend",) if chosen.backends else ()))
    given = [name for name in ("backend", "page_size", "topk") if getattr(args, name) not in (None, [])]
    unused = [f"--{name.replace('_', '-')}" for name in given if name not in takes]
    if unused:
        raise ConfigError(f"benchmarks {args.what} has no {' or '.join(unused)}; see python -m benchmarks --help")
    batch_sizes = args.batch_size or list(chosen.batch_sizes[:2] if args.quick else chosen.batch_sizes)
    contexts = args.context or list(chosen.contexts[:1] if args.quick else chosen.contexts)
    page_size = 1 if args.page_size is None else args.page_size
    sizes = ("--batch-size", batch_sizes, 1), ("--context", contexts, chosen.least_context)
    for option, values, least in (*sizes, ("--page-size", [page_size], 1)):
        if min(values) < least:
            raise ConfigError(f"{option} must be at least {least}, got {min(values)}")
    has_gpu = torch.cuda.is_available()
    if chosen.needs_gpu and not has_gpu:
        raise BackendUnavailableError(f"benchmarks {args.what}", ["torch sees no CUDA device"], "It times a GPU.")
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    rounds = QUICK_ROUNDS if args.quick else chosen.rounds
    stage = Stage(device, CudaGraph if has_gpu else RecordedGraph, CudaClock(), rounds)
    backends = [get_backend(name) for name in args.backend or chosen.backends]
    return Asked(stage, backends, batch_sizes, contexts, args.page_size, args.topk)


def _show(title: str, rows: Sequence[Row], absent: Iterable[Missing], reached: Iterable[Reached], own: Any) -> None:
    """The rows as a table, a line for each target, and what is missing."""
    console, table = output_console(), Table(title=title, title_justify="left")
    names = [name for name in (rows[0] if rows else ()) if name != "bench"]
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        values = ("" if row[name] is None else row[name] for name in names)
        table.add_row(*(f"{value:,}" if isinstance(value, int) else escape(str(value)) for value in values))
    console.print(table)
    for name, values in own.items():
        console.print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in values.items())}")
    for worst, num_met, num in by_target(reached):
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: "[dim]no target[/]"}[worst.met]
        place = f"{worst.backend}/{worst.kernel}: " if worst.kernel else ""
        share = "" if worst.met is None else f"{num_met} of {num}; "
        console.print(f"{verdict}: {escape(f'{worst.target}: {place}{share}at worst {worst.value} ({worst.case})')}")
    for each in by_reason(absent):
        cases = "; ".join(each["cases"][:2]) + (f" and {len(each['cases']) - 2} more" if len(each["cases"]) > 2 else "")
        what = f"{each['backend']}/{each['kernel']} {cases}".rstrip()
        console.print(f"{'failed' if each['failed'] else 'not measured'}: {escape(f'{what}: ' + each['reason'])}")


def _add_arguments(bench: argparse.ArgumentParser) -> None:
    about = ". ".join(f"{name}: {chosen.about}" for name, chosen in SETS.items())
    bench.add_argument("what", choices=tuple(SETS), help=about)
    about = "may be repeated (default: all that suit)"
    bench.add_argument("--backend", action="append", default=[], metavar="NAME", help=about)
    bench.add_argument("--batch-size", type=int, nargs="+", metavar="N", help="requests (default: several)")
    bench.add_argument("--context", type=int, nargs="+", metavar="N", help="tokens of each (default: several)")
    bench.add_argument("--page-size", type=int, metavar="N", help="of plans and memory (default: the backend's)")
    bench.add_argument("--topk", type=int, metavar="N", help="of memory: branches of a draft level")
    bench.add_argument("--quick", action="store_true", help="few rounds and sizes")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    add_threads(bench)


COMMAND = Command(
    "What layers, their metadata and the host cost. All but memory and steps need a GPU. A comparison that failed "
    "makes the exit code 1, nothing to measure 2.",
    _add_arguments,
    _run,
    "python -m benchmarks memory --backend fa3 --json rows.json",
)

if __name__ == "__main__":
    sys.exit(main())
