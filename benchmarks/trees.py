"""The verify of a draft tree beside that of a chain of as many nodes, on the same kernel: what a tree costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.contract.kernel import Kernel
from benchmarks.kernels import Runnable, capture
from benchmarks.rows import Missing, Row, Stage, missing
from benchmarks.shapes import LAYERS, Problem, fill_pool, problem
from benchmarks.timing import take_turns
from spec_metadata import StepKind

TOPK, NUM_NODES = 4, 16
BUDGET = 1.25  # of the chain's time


def measure_trees(
    kernels: Runnable, batch_sizes: Sequence[int], contexts: Sequence[int], stage: Stage
) -> Iterator[Row | Missing]:
    """Every kernel on every dense layer that its backend takes."""
    for format, layers in LAYERS.items():
        takers = _takers(kernels, format)
        for context, batch_size in ((context, bs) for context in contexts for bs in batch_sizes if takers):
            pool = fill_pool(format, batch_size, context, stage.device, [NUM_NODES])
            mask = tree_mask(stage.device).expand(batch_size, -1, -1)
            for chain in (problem(pool, layer, NUM_NODES) for layer in layers):
                tree = replace(chain, tree_mask=mask)
                for backend, kernel in takers:
                    try:
                        yield compare(backend, kernel.name, tree, chain, stage)
                    except Exception as error:  # of a vendor, which may raise anything
                        yield missing(backend, kernel.name, str(chain), error)


def compare(backend: type[AttentionBackend], kernel: str, tree: Problem, chain: Problem, stage: Stage) -> Row:
    """Measure a kernel on a tree and on a chain."""
    both = [capture(each, backend, kernel, stage) for each in (tree, chain)]
    num_calls = len(tree.pool.caches)
    us, chain_us = (
        time / num_calls for time in take_turns([each.graph.replay for each in both], stage.rounds, stage.clock)
    )
    return Row(
        bench="trees",
        backend=backend.name,
        kernel=kernel,
        batch_size=tree.pool.batch_size,
        context=tree.pool.context,
        heads=tree.layer.num_heads,
        width=tree.width,
        us=round(us, 2),
        peer=f"{kernel}, a chain",
        peer_us=round(chain_us, 2),
        ratio=round(us / chain_us, 4),
    )


def tree_mask(device: torch.device) -> Tensor:
    """[nodes, nodes] bool: row sees itself and its ancestors; each node has up to four children, in breadth first."""
    mask = torch.eye(NUM_NODES, dtype=torch.bool)
    for node in range(1, NUM_NODES):
        mask[node] |= mask[(node - 1) // TOPK]
    return mask.to(device)


def _takers(kernels: Runnable, format: CacheFormat) -> list[tuple[type[AttentionBackend], Kernel]]:
    return [
        (backend, kernel)
        for backend, own in kernels.items()
        for kernel in own
        if format in backend.formats and StepKind.TARGET_VERIFY in kernel.capabilities
    ]
