"""`benchmarks attention`: a layer beside the vendor's raw call, kernels beside each other, trees beside chains."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from attn_backends import results
from attn_backends.backend import AttentionBackend
from attn_backends.cli.consoles import output_console
from attn_backends.errors import BackendUnavailableError, ConfigError
from attn_backends.graphs import CudaGraph
from attn_backends.registry import get_backend
from benchmarks import attention, kernels, ragged, shapes, trees
from benchmarks.attention import contenders, measure_attention
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.cli_options import DENSE_BACKENDS, recorded, refuse_options, show_missing
from benchmarks.kernels import measure_kernels, runnable_kernels
from benchmarks.ragged import measure_mixed, measure_ragged
from benchmarks.rows import KernelRow, Missing, Row, Stage, by_reason
from benchmarks.targets import Reached, check_targets
from benchmarks.timing import CudaClock
from benchmarks.trees import measure_trees

QUICK_ROUNDS = 5


@dataclass(slots=True)
class Measured:
    """What a set gives. on_row: called with each row. ceilings: of the device, where the set compares with them."""

    on_row: Callable[[Row], None]
    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    ceilings: Ceilings | None = None

    def add(self, measured: Iterable[Row | Missing]) -> None:
        """Add each as it comes."""
        for each in measured:
            if isinstance(each, Missing):
                self.missing.append(each)
            else:
                self.rows.append(each)
                self.on_row(each)

    @property
    def reached(self) -> list[Reached]:
        """What its rows say of the kernels' targets."""
        return list(check_targets(map(asdict, self.rows), self.ceilings))


@dataclass(frozen=True, slots=True)
class Set:
    """What `--set` names. run: fills what was measured, from (measured, backends, batch sizes, contexts, stage). title,
    budget: of its table.
    """

    run: Callable[[Measured, Sequence[type[AttentionBackend]], list[int], list[int], Stage], None]
    backends: Sequence[str]
    batch_sizes: Sequence[int]
    contexts: Sequence[int]
    width: int
    rounds: int
    title: str
    budget: float | None = None


def _layer(
    measured: Measured,
    backends: Sequence[type[AttentionBackend]],
    batch_sizes: list[int],
    contexts: list[int],
    stage: Stage,
) -> None:
    found, measured.missing = contenders(backends, stage.device)
    _need(found, measured.missing)
    measured.add(measure_attention(found, batch_sizes, contexts, stage))


def _kernels(
    problems: kernels.Problems,
    measured: Measured,
    backends: Sequence[type[AttentionBackend]],
    batch_sizes: list[int],
    contexts: list[int],
    stage: Stage,
) -> None:
    found, measured.missing = runnable_kernels(backends, stage.device)
    _need(found, measured.missing)
    measured.ceilings = measure_ceilings(stage)
    measured.add(measure_kernels(problems, found, batch_sizes, contexts, measured.ceilings, stage))


def _trees(
    measured: Measured,
    backends: Sequence[type[AttentionBackend]],
    batch_sizes: list[int],
    contexts: list[int],
    stage: Stage,
) -> None:
    found, measured.missing = runnable_kernels(backends, stage.device)
    _need(found, measured.missing)
    measured.add(measure_trees(found, batch_sizes, contexts, stage))


def _ragged(
    measured: Measured,
    backends: Sequence[type[AttentionBackend]],
    batch_sizes: list[int],
    contexts: list[int],
    stage: Stage,
) -> None:
    found, measured.missing = runnable_kernels(backends, stage.device)
    _need(found, measured.missing)
    measured.add(measure_ragged(found, batch_sizes, contexts, stage))


def _mixed(
    measured: Measured,
    backends: Sequence[type[AttentionBackend]],
    batch_sizes: list[int],
    contexts: list[int],
    stage: Stage,
) -> None:
    measured.add(measure_mixed(backends, batch_sizes, contexts, stage))


SETS = {
    "layer": Set(
        _layer,
        DENSE_BACKENDS,
        shapes.BATCH_SIZES,
        shapes.CONTEXTS,
        max(shapes.WIDTHS),
        50,
        f"a layer beside the raw call, device time under graphs; at most {attention.BUDGET}",
        attention.BUDGET,
    ),
    "kernels": Set(
        partial(_kernels, kernels.DECODES),
        (*DENSE_BACKENDS, "dsv4"),
        kernels.BATCH_SIZES,
        kernels.CONTEXTS,
        max(kernels.WIDTHS),
        20,
        "kernels beside each other, device time of a layer under graphs",
    ),
    "prefill": Set(
        partial(_kernels, kernels.PREFILLS),
        (*DENSE_BACKENDS, "dsv4"),
        kernels.PREFILL_BATCH_SIZES,
        kernels.PREFILL_CONTEXTS,
        shapes.MAX_VERIFIED,
        10,
        "kernels beside each other in prefill, device time of a layer under graphs",
    ),
    "trees": Set(
        _trees,
        DENSE_BACKENDS,
        shapes.BATCH_SIZES,
        shapes.CONTEXTS,
        trees.NUM_NODES,
        20,
        f"the verify of a tree beside that of a chain, device time under graphs; at most {trees.BUDGET}",
        trees.BUDGET,
    ),
    "ragged": Set(
        _ragged,
        DENSE_BACKENDS,
        (128,),
        (4096,),
        ragged.BOUND,
        10,
        f"ragged verifies, {ragged.MEAN} of {ragged.BOUND} rows in the mean, beside the best uniform one",
    ),
    "mixed": Set(
        _mixed,
        DENSE_BACKENDS,
        (32, 128),
        (4096,),
        max(ragged.CHUNKS),
        10,
        "a chunk of a prompt with decodes or verifies as one step, beside two, device time under graphs",
    ),
}


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; 1 if a comparison failed, 2 if nothing can be measured here."""
    asked = SETS[args.set or "layer"]
    refuse_options(args, "page_size", "topk")
    results.check_output("--json", args.json)
    batch_sizes, contexts = _sizes(args, asked)
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "benchmarks attention", ["torch sees no CUDA device"], "It times a GPU's kernels."
        )
    backends = [get_backend(name) for name in args.backend or asked.backends]
    rounds = QUICK_ROUNDS if args.quick else asked.rounds
    stage = Stage(torch.device("cuda"), CudaGraph, CudaClock(), rounds)
    with (
        results.Recording(args.json, results.head(args.words, "cuda"), rounds=rounds) as recording,
        recorded(recording, "bench attention") as on_row,
    ):
        measured = Measured(on_row)
        asked.run(measured, backends, batch_sizes, contexts, stage)
    try:
        recording.finish(**_own(measured))
    finally:
        _show(measured, asked)
    if not measured.rows:
        return 2
    return 1 if any(absent.failed for absent in measured.missing) else 0


def _need(found: object, missing: list[Missing]) -> None:
    if not found:
        reasons = [f"{absent.backend}/{absent.kernel}: {absent.reason}" for absent in missing]
        raise BackendUnavailableError("benchmarks attention", reasons)


def _sizes(args: argparse.Namespace, asked: Set) -> tuple[list[int], list[int]]:
    """The batch sizes and contexts to run."""
    batch_sizes = args.batch_size or list(asked.batch_sizes[:2] if args.quick else asked.batch_sizes)
    contexts = args.context or list(asked.contexts[:1] if args.quick else asked.contexts)
    if min(batch_sizes) < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {min(batch_sizes)}")
    if min(contexts) <= asked.width:
        raise ConfigError(f"--context must be over {asked.width}, the query rows of a request; got {min(contexts)}")
    return batch_sizes, contexts


def _own(measured: Measured) -> dict[str, Any]:
    """What the result says besides its rows."""
    own: dict[str, Any] = {"missing": [asdict(absent) for absent in by_reason(measured.missing)]}
    if measured.ceilings is not None:
        own["ceilings"] = asdict(measured.ceilings)
    if measured.reached:
        own["targets"] = [asdict(reached) for reached in measured.reached]
    return own


def _show(measured: Measured, asked: Set) -> None:
    console = output_console()
    console.print(_table(measured.rows, asked))
    if measured.ceilings is not None:
        copy, product = measured.ceilings.copy_tb_per_s, measured.ceilings.matmul_tflop_per_s
        console.print(f"this device copies {copy:.2f} TB/s and multiplies {product:.0f} TFLOP/s")
    for reached in measured.reached:
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: "no target"}[reached.met]
        what = f"{reached.target}: {reached.backend}/{reached.kernel}, {reached.case}"
        console.print(f"{verdict}: {escape(what)}: {reached.value}")
    show_missing(console, measured.missing)


def _table(rows: list[Row], asked: Set) -> Table:
    table = Table(title=asked.title, title_justify="left")
    for column in ("backend", "kernel", "beside"):
        table.add_column(column)
    has_rates = any(isinstance(row, KernelRow) for row in rows)
    for column in ("batch", "context", "heads", "width", "us", "its us", "ratio", *(("TB/s", "TFLOP/s") * has_rates)):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = (row.batch_size, row.context, row.heads, row.width)
        ratio = f"{row.ratio:.3f}"
        if asked.budget is not None:
            ratio = f"[{'green' if row.ratio <= asked.budget else 'red'}]{ratio}[/]"
        rates = (f"{row.tb_per_s:.2f}", f"{row.tflop_per_s:.0f}") if isinstance(row, KernelRow) else ()
        times = (f"{row.us:.1f}", f"{row.peer_us:.1f}", ratio, *rates)
        table.add_row(row.backend, row.kernel, escape(row.peer), *map(str, sizes), *times)
    return table
