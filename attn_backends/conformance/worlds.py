"""Engines in small: a capacity, cache memory, a request-to-token table and a backend, made by the suite's own code."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache, PagedKV, PagedLatent
from attn_backends.errors import ConfigError
from attn_backends.layer import AttentionLayer
from spec_metadata import BlockTable, CacheGeometry, Capacity, Paging, RequestTable

NUM_STEPS, MAX_BS = 3, 5
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6
MLA_HEADS, RANK, ROPE = 3, 5, 2
SCALE = 0.37


@dataclass(frozen=True)
class Setup:
    """Which backend, on what cache, in what arithmetic.

    topk: above 1, the world drafts trees. checking: of the backend. kernel, device: what runs, and where. index: type
    of the table and of pages. far: half of the pages lie past 2**31 elements of the cache.
    """

    backend: type[AttentionBackend]
    format: CacheFormat
    page_size: int
    topk: int = 1
    dtype: torch.dtype = torch.float64
    block_table: bool = False
    checking: bool = True
    kernel: str = "auto"
    device: str = "cpu"
    index: torch.dtype = torch.int32
    far: bool = False

    def __str__(self) -> str:
        table = "block_table" if self.block_table else "request_table"
        return f"{self.backend.name}-{self.format}-page{self.page_size}-topk{self.topk}-{table}"


class World:
    """An engine with one layer. memory: [num_pages, page_size, 2, kv_heads, dim]; a latent cache uses half of it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = torch.device(setup.device)
        self.capacity = capacity_of(setup.page_size, setup.topk)
        self.max_pages = num_row_pages(setup.page_size, setup.topk)
        num_pages = MAX_BS * self.max_pages + 4
        self.geometry = CacheGeometry(num_pages, setup.page_size, reserved_page=2, reserved_row=1)
        self.backend = setup.backend(
            self.capacity, self.geometry, self.device, kernel=setup.kernel, checking=setup.checking
        )
        self.layer, shape = layer_of(setup.format, self._head_sizes())
        self.memory = memory_of(setup, (num_pages, setup.page_size, 2, *shape), self.device)
        self.cache = view_of(self.memory, setup.format, self.layer.v_head_dim)
        row_tokens = self.max_pages * setup.page_size
        self.table = torch.zeros(MAX_BS + 3, row_tokens, dtype=setup.index, device=self.device)

    def paging(self, rows: Tensor | None = None) -> Paging:
        """The paging that a graph is captured on; with rows, of a batch of the request table."""
        if self.setup.block_table:
            return BlockTable(torch.zeros(0, self.max_pages, dtype=self.setup.index, device=self.device), self.geometry)
        rows = torch.zeros(0, dtype=torch.int64, device=self.device) if rows is None else rows
        return RequestTable(self.table, rows, self.geometry)

    def _head_sizes(self) -> tuple[int, int] | None:
        """The smallest sizes that the kernel declares; None if it takes any."""
        declared = [known.head_sizes for known in self.backend.kernel.capabilities.values() if known.head_sizes]
        return min(frozenset.intersection(*declared)) if declared else None


def memory_of(setup: Setup, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Cache memory of a shape, pages first; of far pages only what is touched is ever backed by real memory."""
    if not setup.far:
        return torch.zeros(shape, dtype=setup.dtype, device=device)
    num_pages, stride = shape[0], -(-(2**31) // (shape[0] // 2))
    inner = torch.empty(shape[1:], device="meta").stride()
    return torch.empty(num_pages * stride, dtype=setup.dtype, device=device).as_strided(shape, (stride, *inner)).zero_()


def capacity_of(page_size: int, topk: int) -> Capacity:
    """A small capacity whose context and draft room together fill their last page exactly."""
    room = draft_room(topk)
    context = num_row_pages(page_size, topk) * page_size - room
    return Capacity(MAX_BS, context, page_size, topk, NUM_STEPS, num_draft_tokens=room)


def draft_room(topk: int) -> int:
    """Tokens that a step may add: all branches at all depths, or a chain of NUM_STEPS with its root."""
    return topk * NUM_STEPS if topk > 1 else NUM_STEPS + 1


def num_row_pages(page_size: int, topk: int) -> int:
    """Pages of a table row."""
    return max(2, -(-(14 + draft_room(topk)) // page_size))


def layer_of(format: CacheFormat, sizes: tuple[int, int] | None = None) -> tuple[AttentionLayer, tuple[int, int]]:
    """A layer, and [kv_heads, dim] of its cache entries. sizes: of a query-key and a value head, if not any will do."""
    if format is CacheFormat.KV:
        head_dim, v_head_dim = sizes or (HEAD_DIM, HEAD_DIM)
        return AttentionLayer(0, HEADS, KV_HEADS, head_dim, v_head_dim, SCALE), (KV_HEADS, head_dim)
    head_dim, v_head_dim = sizes or (RANK + ROPE, RANK)
    return AttentionLayer(0, MLA_HEADS, 1, head_dim, v_head_dim, SCALE), (1, head_dim)


def with_extra(layer: AttentionLayer, extra: str, device: torch.device) -> AttentionLayer:
    """A layer with a sliding window, attention sinks, or scaled keys and values (one scale for latents)."""
    match extra:
        case "window":
            return replace(layer, window=5)
        case "sinks":
            return replace(layer, sinks=torch.linspace(-1.0, 2.0, layer.num_heads, device=device))
        case "kv_scales":
            return replace(layer, k_scale=0.5, v_scale=0.5 if layer.num_kv_heads == 1 else 2.0)
        case _:
            raise ConfigError(f"{extra!r} is no extra of a layer; there are window, sinks and kv_scales")


def view_of(memory: Tensor, format: CacheFormat, v_head_dim: int | None = None) -> PagedCache:
    """A strided view of the memory as a cache. v_head_dim: leading elements that are values (default: those of
    `layer_of`).
    """
    if format is CacheFormat.KV:
        return PagedKV(memory[:, :, 0], memory[:, :, 1, :, :v_head_dim])
    return PagedLatent(memory[:, :, 0, 0], RANK if v_head_dim is None else v_head_dim)
