"""A layer's attention under graphs: beside the vendor's raw call, kernels beside each other, trees beside chains.

Every graph holds one call on each cache of a pool, so that no call finds its cache in L2, and the time of a replay is
divided by their number. Metadata and schedules are made outside of the graphs: what is left is what a layer costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import AttnBackendsError
from attn_backends.graphs import Graph
from attn_backends.selection.providers import VENDOR_KERNELS
from benchmarks.compressed import compressed_problems
from benchmarks.peers import PEERS
from benchmarks.rows import Asked, Missing, Row, Runnable, Stage, compared, each, missing
from benchmarks.shapes import DTYPE, WIDTHS, Problem, dense_problems, prefill_widths
from benchmarks.timing import fewer_rounds, take_turns
from spec_metadata import StepKind

BATCH_SIZES, CONTEXTS = (1, 8, 32, 64, 128, 256), (1024, 4096, 8192, 32768, 131072)  # of kernels
KERNEL_WIDTHS = (1, 4, 8, 16)
NUM_NODES, TOPK = 16, 4  # of a tree
TURNS_US = 1e5  # of all kernels on a problem together
TOLERANCE = 0.02  # of the largest output: the same kernel may split its keys in another way
COPY_BYTES = 2**30  # many times the L2 of an H200
MATMUL_SIZE = 8192

Problems = Mapping[Any, Callable[[int, int, torch.device], Iterator[Any]]]  # of a format, a batch size and a context
Measure = Callable[[type[AttentionBackend], Sequence[Kernel], Any], Iterator[Row | Missing]]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A graph of calls, one on each cache of a pool, and the last one's output. call: keeps what the graph reads, which
    a CUDA graph does not.
    """

    graph: Graph
    output: Tensor
    call: Callable[..., Tensor]


def capture(call: Callable[..., Tensor], caches: Sequence[Any], stage: Stage) -> Captured:
    """Capture a call on every cache."""
    graph = stage.make_graph()
    return Captured(graph, graph.capture(lambda: [call(cache) for cache in caches][-1]), call)


def check_same(ours: Tensor, peers: Tensor) -> None:
    """Refuse to compare the times of what computes different things."""
    error, peak = float((ours - peers).abs().max()), float(peers.abs().max())
    if not error <= TOLERANCE * peak:
        raise AttnBackendsError(f"the outputs differ by {error:.3g}, the largest being {peak:.3g}: nothing to compare")


def _dense(widths: Sequence[int]) -> Problems:
    return {format: partial(dense_problems, format, widths) for format in (CacheFormat.LATENT, CacheFormat.KV)}


def _prefills(make: Callable[..., Iterator[Any]], batch_size: int, context: int, device: torch.device) -> Iterator[Any]:
    widths = prefill_widths(batch_size, context)
    return make(widths, batch_size, context, device) if widths else iter(())


DECODES: Problems = {
    **_dense(KERNEL_WIDTHS),
    CompressedFormat.COMPRESSED: partial(compressed_problems, KERNEL_WIDTHS),
}
PREFILLS: Problems = {
    **{format: partial(_prefills, partial(dense_problems, format)) for format in (CacheFormat.LATENT, CacheFormat.KV)},
    CompressedFormat.COMPRESSED: partial(_prefills, compressed_problems),
}


def everywhere(asked: Asked, found: Runnable, problems: Problems, measure: Measure) -> Iterator[Row | Missing]:
    """Measurements of each backend on the problems of its formats, at every size."""
    for format, make in problems.items():
        takers = {backend: own for backend, own in found.items() if format in backend.formats}
        for size in asked.sizes if takers else ():
            try:
                yield from _on_a_pool(make(size.batch_size, size.context, asked.stage.device), takers, measure)
            except torch.OutOfMemoryError as error:
                yield from (missing(backend, "every kernel", f"{size} ({format})", error) for backend in takers)


def _on_a_pool(problems: Iterable[Any], takers: Runnable, measure: Measure) -> Iterator[Row | Missing]:
    """On problems that share a pool, which nothing holds any more afterwards."""
    for problem in problems:
        for backend, own in takers.items():
            yield from measure(backend, own, problem)


def raw(asked: Asked) -> Iterator[Row | Missing]:
    """Every vendor's kernel beside the vendor's raw call."""
    found, absent = asked.runnable(lambda kernel: [] if kernel.name in PEERS else ["no vendor call to measure beside"])
    yield from absent

    def one(backend: type[AttentionBackend], kernel: str, problem: Problem) -> Row:
        peer = PEERS[kernel](problem)
        calls = problem.call(backend, kernel), peer.call
        ours, theirs = (capture(call, problem.pool.caches, asked.stage) for call in calls)
        us, peer_us = _pair(ours, theirs, problem, asked.stage)
        check_same(ours.output, theirs.output)
        return compared("attention", backend.name, kernel, problem, us, peer.name, peer_us)

    yield from everywhere(
        asked, found, _dense(WIDTHS), lambda backend, own, problem: each(_cases(backend, own, problem), one)
    )


def trees(asked: Asked) -> Iterator[Row | Missing]:
    """The verify of a draft tree beside that of a chain of as many nodes, on the same kernel."""
    found, absent = asked.runnable(
        lambda kernel: [] if StepKind.TARGET_VERIFY in kernel.capabilities else ["it has no verify"]
    )
    yield from absent
    mask = tree_mask(asked.stage.device)

    def one(backend: type[AttentionBackend], kernel: str, chain: Problem) -> Row:
        tree = replace(chain, tree_mask=mask.expand(chain.pool.batch_size, -1, -1))
        both = [capture(each.call(backend, kernel), chain.pool.caches, asked.stage) for each in (tree, chain)]
        us, chain_us = _pair(both[0], both[1], chain, asked.stage)
        return compared("trees", backend.name, kernel, chain, us, f"{kernel}, a chain", chain_us)

    yield from everywhere(
        asked, found, _dense([NUM_NODES]), lambda backend, own, problem: each(_cases(backend, own, problem), one)
    )


def tree_mask(device: torch.device) -> Tensor:
    """[nodes, nodes] bool: row sees itself and its ancestors; each node has up to four children, in breadth first."""
    mask = torch.eye(NUM_NODES, dtype=torch.bool)
    for node in range(1, NUM_NODES):
        mask[node] |= mask[(node - 1) // TOPK]
    return mask.to(device)


def _cases(
    backend: type[AttentionBackend], kernels: Iterable[Kernel], problem: object
) -> Iterator[tuple[type[AttentionBackend], str, object]]:
    return ((backend, kernel.name, problem) for kernel in kernels)


def _pair(ours: Captured, peer: Captured, problem: Any, stage: Stage) -> list[float]:
    """Time of a call of each."""
    times = take_turns([ours.graph.replay, peer.graph.replay], stage.rounds, stage.clock)
    return [us / len(problem.pool.caches) for us in times]


def kernels(asked: Asked, problems: Problems = DECODES) -> Iterator[Row | Missing]:
    """Every kernel, the vendors' and ours, beside each other and the device's ceilings.

    A kernel of ours is compared with the first of its backend's vendor kernels that runs; that one, and ours where none
    does, with a copy that moves as many bytes.
    """
    found, absent = asked.runnable()
    yield from absent
    if found:
        ceilings = asked.own["ceilings"] = measure_ceilings(asked.stage)
        measure = partial(compare_kernels, stage=asked.stage, ceilings=ceilings)
        yield from everywhere(asked, found, problems, measure)


def prefill(asked: Asked) -> Iterator[Row | Missing]:
    """The same of prompts: the last chunk of each, and all of it."""
    yield from kernels(asked, PREFILLS)


def compare_kernels(
    backend: type[AttentionBackend], own: Sequence[Kernel], problem: Any, stage: Stage, ceilings: Mapping[str, float]
) -> Iterator[Row | Missing]:
    """Kernels of a backend on a problem, in turn, in fewer rounds where calls take long."""
    captured: dict[str, Captured] = {}
    for kernel in own:
        try:
            captured[kernel.name] = capture(problem.call(backend, kernel.name), problem.pool.caches, stage)
        except Exception as error:  # of a vendor, which may raise anything; the others are measured all the same
            yield missing(backend, kernel.name, problem, error)
    replays = [each.graph.replay for each in captured.values()]
    rounds = fewer_rounds(replays, stage.rounds, TURNS_US, stage.clock)
    times = dict(zip(captured, take_turns(replays, rounds, stage.clock), strict=True))
    for name in list(times):
        try:
            check_same(captured[name].output, next(iter(captured.values())).output)
        except AttnBackendsError as error:
            del times[name]
            yield missing(backend, name, problem, error)
    vendor = next((name for name in times if name in VENDOR_KERNELS), None)
    copy_us = problem.num_bytes / ceilings["copy_tb_per_s"] / 1e6 * len(problem.pool.caches)
    for name, us in times.items():
        beside = "copy" if vendor is None or name in VENDOR_KERNELS else vendor
        yield _with_rates(backend.name, name, problem, us, beside, times.get(beside, copy_us))


def _with_rates(backend: str, kernel: str, problem: Any, us: float, peer: str, peer_us: float) -> Row:
    """A row with the bytes that it must move and the operations of its two products, by its time."""
    num_calls = len(problem.pool.caches)
    row = compared("kernels", backend, kernel, problem, us / num_calls, peer, peer_us / num_calls)
    tera = num_calls / us / 1e6
    rates = {"tb_per_s": round(problem.num_bytes * tera, 3), "tflop_per_s": round(problem.num_operations * tera, 1)}
    return {**row, **rates}


def measure_ceilings(stage: Stage) -> dict[str, float]:
    """The device's best rates, measured in turn: a copy of memory, reads and writes; a square product in bfloat16."""
    source = torch.ones(COPY_BYTES // 2, dtype=DTYPE, device=stage.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPE, device=stage.device) for _ in range(2))
    graphs = [stage.make_graph(), stage.make_graph()]
    graphs[0].capture(lambda: torch.neg(source, out=target))  # a graph would leave a plain copy to slower engines
    graphs[1].capture(lambda: a @ b)
    copy_us, matmul_us = take_turns([graph.replay for graph in graphs], stage.rounds, stage.clock)
    return {"copy_tb_per_s": 2 * COPY_BYTES / copy_us / 1e6, "matmul_tflop_per_s": 2 * MATMUL_SIZE**3 / matmul_us / 1e6}
