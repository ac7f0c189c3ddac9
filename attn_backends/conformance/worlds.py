"""Engines in small: a capacity, cache memory, a request-to-token table and a backend, made by the suite's own code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache, PagedKV, PagedLatent
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.conformance.sizes import HEAD_DIM, RANK, ROPE, size_of
from attn_backends.contract.capabilities import DTYPES, Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import ConfigError
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata import BlockTable, CacheGeometry, Capacity, Paging, RequestTable, StepKind

SCALE = 0.37

AnyFormat = CacheFormat | CompressedFormat


@dataclass(frozen=True)
class Setup:
    """The setup of a world: backend, cache and arithmetic.

    topk: above 1, the world drafts trees. dtype: of queries. cache_dtype: of the cache, None for that of queries; an
    8-bit float comes with scales. checking: of the backend. kernel, device: what runs, and where. index: type of the
    table and of pages. far: half of the pages lie past 2**31 elements of the cache. layer: of a compressed format, what
    its layer attends to (`compressed_worlds.LAYERS`). size: of the world, as `sizes.size_of` takes it.
    """

    backend: type[AttentionBackend]
    format: AnyFormat
    page_size: int
    topk: int = 1
    dtype: torch.dtype = torch.float64
    block_table: bool = False
    checking: bool = True
    kernel: str = "torch"
    device: str = "cpu"
    index: torch.dtype = torch.int32
    far: bool = False
    cache_dtype: torch.dtype | None = None
    layer: str = ""
    size: str = ""

    def __str__(self) -> str:
        table = "block_table" if self.block_table else "request_table"
        return f"{self.backend.name}-{self.format}-page{self.page_size}-topk{self.topk}-{table}"


def planner_of(kernel: str) -> str:
    """The planner for a kernel: the definition for the torch kernels, the engines' own for others."""
    return "torch" if kernel == "torch" else "auto"


class World:
    """An engine with one layer. memory: [num_pages, page_size, 2, kv_heads, dim]; a latent cache uses half of it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = torch.device(setup.device)
        self.size = size_of(setup.size)
        self.capacity = capacity_of(setup.page_size, setup.topk, setup.size)
        self.max_pages = self.size.row_pages(setup.page_size, setup.topk) + self.size.spare_pages
        num_pages = self.size.cache_pages(setup.page_size, setup.topk)
        self.geometry = CacheGeometry(num_pages, setup.page_size, reserved_page=2, reserved_row=1)
        kernel = next(kernel for kernel in setup.backend.kernels if kernel.name == setup.kernel)
        kernels = dict.fromkeys(kernel.capabilities, kernel.name)
        self.backend = setup.backend(
            self.capacity,
            self.geometry,
            self.device,
            kernel=kernels,
            planner=planner_of(kernel.name),
            checking=setup.checking,
        )
        self._make_memory(kernel)
        row_tokens = self.max_pages * setup.page_size
        self.table = torch.zeros(self.size.max_bs + 3, row_tokens, dtype=setup.index, device=self.device)

    def _make_memory(self, kernel: Kernel) -> None:
        setup = self.setup
        assert isinstance(setup.format, CacheFormat), "compressed keys have a world of their own"
        sizes = head_sizes(setup.backend, kernel, setup.format, setup.size)
        self.layer, shape = layer_of(setup.format, sizes, query_heads(kernel), setup.size)
        if setup.cache_dtype is not None:
            self.layer = scaled_to_fill(self.layer, setup.cache_dtype)
        size = (self.geometry.num_pages, setup.page_size, 2, *shape)
        self.memory = memory_of(setup, setup.cache_dtype or setup.dtype, size, self.device)
        self.cache = self.cache_as(self.memory.dtype)

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's vectors in a scene: [planes, kv_heads, dim]."""
        return tuple(self.memory.shape[2:])

    def cache_as(self, dtype: torch.dtype) -> Any:
        """The memory as a cache; a copy, if entries are to be of another type."""
        assert isinstance(self.setup.format, CacheFormat)
        return view_of(self.memory.to(dtype), self.setup.format, self.layer.v_head_dim)

    def store(self, given: Any, at: ForwardMetadata, layer: Any = None, cache: Any = None) -> None:
        """Store what a model hands to a forward, in this world's layer and cache or in others."""
        self.backend.store(given.stored, cache or self.cache, at, layer or self.layer)

    def attend(self, given: Any, at: ForwardMetadata, layer: Any = None, cache: Any = None) -> AttentionOutput:
        """Attend with what a model hands to a forward, in this world's layer and cache or in others."""
        layer = layer or self.layer
        return self.told(self.backend.forward(given.q, cache or self.cache, at, layer), at, layer)

    def told(self, output: AttentionOutput, at: ForwardMetadata, layer: Any) -> AttentionOutput:
        """The output with a log-sum-exp of zeros where its kernel declares none: it may give anything for one."""
        if at.kind is StepKind.IDLE or self.returns_lse(at.kind, layer, in_parts=at.tree is not None):
            return output
        return AttentionOutput(output.out, torch.zeros_like(output.out[..., 0]))

    def returns_lse(self, kind: StepKind, layer: Any, *, in_parts: bool) -> bool:
        """Whether a layer's output has a log-sum-exp. in_parts: drafted tokens are joined to a prefix, of a tree or, on
        a backend of prefixes only, of a drafted chain; the join counts the sinks.
        """
        return self.declared(kind).lse_of(layer, is_tree=in_parts) is not None

    def declared(self, kind: StepKind) -> Capabilities:
        """The declared capabilities of a step kind's kernel."""
        return self.backend.kernel_of(kind).capabilities[kind]

    def entries(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Cache entries of tokens: keys and values divided by their scales and rounded to the cache's type.

        vectors: [num_tokens, planes, kv_heads, dim]. Returns [num_tokens, kv_heads, head_dim] and [..., v_head_dim].
        """
        dtype, v_plane = self.memory.dtype, 1 if self.setup.format is CacheFormat.KV else 0
        exact = vectors.to(torch.float64 if self.setup.dtype is torch.float64 else torch.float32)
        keys, values = (
            exact[:, 0] / self.layer.k_scale,
            exact[:, v_plane, :, : self.layer.v_head_dim] / self.layer.v_scale,
        )
        limit = torch.finfo(dtype).max
        return keys.clamp(-limit, limit).to(dtype), values.clamp(-limit, limit).to(dtype)

    def tokens_in(self, memory: Tensor) -> Tensor:
        """[num_slots, elements] what the slots of a memory hold of a token: its key, and its value where it has one."""
        planes = memory.flatten(0, 1)
        return self._joined(planes[:, 0], planes[:, 1, :, : self.layer.v_head_dim])

    def _joined(self, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, elements] keys, and values where they are no part of them."""
        parts = (keys, values) if self.setup.format is CacheFormat.KV else (keys,)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def token_of(self, vector: Tensor) -> Tensor:
        """Contents of a token's slot, as of `tokens_in`. vector: [planes, kv_heads, dim]."""
        return self._joined(*self.entries(vector.unsqueeze(0)))[0]

    def write(self, memory: Tensor, slots: Tensor, vectors: Tensor) -> None:
        """Put tokens into slots of a cache's memory. slots: [num_tokens]. vectors: as of `entries`."""
        keys, values = (x.to(self.device) for x in self.entries(vectors))
        page_size = self.geometry.page_size
        pages, offsets = (slots // page_size).to(self.device), (slots % page_size).to(self.device)
        if memory.dtype.itemsize == 1:
            memory, keys, values = (x.view(torch.uint8) for x in (memory, keys, values))
        memory[pages, offsets, 0] = keys
        if self.setup.format is CacheFormat.KV:
            memory[pages, offsets, 1, :, : values.shape[-1]] = values

    def read(self, keys: Tensor, values: Tensor, precision: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Entries as attention sees them. precision: that 8-bit ones are multiplied by their scale in (None: exact)."""
        dtype = torch.float64 if precision in (None, torch.float64) else torch.float32
        found = keys.to(dtype) * self.layer.k_scale, values.to(dtype) * self.layer.v_scale
        if precision is None or self.setup.cache_dtype is None:
            return found
        return found[0].to(precision).to(dtype), found[1].to(precision).to(dtype)

    def paging(self, rows: Tensor | None = None) -> Paging:
        """The paging that a graph is captured on; with rows, of a batch of the request table."""
        if self.setup.block_table:
            return BlockTable(torch.zeros(0, self.max_pages, dtype=self.setup.index, device=self.device), self.geometry)
        rows = torch.zeros(0, dtype=torch.int64, device=self.device) if rows is None else rows
        return RequestTable(self.table, rows, self.geometry)


def head_sizes(
    backend: type[AttentionBackend], kernel: Kernel, format: AnyFormat, size: str = ""
) -> tuple[int, int] | None:
    """The smallest sizes that a kernel declares for a format, in a larger world the largest or those that its size
    names; None if it declares none: it takes any, or refuses the format.
    """
    sizes, named = sizes_of(backend, kernel, format), size_of(size).declared
    if not sizes:
        return None
    if named:
        return next(each for each in sorted(sizes) if each[0] == named)
    return max(sizes) if size else min(sizes)


def sizes_of(backend: type[AttentionBackend], kernel: Kernel, format: AnyFormat) -> frozenset[tuple[int, int]] | None:
    """The sizes that a kernel declares for a format, perhaps none; None if it takes any.

    Where a backend reads caches of both formats, keys longer than values are those of latents.
    """
    declared = [known.head_sizes for known in kernel.capabilities.values() if known.head_sizes is not None]
    if not declared:
        return None
    common = frozenset.intersection(*declared)
    if len(backend.formats) == 1:
        return common
    return frozenset(sizes for sizes in common if (sizes[0] > sizes[1]) == (format is CacheFormat.LATENT))


def query_heads(kernel: Kernel) -> frozenset[int] | None:
    """The numbers of query heads that a kernel declares; None if it takes any."""
    declared = [known.query_heads for known in kernel.capabilities.values() if known.query_heads is not None]
    return frozenset.intersection(*declared) if declared else None


def memory_of(setup: Setup, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, unit: int = 1) -> Tensor:
    """Cache memory of a shape, pages first; of far pages only what is touched is ever backed by real memory.

    unit: elements that make one of the cache's, where memory is bytes.
    """
    if not setup.far:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_pages, stride = shape[0], aligned(-(-(2**31) // (shape[0] // 2)) * unit)
    inner = torch.empty(shape[1:], device="meta").stride()
    return torch.empty(num_pages * stride, dtype=dtype, device=device).as_strided(shape, (stride, *inner)).zero_()


def aligned(elements: int) -> int:
    """As many, rounded up to what any kernel can load at once, and to rows of the 8-bit page format."""
    return -(-elements // 2304) * 2304


@cache
def capacity_of(page_size: int, topk: int, size: str = "") -> Capacity:
    """A capacity whose context and draft room together fill their last page exactly."""
    known = size_of(size)
    room = known.room(topk)
    nodes = known.nodes or room
    context = known.row_pages(page_size, topk) * page_size - room
    return Capacity(known.max_bs, context, page_size, topk, known.num_steps, num_draft_tokens=nodes)


def layer_of(
    format: CacheFormat,
    sizes: tuple[int, int] | None = None,
    heads: frozenset[int] | None = None,
    size: str = "",
) -> tuple[AttentionLayer, tuple[int, int]]:
    """A layer, and [kv_heads, dim] of its cache entries. sizes: of a query-key and a value head, heads: numbers of
    query heads to choose from; None allows any. The scale keeps scores as far apart whatever the sizes.
    """
    known = size_of(size)
    if format is CacheFormat.KV:
        (num_heads, _), (num_kv_heads, dim) = known.heads, known.kv
        default, unit = (dim, dim), HEAD_DIM
    else:
        (_, num_heads), num_kv_heads, (rank, rope) = known.heads, 1, known.latent
        default, unit = (rank + rope, rank), RANK + ROPE
    head_dim, v_head_dim = sizes or default
    if heads is not None:
        able = sorted(each for each in heads if each % num_kv_heads == 0) or sorted(heads)
        num_heads = next((each for each in able if each >= num_heads), able[-1])
        num_kv_heads = gcd(num_heads, num_kv_heads)
    scale = SCALE * (unit / head_dim) ** 0.5
    return AttentionLayer(0, num_heads, num_kv_heads, head_dim, v_head_dim, scale), (num_kv_heads, head_dim)


def scaled_to_fill(layer: AttentionLayer, dtype: torch.dtype) -> AttentionLayer:
    """A layer whose scales let random entries fill an 8-bit float's range, the largest of them overflow it."""
    k_scale = 2.2 / torch.finfo(dtype).max
    return replace(layer, k_scale=k_scale, v_scale=k_scale if layer.num_kv_heads == 1 else 1.3 * k_scale)


def with_extra(layer: AttentionLayer, extra: str, setup: Setup) -> AttentionLayer:
    """A layer with a sliding window, attention sinks, or scaled keys and values (one scale for latents); several are
    joined by "+", a window may have a size, and sinks a type: "window=16+sinks=float32". Else sinks are bfloat16 beside
    queries of 16 bits, as models have them, and float32 beside others: the same numbers in all types.
    """
    for part in extra.split("+"):
        name, _, size = part.partition("=")
        match name:
            case "window":
                layer = replace(layer, window=int(size or 5))
            case "sinks":
                sinks = torch.linspace(-4.0, 8.0, layer.num_heads, device=setup.device).round() / 4
                name = size or ("bfloat16" if setup.dtype.itemsize == 2 else "float32")
                layer = replace(layer, sinks=sinks.to(DTYPES[name]))
            case "kv_scales":
                layer = replace(layer, k_scale=0.5, v_scale=0.5 if layer.num_kv_heads == 1 else 2.0)
            case _:
                raise ConfigError(f"{part!r} is no extra of a layer; there are window, sinks and kv_scales")
    return layer


def view_of(memory: Tensor, format: CacheFormat, v_head_dim: int | None = None) -> PagedCache:
    """A strided view of the memory as a cache. v_head_dim: leading elements that are values (default: those of
    `layer_of`).
    """
    if format is CacheFormat.KV:
        return PagedKV(memory[:, :, 0], memory[:, :, 1, :, :v_head_dim])
    return PagedLatent(memory[:, :, 0, 0], RANK if v_head_dim is None else v_head_dim)
