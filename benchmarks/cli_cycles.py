"""`benchmarks metadata`, `benchmarks memory`, `benchmarks cycle`: what surrounds attention in a speculative cycle."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_backends import results
from attn_backends.cli.consoles import output_console
from attn_backends.errors import BackendUnavailableError, ConfigError
from attn_backends.graphs import CudaGraph
from attn_backends.registry import get_backend
from benchmarks import cycle, memory, metadata
from benchmarks.cli_options import DENSE_BACKENDS, recorded, refuse_options, show_missing
from benchmarks.counts import count_on_cuda
from benchmarks.host import LOOP, WallClock
from benchmarks.rows import CycleRow, MemoryRow, MetadataRow, Missing, Stage
from benchmarks.speculation import Tables, speculative
from benchmarks.targets import Reached, by_target, check_targets
from benchmarks.timing import CudaClock
from spec_metadata import Capacity

ROUNDS, QUICK_ROUNDS = 20, 5
QUICK_BATCH_SIZES, QUICK_CONTEXTS = (32, 128), (4096,)
CAPACITY_CONTEXT = 131072  # that metadata has room for, whatever is measured

Row = MetadataRow | MemoryRow | CycleRow


@dataclass(slots=True)
class Measured:
    """What a command gives. on_row: called with each row. own: further keys of its result."""

    on_row: Callable[[Row], None]
    rows: list[Any] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)

    def add(self, measured: Iterable[Row | Missing]) -> None:
        """Add each as it comes."""
        for each in measured:
            if isinstance(each, Missing):
                self.missing.append(each)
            else:
                self.rows.append(each)
                self.on_row(each)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; 1 if something failed, 2 if nothing can be measured here."""
    results.check_output("--json", args.json)
    refuse_options(args, *_UNUSED[args.what])
    device = "cpu" if args.what == "memory" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError(f"benchmarks {args.what}", ["torch sees no CUDA device"], "It times a GPU.")
    measure, tabulate = _COMMANDS[args.what]
    with (
        results.Recording(args.json, results.head(args.words, device)) as recording,
        recorded(recording, f"bench {args.what}") as on_row,
    ):
        measured = Measured(on_row)
        measure(args, measured)
    reached = list(check_targets(map(asdict, measured.rows)))
    own = {
        **measured.own,
        "targets": [asdict(each) for each in reached],
        "missing": [asdict(absent) for absent in measured.missing],
    }
    try:
        recording.finish(**own)
    finally:
        console = output_console()
        console.print(tabulate(measured.rows))
        _show(console, measured, reached)
    if not measured.rows:
        return 2
    return 1 if any(absent.failed for absent in measured.missing) else 0


def _show(console: Console, measured: Measured, reached: Iterable[Reached]) -> None:
    """Say how fast the host was, a line for each target, backend and kernel, and what is missing."""
    if "calibration" in measured.own:
        loop = measured.own["calibration"]
        times = " .. ".join(str(loop[name]) for name in ("least_us", "median_us", "most_us"))
        console.print(f"this host takes {times} us for {loop['additions']} additions in Python")
    colours = {"met": "green", "missed": "red", "no aim": "dim"}
    for worst, num_met, num in by_target(reached):
        share = "" if worst.met is None else f", {num_met} of {num}"
        what = f"{worst.target}: {worst.backend}/{worst.kernel}{share}; at worst {worst.value} ({worst.case})"
        console.print(f"[{colours[worst.verdict]}]{worst.verdict}[/]: {escape(what)}")
    show_missing(console, measured.missing)


def _metadata(args: argparse.Namespace, measured: Measured) -> None:
    sizes = _sizes(args, metadata.BATCH_SIZES, metadata.CONTEXTS)
    bench = metadata.Bench(torch.device("cuda"), CudaGraph, WallClock(), count_on_cuda, _rounds(args))
    problems = []
    for name in args.backend or metadata.PAGE_SIZES:
        backend = get_backend(name)
        page_sizes = metadata.PAGE_SIZES.get(name, (64,)) if args.page_size is None else (args.page_size,)
        for page_size in page_sizes:
            most = max(sizes[0]), max(CAPACITY_CONTEXT, *sizes[1])
            capacity = speculative(*most, page_size, _given(args.topk, 1), metadata.NUM_STEPS)
            problems.append(metadata.Problem(backend, Tables.of(capacity, bench.device)))
    measured.add(metadata.measure_metadata(problems, *sizes, bench))
    loops = bench.calibration_us
    if loops:
        taken = {"least_us": min(loops), "median_us": median(loops), "most_us": max(loops)}
        measured.own["calibration"] = {"additions": LOOP} | {name: round(us, 1) for name, us in taken.items()}
    measured.own["rounds"] = bench.rounds


def _memory(args: argparse.Namespace, measured: Measured) -> None:
    for name in args.backend or memory.CASES:
        backend = get_backend(name)
        for capacity in _capacities(args, name):
            measured.add(memory.measure_memory(backend, capacity))


def _capacities(args: argparse.Namespace, name: str) -> list[Capacity]:
    """Of the backend's cases, or the one that was asked for."""
    max_bs, max_context = _given(args.batch_size, [memory.MAX_BS]), _given(args.context, [memory.MAX_CONTEXT])
    if len(max_bs) + len(max_context) > 2:
        raise ConfigError("benchmarks memory takes one --batch-size and one --context, the most of a capacity")
    cases = memory.CASES.get(name, ((64, 1),))
    if args.page_size is not None or args.topk is not None:
        cases = ((_given(args.page_size, cases[0][0]), _given(args.topk, 1)),)
    return [speculative(max_bs[0], max_context[0], *case, memory.NUM_STEPS) for case in cases]


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _cycle(args: argparse.Namespace, measured: Measured) -> None:
    batch_sizes, contexts = _sizes(args, cycle.BATCH_SIZES, cycle.CONTEXTS)
    stage = Stage(torch.device("cuda"), CudaGraph, CudaClock(), _rounds(args))
    measured.own["rounds"] = stage.rounds
    for name in args.backend or DENSE_BACKENDS:
        measured.add(cycle.measure_cycles(get_backend(name), batch_sizes, contexts, stage))


def _rounds(args: argparse.Namespace) -> int:
    return QUICK_ROUNDS if args.quick else ROUNDS


def _sizes(
    args: argparse.Namespace, batch_sizes: Sequence[int], contexts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The batch sizes and contexts to run."""
    if args.quick:
        batch_sizes = [bs for bs in batch_sizes if bs in QUICK_BATCH_SIZES]
        contexts = [context for context in contexts if context in QUICK_CONTEXTS]
    batch_sizes, contexts = args.batch_size or list(batch_sizes), args.context or list(contexts)
    for option, values in (("--batch-size", batch_sizes), ("--context", contexts)):
        if min(values) < 1:
            raise ConfigError(f"{option} must be at least 1, got {min(values)}")
    return list(batch_sizes), list(contexts)


def _metadata_table(rows: Sequence[MetadataRow]) -> Table:
    title = "preparing the metadata of a phase, and of a cycle of the three"
    table = _table(
        title, ("backend", "kernel", "phase", "mode"), "batch context page host_us gpu_us launches copies syncs"
    )
    for row in rows:
        sizes = (row.batch_size, row.context, row.page_size)
        counts = (f"{row.host_us:.1f}", f"{row.gpu_us:.1f}", row.launches, row.copies, row.syncs)
        table.add_row(row.backend, row.kernel, row.phase, row.mode, *map(str, (*sizes, *counts)))
    return table


def _memory_table(rows: Sequence[MemoryRow]) -> Table:
    title = "static buffers at the whole capacity; the phases lie over each other"
    table = _table(title, ("backend", "table", "phase", "buffer"), "page topk bytes SGLang's")
    for row in rows:
        style = "bold" if row.buffer == memory.TOTAL else ""
        peer = "" if row.peer_bytes is None else f"{row.peer_bytes:,}"
        names = (row.backend, row.paging, row.phase, row.buffer)
        table.add_row(*names, str(row.page_size), str(row.topk), f"{row.bytes:,}", peer, style=style)
    return table


def _cycle_table(rows: Sequence[CycleRow]) -> Table:
    title = f"whole cycles beside the same graphs without planning; at most {cycle.BUDGET}"
    table = _table(title, ("backend", "kernel", "model", "mode", "beside"), "batch context us its_us ratio")
    for row in rows:
        ratio = f"[{'green' if row.ratio <= cycle.BUDGET else 'red'}]{row.ratio:.3f}[/]"
        names = (row.backend, row.kernel, escape(row.model), row.mode, row.peer)
        table.add_row(*names, str(row.batch_size), str(row.context), f"{row.us:.0f}", f"{row.peer_us:.0f}", ratio)
    return table


def _table(title: str, names: Iterable[str], numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in names:
        table.add_column(column, overflow="fold")
    for column in numbers.split():
        table.add_column(column.replace("_", " "), justify="right")
    return table


_UNUSED = {"metadata": ("set",), "memory": ("set",), "cycle": ("set", "page_size", "topk")}
_COMMANDS: dict[str, tuple[Callable[..., None], Callable[..., Table]]] = {
    "metadata": (_metadata, _metadata_table),
    "memory": (_memory, _memory_table),
    "cycle": (_cycle, _cycle_table),
}
