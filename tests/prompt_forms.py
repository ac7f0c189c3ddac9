"""Prompts of other head sizes, page sizes and lengths than `benchmarks prefill` has, beside FlashAttention-3.

    python -m tests.prompt_forms --json docs/results/h200/prompt_forms.json

takes a minute, and `--head-dim 192` some seconds for one size of heads. Ours are `gluon` and `triton`. Kernels take
turns, under CUDA graphs. FlashAttention-3 is called directly where `fa3` does not declare the size of heads of it; if
it refuses, the row has its message. A speed that is missed is told, and fails nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_backends import results
from attn_backends.cache import PagedKV
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.registry import get_backend
from attn_backends.vendors.flash_attention import CAPABILITIES
from benchmarks.layers import Captured, capture, check_same
from benchmarks.peers import PEERS
from benchmarks.rows import Stage
from benchmarks.shapes import DTYPE, PAGE_SIZE, Pool, Problem, planned
from benchmarks.timing import CudaClock, take_turns
from spec_metadata import CacheGeometry, Capacity, PackedQuery, Step, StepKind
from spec_metadata.capacity import ceil_div

KERNELS = ("vllm_flash_attn", "gluon", "triton")  # the vendor's, then ours
LEAST = 0.75  # of the vendor's speed
ROUNDS = 10


class Lengths(NamedTuple):
    """New rows of each request, and the tokens before them."""

    name: str
    widths: Sequence[int]
    cached: int = 0


PROMPTS = (Lengths("8 x 8192", [8192] * 8), Lengths("32768", [32768]), Lengths("the last 1024 of 32768", [1024], 31744))
SKEWED = Lengths("16384 and 63 x 512", [16384, *[512] * 63])
FORMS = (
    *(((dim, v_dim), PAGE_SIZE, lengths) for dim, v_dim in ((64, 64), (192, 128), (256, 256)) for lengths in PROMPTS),
    *(((128, 128), page_size, lengths) for page_size in (1, 16) for lengths in PROMPTS),
    ((128, 128), PAGE_SIZE, SKEWED),
    ((256, 256), 16, SKEWED),
)


def pool_of(layer: AttentionLayer, page_size: int, lengths: Lengths, device: torch.device) -> Pool:
    """Random keys and values of the requests, in shuffled pages."""
    bs, context = len(lengths.widths), max(lengths.widths) + lengths.cached
    capacity = Capacity(bs, context, page_size, num_steps=1, num_draft_tokens=2)
    counts = [ceil_div(width + lengths.cached, page_size) for width in lengths.widths]
    geometry = CacheGeometry(1 + sum(counts), page_size)
    pages = torch.zeros(bs, capacity.max_pages, dtype=torch.int64, device=device)
    for row, own in zip(pages, (1 + torch.randperm(sum(counts), device=device)).split(counts), strict=True):
        row[: len(own)] = own

    def tokens(dim: int) -> torch.Tensor:
        return torch.randn(geometry.num_pages, page_size, layer.num_kv_heads, dim, dtype=DTYPE, device=device)

    cache = PagedKV(tokens(layer.head_dim), tokens(layer.v_head_dim))
    return Pool(bs, context, capacity, geometry, pages, (cache,))


def attention(
    pool: Pool, step: Step, layer: AttentionLayer, q: torch.Tensor, kernel: str
) -> Callable[..., torch.Tensor]:
    """The call of a layer; cache -> output. That of a vendor's kernel which does not declare the layer's sizes is the
    vendor's own; its requests have as many rows each.
    """
    declared = CAPABILITIES[StepKind.PREFILL].head_sizes or ()
    if kernel in PEERS and (layer.head_dim, layer.v_head_dim) not in declared:
        return PEERS[kernel](Problem(pool, layer, len(q) // pool.batch_size, q)).call
    made, meta = planned(pool, step, get_backend("fa3"), kernel)
    return lambda cache: made.forward(q, cache, meta.at(), layer).out


def rows(stage: Stage, head_dims: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """A row for each form and kernel of ours. head_dims: elements of a key of the forms; all if there are none."""
    for (dim, v_dim), page_size, lengths in (form for form in FORMS if not head_dims or form[0][0] in head_dims):
        layer = AttentionLayer(0, 32, 8, dim, v_dim, dim**-0.5)
        pool = pool_of(layer, page_size, lengths, stage.device)
        host: Any = {"max_committed": lengths.cached, "seq_lens_cpu": [lengths.cached] * len(lengths.widths)}
        lens = torch.full((len(lengths.widths),), lengths.cached, dtype=torch.int32, device=stage.device)
        step = Step.prefill(PackedQuery.of(list(lengths.widths), stage.device), lens, pool.table, **host)
        q = torch.randn(sum(lengths.widths), 32, dim, dtype=DTYPE, device=stage.device)
        about = {"head_dim": dim, "v_head_dim": v_dim, "page_size": page_size, "prompts": lengths.name}
        found: dict[str, Captured] = {}
        for kernel in KERNELS:
            try:
                found[kernel] = capture(attention(pool, step, layer, q, kernel), pool.caches, stage)
            except Exception as error:  # a vendor may raise anything
                reason = results.without_folders(f"{type(error).__name__}: {error}")[:400]
                yield {**about, "kernel": kernel, "status": "not_run", "reason": reason}
        yield from _compared(about, found, stage)


def _compared(about: dict[str, Any], found: dict[str, Captured], stage: Stage) -> Iterator[dict[str, Any]]:
    """Beside the vendor's kernel, or where it does not run, Triton beside Gluon, of which no speed is asked."""
    us = take_turns([each.graph.replay for each in found.values()], stage.rounds, stage.clock)
    times = dict(zip(found, us, strict=True))
    peer, *others = found
    for kernel in others:
        check_same(found[kernel].output, found[peer].output)
        row = {**about, "kernel": kernel, "us": round(times[kernel], 1), "peer": peer, "peer_us": round(times[peer], 1)}
        speed = times[peer] / times[kernel]
        row["speed"] = round(speed, 3)
        if (peer, kernel) == KERNELS[:2]:
            row |= {"least": LEAST, "status": "met" if speed >= LEAST else "missed"}
        yield row


def main() -> int:
    """Measure, write and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--head-dim", nargs="+", type=int, default=(), metavar="N", help="elements of a key (all)")
    args = parser.parse_args()
    found = list(rows(Stage(torch.device("cuda"), CudaGraph, CudaClock(), ROUNDS), args.head_dim))
    results.write(args.json, results.head(("python", "-m", "tests.prompt_forms", *sys.argv[1:]), "cuda"), found)
    for row in found:
        print(*row.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
