"""What planning costs an engine that binds its own buffers: graphs that hold nothing but planning.

    python -m benchmarks.plan_graphs --json FILE

Each phase of a cycle (3 drafted tokens, a verify of 4, a draft extend of 4) is captured with `BoundInputs`, for layers
of one shape, so that their kernel's vendor plans along. A row is one graph: of a phase alone, or of the whole cycle.
us: elapsed device time of a replay less that of a graph of one empty kernel, medians of rounds in which all take turns.
kernel_us: the sum of what its kernels take. nodes: kernels, copies and fills. Nothing else is launched by the host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attn_backends import results
from attn_backends.backend import AttentionBackend
from attn_backends.cli.consoles import output_console
from attn_backends.graphs import CudaGraph
from attn_backends.planning.metadata import Metadata
from attn_backends.registry import get_backend
from benchmarks.counts import count_on_cuda
from benchmarks.host import Work
from benchmarks.metadata import NUM_STEPS, PAGE_SIZES, kernels_of, layer_shape
from benchmarks.speculation import CYCLE, PHASES, Batch, Tables, speculative
from benchmarks.timing import CudaClock, take_turns
from spec_metadata import BoundInputs, StepKind

SIZES = ((1, 4096), (32, 4096), (128, 4096), (128, 131072))
CAPACITY_CONTEXT = 131072
ROUNDS = 200


def bound(backend: AttentionBackend, kind: StepKind, batch: Batch) -> Metadata[Any]:
    """A phase of a batch on buffers of an engine's own: lengths, slots and rows, padded as SGLang pads."""
    step = batch.step(kind, exact=False)
    inputs = BoundInputs(step.seq_lens, step.out_cache_loc)
    return backend.capture(step.bucket(), step.paging, inputs, layers=[layer_shape(backend)])


def graphs_of(backend: AttentionBackend, batch: Batch) -> dict[str, CudaGraph]:
    """A graph of each phase's plan, and one of all."""
    metas = {phase: bound(backend, kind, batch) for phase, kind in PHASES.items()}
    held = {phase: (meta,) for phase, meta in metas.items()} | {CYCLE: tuple(metas.values())}

    def plan(name: str) -> None:
        for meta in held[name]:
            backend.refresh(meta)

    return {name: captured(partial(plan, name)) for name in held}


def captured(region: Callable[[], object]) -> CudaGraph:
    """A graph of a region."""
    graph = CudaGraph()
    graph.capture(region)
    return graph


def rows() -> Iterator[dict[str, Any]]:
    """A row of each graph, of all sizes, kernels and backends."""
    device, word = torch.device("cuda"), torch.zeros(1, device="cuda")
    empty = captured(word.zero_)
    for name, page_sizes in PAGE_SIZES.items():
        for page_size in page_sizes:
            capacity = speculative(128, CAPACITY_CONTEXT, page_size, 1, NUM_STEPS)
            tables = Tables.of(capacity, device)
            for kernel in kernels_of(get_backend(name), device):
                chosen = dict.fromkeys(PHASES.values(), kernel.name)
                for batch_size, context in SIZES:
                    backend = get_backend(name)(capacity, tables.geometry, device, kernel=chosen)
                    graphs = graphs_of(backend, Batch(tables, batch_size, context))
                    replays = [graph.replay for graph in graphs.values()]
                    *times, least = take_turns([*replays, empty.replay], ROUNDS, CudaClock())
                    counts = count_on_cuda([Work(lambda: empty_call, replay) for replay in replays])
                    for phase, us, count in zip(graphs, times, counts, strict=True):
                        yield {
                            "backend": name,
                            "kernel": kernel.name,
                            "phase": phase,
                            "page_size": page_size,
                            "batch_size": batch_size,
                            "context": context,
                            "us": round(us - least, 2),
                            "kernel_us": round(count.gpu_us, 2),
                            "nodes": count.launches + count.copies,
                        }


def empty_call() -> None:
    """What the host does beside the graph."""


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    args = parser.parse_args()
    found = []
    for row in rows():
        found.append(row)
        output_console().print(*row.values())
    command = ["python", "-m", "benchmarks.plan_graphs", "--json", str(args.json)]
    results.write(args.json, results.head(command, "cuda"), found)
    return 0


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
