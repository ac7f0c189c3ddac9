"""A compressed layer's attention over its window and selected entries, in 8-bit pages; without the indexer's part.

Each row has 512 entries of its own, at random among those that it sees, as an indexer leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.backends.dsv4 import DSV4Backend, Selected
from attn_backends.compressed_cache import CompressedCache, EntryPools, FloatPages, Fp8Pages, pool_shapes
from attn_backends.compressed_layer import CompressedLayer, Compressor
from attn_backends.contract.kernel import LayerShape
from attn_backends.kernels import fp8_pages
from benchmarks.shapes import DTYPE, MAX_VERIFIED, Pool, one_step, planned
from spec_metadata import CacheGeometry, Capacity
from spec_metadata.capacity import ceil_div
from spec_metadata.plans.compressed import Compression

HEADS = (64, 16, 128)
PAGE_SIZE = 256
TOPK = 512
WINDOW = DSV4Backend.window
COMPRESSION = Compression(4, overlap=True, indexed=True)
_INDEX_DIM = 128
COLD_BYTES = 128 * 2**20  # twice the L2 of an H200; one row reads so little that more would be many caches
_DISTINCT_PAGES = 64  # pages of random rows, of which all others are copies


@dataclass(frozen=True, slots=True, eq=False)
class CompressedProblem:
    """One attention call. q: [batch_size * width, num_heads, 512]. entry_slots: [batch_size * width, 512] int32."""

    pool: Pool
    layer: CompressedLayer
    width: int
    q: Tensor
    entry_slots: Tensor

    @property
    def num_keys(self) -> int:
        """Window and entries of a row."""
        return min(WINDOW, self.pool.context) + min(TOPK, self.pool.context // COMPRESSION.ratio)

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read or written: the keys of each row, queries and outputs."""
        return self.q.shape[0] * (self.num_keys * fp8_pages.ROW_BYTES + 2 * self.layer.num_heads * 2 * self.q.shape[2])

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of the two products."""
        return 4 * self.q.numel() * self.num_keys

    def call(self, backend: type[DSV4Backend], kernel: str) -> Callable[..., Tensor]:
        """Attention on metadata that holds the step, from selected entries on; cache -> output."""
        made, meta = planned(self.pool, one_step(self.pool, self.width), backend, kernel)
        shape = LayerShape.of(self.layer, DTYPE, self.pool.caches[0].dtype)._replace(variant=(COMPRESSION, TOPK))
        selected = Selected(meta.schedules.planned(0, shape), self.entry_slots)
        launch = made.kernel_of(meta.step.kind).launch
        return lambda cache: launch(self.q, cache, selected, self.layer).out

    def __str__(self) -> str:
        pool = self.pool
        return f"batch {pool.batch_size}, context {pool.context}, {self.layer.num_heads} heads, width {self.width}"


def compressed_problems(
    widths: Sequence[int], batch_size: int, context: int, device: torch.device
) -> Iterator[CompressedProblem]:
    """The problems of a size, which share a pool."""
    pool = _fill_pool(batch_size, context, device, batch_size * min(widths))
    for num_heads, width in ((num_heads, width) for num_heads in HEADS for width in widths):
        generator = torch.Generator(device).manual_seed(num_heads + width)
        shape = (batch_size * width, num_heads, fp8_pages.ROW_DIM)
        q = torch.randn(shape, dtype=DTYPE, device=device, generator=generator)
        yield CompressedProblem(pool, _layer(num_heads, device), width, q, _selection(pool, width, generator))


def _layer(num_heads: int, device: torch.device) -> CompressedLayer:
    """DeepSeek-V4's, with sinks; nothing is stored through its compressors."""
    size = fp8_pages.ROW_DIM
    return CompressedLayer(
        id=0,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=size,
        v_head_dim=size,
        scale=size**-0.5,
        window=WINDOW,
        sinks=torch.zeros(num_heads, device=device),
        compression=COMPRESSION,
        compressor=_compressor(size, device),
        indexer=_compressor(_INDEX_DIM, device),
        index_topk=TOPK,
    )


def _compressor(dim: int, device: torch.device) -> Compressor:
    ones = torch.ones(dim, device=device)
    return Compressor(torch.zeros(COMPRESSION.ratio, 2 * dim, device=device), ones, 1e-6, ones[: fp8_pages.ROPE // 2])


def _fill_pool(batch_size: int, context: int, device: torch.device, num_rows: int) -> Pool:
    """A pool of random rows, the same for the same arguments on the same device, with so many caches that the rows that
    a layer reads are not in L2. num_rows: query rows of a step, at the least.
    """
    capacity = Capacity(batch_size, context, PAGE_SIZE, num_steps=MAX_VERIFIED - 1, num_draft_tokens=MAX_VERIFIED)
    geometry = CacheGeometry(1 + batch_size * capacity.max_pages, PAGE_SIZE)
    generator = torch.Generator(device).manual_seed(batch_size + context)
    order = 1 + torch.randperm(geometry.num_pages - 1, generator=generator, device=device)
    layer = _layer(HEADS[0], device)
    shapes = pool_shapes(geometry, layer, DSV4Backend(capacity, geometry, device).ring(layer))

    def some_pages(name: str) -> Fp8Pages:
        _, per_page, dim = shapes[name]
        rows = torch.randn(_DISTINCT_PAGES * per_page, dim, device=device, generator=generator)
        size = (_DISTINCT_PAGES, fp8_pages.page_bytes(per_page))
        pages = Fp8Pages(torch.zeros(size, dtype=torch.uint8, device=device), per_page)
        pages.write(torch.arange(rows.shape[0], device=device), rows, 0)
        return pages

    def random(some: Fp8Pages) -> Fp8Pages:
        copied = torch.randint(_DISTINCT_PAGES, (geometry.num_pages,), generator=generator, device=device)
        return Fp8Pages(some.data[copied], some.num_rows)

    def unread(name: str, dtype: torch.dtype) -> FloatPages:
        return FloatPages(torch.zeros(1, *shapes[name][1:], dtype=dtype, device=device).expand(shapes[name]))

    index = EntryPools(unread("indexer entries", DTYPE), unread("indexer states", torch.float32))
    states = unread("compressor states", torch.float32)
    rows, entries = some_pages("rows"), some_pages("compressor entries")
    read_by_a_row = (WINDOW + TOPK) * fp8_pages.ROW_BYTES
    caches = tuple(
        CompressedCache(random(rows), EntryPools(random(entries), states), index)
        for _ in range(ceil_div(COLD_BYTES, num_rows * read_by_a_row))
    )
    return Pool(batch_size, context, capacity, geometry, order.view(batch_size, -1), caches)


def _selection(pool: Pool, width: int, generator: torch.Generator) -> Tensor:
    """[batch_size * width, 512] int32: slots of as many entries that a row sees, at random, then -1."""
    device, ratio, per_page = pool.pages.device, COMPRESSION.ratio, PAGE_SIZE // COMPRESSION.ratio
    ends = pool.context - width + 1 + torch.arange(width, device=device)
    num_visible = (ends // ratio).repeat(pool.batch_size).unsqueeze(1)
    most = pool.context // ratio
    order = torch.rand(num_visible.shape[0], most, generator=generator, device=device)
    order = order.masked_fill(torch.arange(most, device=device) >= num_visible, -1.0)
    entry = order.topk(min(TOPK, most)).indices
    slots = pool.pages.repeat_interleave(width, 0).gather(1, entry // per_page) * per_page + entry % per_page
    slots = torch.where(entry < num_visible, slots, -1)
    return torch.nn.functional.pad(slots, (0, TOPK - slots.shape[1]), value=-1).int()
