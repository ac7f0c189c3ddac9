"""Problems of the benchmarks: layers of published models, full batches, and caches that no L2 holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache, PagedKV, PagedLatent
from attn_backends.layer import AttentionLayer
from spec_metadata import BlockTable, CacheGeometry, Capacity, PackedQuery, Step, StepKind
from spec_metadata.capacity import ceil_div
from spec_metadata.layout import HostBounds

WIDTHS = (1, 4)  # decode, and the verify of a chain of three drafted tokens
MAX_VERIFIED = 16  # query rows of a verify; more are a prefill
PREFILL_CHUNK = 1024
MAX_PREFILLED = 2**16  # tokens of a batch together
PAGE_SIZE = 64
DTYPE = torch.bfloat16
COLD_BYTES = 256 * 2**20  # several times the L2 of an H200

LAYERS = {
    CacheFormat.LATENT: tuple(AttentionLayer(0, heads, 1, 576, 512, 192**-0.5) for heads in (16, 128)),
    CacheFormat.KV: tuple(AttentionLayer(0, heads, 8, 128, 128, 128**-0.5) for heads in (32, 64)),
}  # DeepSeek-V3 on 8 GPUs and on one; Llama-3-8B and 70B
LLAMA_8_GPUS = AttentionLayer(0, 8, 1, 128, 128, 128**-0.5)  # Llama-3-70B


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
    caches: tuple[Any, ...]

    @property
    def table(self) -> BlockTable:
        """The pages as an engine hands them on."""
        return BlockTable(self.pages, self.geometry)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One attention call. width: query rows of a request. q: [batch_size * width, num_heads, head_dim]. tree_mask:
    [batch_size, width, width] bool, None for a chain.
    """

    pool: Pool
    layer: AttentionLayer
    width: int
    q: Tensor
    tree_mask: Tensor | None = None

    @property
    def step(self) -> Step:
        """The step, whose last row sees the whole context."""
        return one_step(self.pool, self.width, self.tree_mask)

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read or written: keys and values once, queries and outputs."""
        layer, num_rows = self.layer, self.pool.batch_size * self.width
        is_latent = layer.head_dim != layer.v_head_dim
        entry = layer.num_kv_heads * (layer.head_dim + (0 if is_latent else layer.v_head_dim))
        rows = num_rows * layer.num_heads * (layer.head_dim + layer.v_head_dim)
        return (self.pool.batch_size * self.pool.context * entry + rows) * DTYPE.itemsize

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of the two products, of the keys that each row of a chain sees."""
        layer, width = self.layer, self.width
        num_seen = width * self.pool.context - width * (width - 1) // 2
        return 2 * self.pool.batch_size * num_seen * layer.num_heads * (layer.head_dim + layer.v_head_dim)

    def call(self, backend: type[AttentionBackend], kernel: str) -> Callable[..., Tensor]:
        """An engine's call in a layer: `forward` on metadata that holds the step; cache -> output."""
        made, meta = planned(self.pool, self.step, backend, kernel)
        return lambda cache: made.forward(self.q, cache, meta.at(), self.layer).out

    def __str__(self) -> str:
        pool = self.pool
        return f"batch {pool.batch_size}, context {pool.context}, {self.layer.num_heads} heads, width {self.width}"


def planned(pool: Pool, step: Step, backend: Callable[..., Any], kernel: str) -> tuple[Any, Any]:
    """A backend and its metadata of a step, as engines have it: captured, of a prefill eager."""
    table = pool.table
    made = backend(pool.capacity, table.geometry, table.table.device, kernel={step.kind: kernel})
    if step.kind is StepKind.PREFILL:
        return made, made.init_forward_metadata(step)
    meta = made.capture(step.bucket(), step.paging)
    made.replay(meta, step)
    return made, meta


def one_step(pool: Pool, width: int, tree_mask: Tensor | None = None, requests: slice = slice(None)) -> Step:
    """The last tokens of some requests: a decode of one, a verify, or of more than `MAX_VERIFIED` a prefill."""
    pages, committed = pool.pages[requests], pool.context - width
    table = BlockTable(pages, pool.geometry)
    lens = torch.full((len(pages),), committed, dtype=torch.int32, device=pages.device)
    host: HostBounds = {"max_committed": committed, "seq_lens_cpu": [committed] * len(pages)}
    if width == 1:
        return Step.decode(lens, table, **host)
    if width > MAX_VERIFIED:
        return Step.prefill(PackedQuery.of([width] * len(pages), pages.device), lens, table, **host)
    return Step.target_verify(width, lens, table, tree_mask=tree_mask, **host)


def fill_pool(
    layer: AttentionLayer, batch_size: int, context: int, device: torch.device, widths: Sequence[int] = WIDTHS
) -> Pool:
    """A pool of random tokens, the same for the same arguments on the same device. layer: whose keys it
    holds. widths: of the steps; a prefill's keys are read for so many rows that one cache is enough.
    """
    is_prefill = max(widths) > MAX_VERIFIED
    num_drafted, cold_bytes = (2, 0) if is_prefill else (max(2, *widths), COLD_BYTES)
    generator = torch.Generator(device).manual_seed(batch_size + context)
    capacity = Capacity(batch_size, context, PAGE_SIZE, num_steps=num_drafted - 1, num_draft_tokens=num_drafted)
    geometry = CacheGeometry(1 + batch_size * capacity.max_pages, PAGE_SIZE)
    order = 1 + torch.randperm(geometry.num_pages - 1, generator=generator, device=device)
    is_latent = layer.v_head_dim < layer.head_dim
    entry = (layer.head_dim,) if is_latent else (layer.num_kv_heads, layer.head_dim)

    def tokens() -> Tensor:
        return torch.randn(geometry.num_pages, PAGE_SIZE, *entry, dtype=DTYPE, device=device, generator=generator)

    def cache() -> PagedCache:
        return PagedLatent(tokens(), layer.v_head_dim) if is_latent else PagedKV(tokens(), tokens())

    num_tensors = 1 if is_latent else 2
    num_bytes = num_tensors * geometry.num_slots * math.prod(entry) * DTYPE.itemsize
    caches = tuple(cache() for _ in range(max(1, ceil_div(cold_bytes, num_bytes))))
    return Pool(batch_size, context, capacity, geometry, order.view(batch_size, -1), caches)


def problem(pool: Pool, layer: AttentionLayer, width: int) -> Problem:
    """Random queries of a layer on a pool."""
    device = pool.pages.device
    generator = torch.Generator(device).manual_seed(layer.num_heads + width)
    shape = (pool.batch_size * width, layer.num_heads, layer.head_dim)
    return Problem(pool, layer, width, torch.randn(shape, dtype=DTYPE, device=device, generator=generator))


def dense_problems(
    format: CacheFormat, widths: Sequence[int], batch_size: int, context: int, device: torch.device
) -> Iterator[Problem]:
    """The problems of a size, which share a pool."""
    pool = fill_pool(LAYERS[format][0], batch_size, context, device, widths)
    return (problem(pool, layer, width) for layer in LAYERS[format] for width in widths)


def prefill_widths(batch_size: int, context: int) -> list[int]:
    """New tokens of each prompt: the last chunk of it, and all of it, where they are not too many."""
    widths = {min(PREFILL_CHUNK, context), context}
    return sorted(width for width in widths if batch_size * width <= MAX_PREFILLED)
