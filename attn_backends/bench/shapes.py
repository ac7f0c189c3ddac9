"""What the benchmarks run on: layers of published models, full batches, and caches that no L2 holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, PagedCache, PagedKV, PagedLatent
from attn_backends.layer import AttentionLayer
from spec_metadata import BlockTable, CacheGeometry, Capacity, Step
from spec_metadata.capacity import ceil_div

BATCH_SIZES = (1, 32, 128)
CONTEXTS = (4096, 32768)
WIDTHS = (1, 4)  # decode, and the verify of a chain of three drafted tokens
PAGE_SIZE = 64
DTYPE = torch.bfloat16
COLD_BYTES = 256 * 2**20  # several times the L2 of an H200

LAYERS = {
    CacheFormat.LATENT: tuple(AttentionLayer(0, heads, 1, 576, 512, 192**-0.5) for heads in (16, 128)),
    CacheFormat.KV: (AttentionLayer(0, 32, 8, 128, 128, 128**-0.5),),
}  # DeepSeek-V3 on 8 GPUs and on one, Llama-3-8B


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Full requests in shuffled pages.

    context: tokens of each request, the rows of the step included. pages: [batch_size, max_pages] int64.
    caches: one layer's cache each; so many that a layer never finds its own in L2, because the others came between.
    """

    batch_size: int
    context: int
    capacity: Capacity
    geometry: CacheGeometry
    pages: Tensor
    caches: tuple[PagedCache, ...]

    @property
    def table(self) -> BlockTable:
        """The pages as an engine hands them on."""
        return BlockTable(self.pages, self.geometry)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One attention call. width: query rows of a request. q: [batch_size * width, num_heads, head_dim]."""

    pool: Pool
    layer: AttentionLayer
    width: int
    q: Tensor

    @property
    def step(self) -> Step:
        """The step: a decode, or a verify of a chain, whose last row sees the whole context."""
        pool = self.pool
        committed = pool.context - self.width
        lens = torch.full((pool.batch_size,), committed, dtype=torch.int32, device=self.q.device)
        host = {"max_committed": committed, "seq_lens_cpu": [committed] * pool.batch_size}
        if self.width == 1:
            return Step.decode(lens, pool.table, **host)  # type: ignore[arg-type]
        return Step.target_verify(self.width, lens, pool.table, **host)  # type: ignore[arg-type]


def fill_pool(format: CacheFormat, batch_size: int, context: int, device: torch.device) -> Pool:
    """A pool of random tokens, the same for the same arguments on the same device."""
    generator = torch.Generator(device).manual_seed(batch_size + context)
    capacity = Capacity(batch_size, context, PAGE_SIZE, num_steps=max(WIDTHS) - 1, num_draft_tokens=max(WIDTHS))
    geometry = CacheGeometry(1 + batch_size * capacity.max_pages, PAGE_SIZE)
    order = 1 + torch.randperm(geometry.num_pages - 1, generator=generator, device=device)
    layer = LAYERS[format][0]
    entry = (layer.head_dim,) if format is CacheFormat.LATENT else (layer.num_kv_heads, layer.head_dim)

    def tokens() -> Tensor:
        return torch.randn(geometry.num_pages, PAGE_SIZE, *entry, dtype=DTYPE, device=device, generator=generator)

    def cache() -> PagedCache:
        return PagedLatent(tokens(), layer.v_head_dim) if format is CacheFormat.LATENT else PagedKV(tokens(), tokens())

    num_tensors = 1 if format is CacheFormat.LATENT else 2
    num_bytes = num_tensors * geometry.num_slots * math.prod(entry) * DTYPE.itemsize
    caches = tuple(cache() for _ in range(max(1, ceil_div(COLD_BYTES, num_bytes))))
    return Pool(batch_size, context, capacity, geometry, order.view(batch_size, -1), caches)


def problem(pool: Pool, layer: AttentionLayer, width: int) -> Problem:
    """Random queries of a layer on a pool."""
    device = pool.pages.device
    generator = torch.Generator(device).manual_seed(layer.num_heads + width)
    shape = (pool.batch_size * width, layer.num_heads, layer.head_dim)
    return Problem(pool, layer, width, torch.randn(shape, dtype=DTYPE, device=device, generator=generator))
