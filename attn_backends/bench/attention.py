"""A layer's attention under a graph, against the raw vendor call under a graph.

Both graphs hold one call on each cache of a pool, so that no call finds its cache in L2, and the time of a replay is
divided by their number. Metadata and schedules are made outside of both: what is left is what a layer costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend
from attn_backends.bench.peers import PEERS
from attn_backends.bench.shapes import LAYERS, WIDTHS, Problem, fill_pool, problem
from attn_backends.bench.timing import Clock, take_turns
from attn_backends.errors import AttnBackendsError, UnsupportedStepError
from attn_backends.graphs import Graph
from attn_backends.kernel import Kernel
from attn_backends.results import without_folders
from spec_metadata import StepKind

KINDS = (StepKind.DECODE, StepKind.TARGET_VERIFY)
BUDGET = 1.03  # of the raw call's time
TOLERANCE = 0.02  # of the largest output: the same kernel may split its keys in another way


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. context: keys of a request. heads: query heads. width: query rows of a request. us: device time
    of the layer. peer: the raw call, peer_us: its time, ratio: us / peer_us.
    """

    bench: str
    backend: str
    kernel: str
    batch_size: int
    context: int
    heads: int
    width: int
    us: float
    peer: str
    peer_us: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Missing:
    """What has no row, and why. case: in words; empty where the whole kernel is missing. failed: neither not here nor
    refused.
    """

    backend: str
    kernel: str
    case: str
    reason: str
    failed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Where to measure. rounds: timed replays of each graph."""

    device: torch.device
    make_graph: Callable[[], Graph]
    clock: Clock
    rounds: int


Contender = tuple[type[AttentionBackend], Kernel]


def contenders(
    backends: Iterable[type[AttentionBackend]], device: torch.device
) -> tuple[list[Contender], list[Missing]]:
    """The vendor kernels that run here and have a raw call to be measured against, and the kernels that don't."""
    found: list[Contender] = []
    missing = []
    for backend in backends:
        for kernel in backend.kernels:
            reasons = [] if kernel.name in PEERS else ["no vendor call to measure it against"]
            reasons += [f"it has no {kind} step" for kind in KINDS if kind not in kernel.capabilities]
            reasons = reasons or kernel.unavailable_reasons(device)
            if reasons:
                missing.append(Missing(backend.name, kernel.name, "", "; ".join(reasons), failed=False))
            else:
                found.append((backend, kernel))
    return found, missing


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
        reason = str(error) if isinstance(error, AttnBackendsError) else f"{type(error).__name__}: {error}"
        reason = without_folders(reason)
        refused = isinstance(error, UnsupportedStepError)
        return Missing(backend.name, kernel.name, in_words(problem), reason, failed=not refused)


def compare(backend: type[AttentionBackend], kernel: Kernel, problem: Problem, stage: Stage) -> Row:
    """Measure a kernel and its peer on a problem; raises if they compute different things."""
    pool, layer = problem.pool, problem.layer
    attend = layer_call(backend, kernel.name, problem)
    peer = PEERS[kernel.name](problem)
    graphs, outputs = [], []
    for call in (attend, peer.call):
        graph = stage.make_graph()
        outputs.append(graph.capture(lambda call=call: [call(cache) for cache in pool.caches][-1]))  # type: ignore[misc]
        graphs.append(graph)
    us, peer_us = take_turns([graph.replay for graph in graphs], stage.rounds, stage.clock)
    _check_same(*outputs)
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


def layer_call(backend: type[AttentionBackend], kernel: str, problem: Problem) -> Callable[..., Tensor]:
    """What an engine does in a layer: `forward` on captured metadata that holds the step."""
    pool, step = problem.pool, problem.step
    made = backend(pool.capacity, pool.geometry, pool.pages.device, kernel={step.kind: kernel})
    meta = made.capture(step.bucket(), step.paging)
    made.replay(meta, step)
    return lambda cache: made.forward(problem.q, cache, meta.at(), problem.layer).out


def in_words(problem: Problem) -> str:
    """A problem as a person would say it."""
    pool = problem.pool
    return f"batch {pool.batch_size}, context {pool.context}, {problem.layer.num_heads} heads, width {problem.width}"


def _check_same(ours: Tensor, peers: Tensor) -> None:
    error, peak = float((ours - peers).abs().max()), float(peers.abs().max())
    if not error <= TOLERANCE * peak:
        raise AttnBackendsError(f"the outputs differ by {error:.3g}, the largest being {peak:.3g}: nothing to compare")
