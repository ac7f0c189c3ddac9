"""A layer's attention under a graph, against the raw vendor call under a graph.

Both graphs hold one call on each cache of a pool, so that no call finds its cache in L2, and the time of a replay is
divided by their number. Metadata and schedules are made outside of both: what is left is what a layer costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import AttnBackendsError
from benchmarks.peers import PEERS
from benchmarks.rows import Contender, Missing, Row, Stage, missing
from benchmarks.shapes import LAYERS, WIDTHS, Problem, fill_pool, problem
from benchmarks.timing import take_turns
from spec_metadata import StepKind

KINDS = (StepKind.DECODE, StepKind.TARGET_VERIFY)
BUDGET = 1.03  # of the raw call's time
TOLERANCE = 0.02  # of the largest output: the same kernel may split its keys in another way


def contenders(
    backends: Iterable[type[AttentionBackend]], device: torch.device
) -> tuple[list[Contender], list[Missing]]:
    """The vendor kernels that run here and have a raw call to be measured against, and the kernels that don't."""
    found: list[Contender] = []
    absent = []
    for backend in backends:
        for kernel in backend.kernels:
            reasons = [] if kernel.name in PEERS else ["no vendor call to measure it against"]
            reasons += [f"it has no {kind} step" for kind in KINDS if kind not in kernel.capabilities]
            reasons = reasons or kernel.unavailable_reasons(device)
            if reasons:
                absent.append(Missing(backend.name, kernel.name, "", "; ".join(reasons), failed=False))
            else:
                found.append((backend, kernel))
    return found, absent


def measure_attention(
    found: Sequence[Contender], batch_sizes: Sequence[int], contexts: Sequence[int], stage: Stage
) -> Iterator[Row | Missing]:
    """Every kernel on every layer that its backend takes, at every batch size, context and width."""
    for format, layers in LAYERS.items():
        takers = [(backend, kernel) for backend, kernel in found if format in backend.formats]
        for context, batch_size in ((context, bs) for context in contexts for bs in batch_sizes if takers):
            pool = fill_pool(format, batch_size, context, stage.device)
            for layer, width in ((layer, width) for layer in layers for width in WIDTHS):
                asked = problem(pool, layer, width)
                yield from (_measured(backend, kernel, asked, stage) for backend, kernel in takers)


def _measured(backend: type[AttentionBackend], kernel: Kernel, problem: Problem, stage: Stage) -> Row | Missing:
    try:
        return compare(backend, kernel, problem, stage)
    except Exception as error:  # of a vendor, which may raise anything; the others are measured all the same
        return missing(backend, kernel.name, str(problem), error)


def compare(backend: type[AttentionBackend], kernel: Kernel, problem: Problem, stage: Stage) -> Row:
    """Measure a kernel and its peer on a problem; raises if they compute different things."""
    pool, layer = problem.pool, problem.layer
    attend = problem.call(backend, kernel.name)
    peer = PEERS[kernel.name](problem)
    graphs, outputs = [], []
    for call in (attend, peer.call):
        graph = stage.make_graph()
        outputs.append(graph.capture(lambda call=call: [call(cache) for cache in pool.caches][-1]))  # type: ignore[misc]
        graphs.append(graph)
    us, peer_us = take_turns([graph.replay for graph in graphs], stage.rounds, stage.clock)
    check_same(*outputs)
    us, peer_us = us / len(pool.caches), peer_us / len(pool.caches)
    return Row(
        bench="attention",
        backend=backend.name,
        kernel=kernel.name,
        batch_size=pool.batch_size,
        context=pool.context,
        heads=layer.num_heads,
        width=problem.width,
        us=round(us, 2),
        peer=peer.name,
        peer_us=round(peer_us, 2),
        ratio=round(us / peer_us, 4),
    )


def check_same(ours: Tensor, peers: Tensor) -> None:
    """Refuse to compare the times of what computes different things."""
    error, peak = float((ours - peers).abs().max()), float(peers.abs().max())
    if not error <= TOLERANCE * peak:
        raise AttnBackendsError(f"the outputs differ by {error:.3g}, the largest being {peak:.3g}: nothing to compare")
