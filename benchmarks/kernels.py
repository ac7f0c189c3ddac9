"""Every kernel that runs here, the vendors' and ours, on every problem; beside each other and the device's ceilings.

All kernels of a backend take turns on the same caches. A kernel of ours is compared with the first of its backend's
vendor kernels that runs; that one, and ours where none does, with a copy that moves as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import AttnBackendsError
from attn_backends.graphs import Graph
from attn_backends.layer import AttentionLayer
from attn_backends.selection.providers import VENDOR_KERNELS
from benchmarks.attention import check_same
from benchmarks.ceilings import Ceilings
from benchmarks.compressed import compressed_problems
from benchmarks.rows import KernelRow, Missing, Stage, missing
from benchmarks.shapes import dense_problems, prefill_widths
from benchmarks.timing import take_turns

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (1024, 4096, 8192, 32768, 131072)
WIDTHS = (1, 4, 8, 16)
PREFILL_BATCH_SIZES = (1, 8)
PREFILL_CONTEXTS = (1024, 8192, 32768)
TURNS_US = 1e5  # of all kernels on a problem together, if that leaves MIN_ROUNDS
MIN_ROUNDS = 3
TORCH = "torch"  # no engine runs it on a GPU


class Problem(Protocol):
    """What is measured: attention on one of the caches of a pool."""

    @property
    def pool(self) -> Any:
        """Its requests and caches."""

    @property
    def layer(self) -> AttentionLayer:
        """The layer."""

    @property
    def width(self) -> int:
        """Query rows of a request."""

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read or written."""

    @property
    def num_operations(self) -> int:
        """Multiplications and additions."""

    def call(self, backend: Any, kernel: str) -> Callable[..., Tensor]:
        """The attention of a kernel: cache -> output."""


Problems = Mapping[Any, Callable[[int, int, torch.device], Iterator[Any]]]  # of a format, a batch size and a context


def _prefills(make: Callable[..., Iterator[Any]], batch_size: int, context: int, device: torch.device) -> Iterator[Any]:
    widths = prefill_widths(batch_size, context)
    return make(widths, batch_size, context, device) if widths else iter(())


_MAKE: Mapping[Any, Callable[..., Iterator[Any]]] = {
    CacheFormat.LATENT: partial(dense_problems, CacheFormat.LATENT),
    CacheFormat.KV: partial(dense_problems, CacheFormat.KV),
    CompressedFormat.COMPRESSED: compressed_problems,
}
DECODES: Problems = {format: partial(make, WIDTHS) for format, make in _MAKE.items()}
PREFILLS: Problems = {format: partial(_prefills, make) for format, make in _MAKE.items()}

Runnable = Mapping[type[AttentionBackend], Sequence[Kernel]]


def runnable_kernels(
    backends: Iterable[type[AttentionBackend]], device: torch.device
) -> tuple[Runnable, list[Missing]]:
    """The kernels of each backend but torch that run here, and those that don't."""
    found: dict[type[AttentionBackend], list[Kernel]] = {}
    absent = []
    for backend in backends:
        for kernel in (kernel for kernel in backend.kernels if kernel.name != TORCH):
            reasons = kernel.unavailable_reasons(device)
            if reasons:
                absent.append(Missing(backend.name, kernel.name, "", "; ".join(reasons), failed=False))
            else:
                found.setdefault(backend, []).append(kernel)
    return found, absent


def measure_kernels(
    problems: Problems,
    kernels: Runnable,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    ceilings: Ceilings,
    stage: Stage,
) -> Iterator[KernelRow | Missing]:
    """Every kernel on every problem of the formats that its backend takes."""
    for format, make in problems.items():
        takers = {backend: own for backend, own in kernels.items() if format in backend.formats}
        for context, batch_size in ((context, bs) for context in contexts for bs in batch_sizes if takers):
            try:
                yield from _on_a_pool(make(batch_size, context, stage.device), takers, ceilings, stage)
            except torch.OutOfMemoryError as error:
                case = f"batch {batch_size}, context {context} ({format})"
                yield from (missing(backend, "every kernel", case, error) for backend in takers)


def _on_a_pool(
    problems: Iterator[Problem], takers: Runnable, ceilings: Ceilings, stage: Stage
) -> Iterator[KernelRow | Missing]:
    """Every kernel on problems that share a pool, which nothing holds any more afterwards."""
    for problem in problems:
        for backend, own in takers.items():
            yield from compare_kernels(backend, own, problem, ceilings, stage)


def compare_kernels(
    backend: type[AttentionBackend], kernels: Sequence[Kernel], problem: Problem, ceilings: Ceilings, stage: Stage
) -> Iterator[KernelRow | Missing]:
    """Measure kernels of a backend on a problem."""
    captured: dict[str, Captured] = {}
    for kernel in kernels:
        try:
            captured[kernel.name] = capture(problem, backend, kernel.name, stage)
        except Exception as error:  # of a vendor, which may raise anything; the others are measured all the same
            yield missing(backend, kernel.name, str(problem), error)
    times = _times({name: each.graph for name, each in captured.items()}, len(problem.pool.caches), stage)
    for name in list(times):
        try:
            check_same(captured[name].output, next(iter(captured.values())).output)
        except AttnBackendsError as error:
            del times[name]
            yield missing(backend, name, str(problem), error)
    vendor = next((name for name in times if name in VENDOR_KERNELS), None)
    for name, us in times.items():
        if vendor is None or name in VENDOR_KERNELS:
            peer, peer_us = "copy", ceilings.copy_us(problem.num_bytes)
        else:
            peer, peer_us = vendor, times[vendor]
        yield _row(backend.name, name, problem, us, peer, peer_us)


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A graph of a kernel's calls, one on each cache of a pool, and the last one's output. call: keeps what the graph
    reads, which a CUDA graph does not.
    """

    graph: Graph
    output: Tensor
    call: Callable[..., Tensor]


def capture(problem: Problem, backend: type[AttentionBackend], kernel: str, stage: Stage) -> Captured:
    """Capture a kernel on a problem."""
    graph, call = stage.make_graph(), problem.call(backend, kernel)
    return Captured(graph, graph.capture(lambda: [call(cache) for cache in problem.pool.caches][-1]), call)


def _times(graphs: Mapping[str, Graph], num_calls: int, stage: Stage) -> dict[str, float]:
    """Median time of a call in each graph, in fewer rounds where calls take long."""
    replays = [graph.replay for graph in graphs.values()]
    round_us = sum(take_turns(replays, 1, stage.clock))
    rounds = max(min(MIN_ROUNDS, stage.rounds), min(stage.rounds, int(TURNS_US / max(round_us, 1.0))))
    return {name: us / num_calls for name, us in zip(graphs, take_turns(replays, rounds, stage.clock), strict=True)}


def _row(backend: str, kernel: str, problem: Problem, us: float, peer: str, peer_us: float) -> KernelRow:
    return KernelRow(
        bench="kernels",
        backend=backend,
        kernel=kernel,
        batch_size=problem.pool.batch_size,
        context=problem.pool.context,
        heads=problem.layer.num_heads,
        width=problem.width,
        us=round(us, 2),
        peer=peer,
        peer_us=round(peer_us, 2),
        ratio=round(us / peer_us, 4),
        tb_per_s=round(problem.num_bytes / us / 1e6, 3),
        tflop_per_s=round(problem.num_operations / us / 1e6, 1),
    )
