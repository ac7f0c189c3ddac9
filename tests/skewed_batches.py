"""A long request among short ones, beside the vendor's kernel: 131,072 tokens, and 127 of 1,024.

Kernels share keys out among programs. One that divides all requests alike, by the batch's size, leaves the long one to
few programs; FlashMLA's and FlashAttention-3's schedules divide it by its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat
from attn_backends.errors import AttnBackendsError
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.registry import get_backend
from benchmarks.layers import capture, check_same
from benchmarks.rows import Stage
from benchmarks.shapes import LAYERS, PAGE_SIZE, Pool, fill_pool, planned, problem
from benchmarks.timing import CudaClock, take_turns
from spec_metadata import Capacity, Step
from spec_metadata.capacity import ceil_div

LENS, WIDTHS = (131072, *127 * (1024,)), (1, 4)
LEAST = 0.65  # of the vendor's speed
ROUNDS = 10


class Case(NamedTuple):
    """kernels: the vendor's, then ours."""

    backend: str
    layer: AttentionLayer
    kernels: tuple[str, ...]


CASES = (
    Case("trtllm_mla", LAYERS[CacheFormat.LATENT][1], ("flashmla", "gluon", "triton")),
    Case("fa3", LAYERS[CacheFormat.KV][0], ("vllm_flash_attn", "triton")),
)


def rows(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A row for each kernel of ours and width. A speed that is missed is told, and fails nothing."""
    stage = Stage(torch.device(device), CudaGraph, CudaClock(), ROUNDS)
    for case in CASES:
        pool = skewed_pool(case.layer, stage.device)
        for width in WIDTHS:
            yield from _compared(case, pool, width, stage)


def _compared(case: Case, pool: Pool, width: int, stage: Stage) -> Iterator[dict[str, Any]]:
    found, about = {}, {"backend": case.backend, "heads": case.layer.num_heads, "width": width}
    for kernel in case.kernels:
        try:
            found[kernel] = capture(attention(case, pool, width, kernel), pool.caches, stage)
        except AttnBackendsError as error:
            yield {**about, "kernel": kernel, "status": "not_run", "reason": str(error)}
    us = take_turns([each.graph.replay for each in found.values()], stage.rounds, stage.clock)
    times = dict(zip(found, (round(each / len(pool.caches), 2) for each in us), strict=True))
    vendor, *ours = case.kernels
    for kernel in (kernel for kernel in ours if kernel in found and vendor in found):
        check_same(found[kernel].output, found[vendor].output)
        speed = times[vendor] / times[kernel]
        row = {**about, "kernel": kernel, "us": times[kernel], "peer": vendor, "peer_us": times[vendor]}
        yield {**row, "speed": round(speed, 3), "least": LEAST, "status": "met" if speed >= LEAST else "missed"}


def skewed_pool(layer: AttentionLayer, device: torch.device) -> Pool:
    """Pages of requests of `LENS` tokens; past its own a request's row of the table names the reserved page."""
    most = max(2, *WIDTHS)
    capacity = Capacity(len(LENS), max(LENS), PAGE_SIZE, num_steps=most - 1, num_draft_tokens=most)
    counts = [ceil_div(length, PAGE_SIZE) for length in LENS]
    stored = fill_pool(layer, 1, sum(counts) * PAGE_SIZE, device, WIDTHS)
    pages = torch.zeros(len(LENS), capacity.max_pages, dtype=stored.pages.dtype, device=device)
    for row, own in zip(pages, stored.pages[0, : sum(counts)].split(counts), strict=True):
        row[: len(own)] = own
    return Pool(len(LENS), max(LENS), capacity, stored.geometry, pages, stored.caches)


def attention(case: Case, pool: Pool, width: int, kernel: str) -> Callable[..., Tensor]:
    """A decode, or a verify of several rows; cache -> output."""
    committed = [length - width for length in LENS]
    lens = torch.tensor(committed, dtype=torch.int32, device=pool.pages.device)
    host: dict[str, Any] = {"max_committed": max(committed), "seq_lens_cpu": committed}
    step = Step.decode(lens, pool.table, **host) if width == 1 else Step.target_verify(width, lens, pool.table, **host)
    made, meta = planned(pool, step, get_backend(case.backend), kernel)
    q = problem(pool, case.layer, width).q
    return lambda cache: made.forward(q, cache, meta.at(), case.layer).out
