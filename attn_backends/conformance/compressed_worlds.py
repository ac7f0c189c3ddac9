"""Engines in small with one layer of compressed keys: a window of tokens alone, or with entries for blocks of them.

A kind of layer is tested at a time: "window" has no entries, "selected" has those of short overlapping blocks that an
indexer selects, and "entries" has all those of longer blocks. "tokens" and "pairs" have those of one and of two tokens
that an indexer selects, as DeepSeek-V4.1's layers do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.compressed_cache import (
    CompressedCache,
    CompressedFormat,
    EntryPools,
    FloatPages,
    Fp8Pages,
    Pages,
    pool_shapes,
)
from attn_backends.compressed_layer import CompressedLayer, Compressor
from attn_backends.conformance.compressed_oracle import DATA, SCALES, TAIL, TILE, TILES, quantised, unpadded
from attn_backends.conformance.sizes import SMALL, size_of
from attn_backends.conformance.worlds import (
    SCALE,
    Setup,
    World,
    aligned,
    head_sizes,
    memory_of,
    query_heads,
)
from attn_backends.contract.kernel import Kernel
from spec_metadata.plans.compressed import Compression

LAYERS = ("window", "selected", "entries")
BLOCK_LAYER = "window"  # the kind that drafts blocks, as DeepSeek-V4.1's do
WINDOW = 3
COMPRESSIONS = (Compression(2, overlap=True, indexed=True), Compression(4))
SHORT_LAYERS = ("tokens", "pairs")
SHORT = (Compression(1, indexed=True), Compression(2, indexed=True))  # DeepSeek-V4.1's
REAL_PAGE = 256  # a world of such pages has the backend's own window and ratios
INDEX_DIM = 6
INDEX_HEADS = 16  # with few, scores tie at zero
ROPE, ALIGNMENT = 4, 64
EPS, INDEX_EPS = 0.02, 0.05  # of the norms of a compressor and of an indexer, so large that it shows which was taken
ROW_DIM = TILE * TILES + TAIL  # of the 8-bit format


@cache
def small(
    backend: type[AttentionBackend], compressions: tuple[Compression, ...] = COMPRESSIONS
) -> type[AttentionBackend]:
    """A backend with a window and ratios so small that a few tokens cross all their edges."""
    return type(f"Small{backend.__name__}", (backend,), {"window": WINDOW, "compressions": compressions})


def is_compressed(backend: type[AttentionBackend]) -> bool:
    """Whether a backend's caches are those of compressed keys."""
    formats: frozenset[Any] = backend.formats
    return CompressedFormat.COMPRESSED in formats


@dataclass(frozen=True)
class Pool:
    """A pool's place in the memory of a page: bytes first to last. dtype: of shape [rows of a page, elements]; None for
    the 8-bit format.
    """

    first: int
    last: int
    shape: tuple[int, int]
    dtype: torch.dtype | None


class CompressedWorld(World):
    """An engine with one compressed layer. memory: [num_pages, bytes] uint8, all pools of a page in its row."""

    layer: CompressedLayer

    def _make_memory(self, kernel: Kernel) -> None:
        dtype = self.setup.cache_dtype or self.setup.dtype
        self.is_fp8, self.state_dtype = dtype is torch.float8_e4m3fn, state_dtype(self.setup)
        self.entry_dtype = torch.bfloat16 if self.is_fp8 else dtype
        self.layer = compressed_layer(self.setup, kernel)
        self.ring: int = self.backend.ring(self.layer)  # type: ignore[attr-defined]
        self.places = self._places()
        num_bytes = aligned(max(pool.last for pool in self.places.values()))
        size = (self.geometry.num_pages, num_bytes)
        self.memory = memory_of(self.setup, torch.uint8, size, self.device, self.entry_dtype.itemsize)
        self.cache = self.cache_as(self.entry_dtype)

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Elements of all that a token gives the layer: its row, then values and gates of each compressor."""
        parts = [part for part in (self.layer.compressor, self.layer.indexer) if part is not None]
        return (self.layer.head_dim + sum(2 * part.channels for part in parts),)

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """[..., dim] parts of tokens [..., token_shape] by name."""
        widths = {"row": self.layer.head_dim}
        for name, part in (("compressor", self.layer.compressor), ("indexer", self.layer.indexer)):
            if part is not None:
                widths |= {f"{name} values": part.channels, f"{name} gates": part.channels}
        return dict(zip(widths, vectors.split(list(widths.values()), dim=-1), strict=True))

    def pools(self, memory: Tensor) -> dict[str, Tensor]:
        """Views of a memory: [num_pages, rows of a page, elements], or [num_pages, bytes] in the 8-bit format."""
        found = {}
        for name, pool in self.places.items():
            part = memory[:, pool.first : pool.last]
            found[name] = part if pool.dtype is None else part.view(pool.dtype).unflatten(1, pool.shape)
        return found

    def cache_as(self, dtype: torch.dtype) -> Any:
        """The memory as a cache; a copy, if rows and entries are to be of another type."""
        pools = self.pools(self.memory)

        def pages(name: str) -> Pages:
            if self.places[name].dtype is None:
                return Fp8Pages(pools[name], self.places[name].shape[0])
            return FloatPages(pools[name].to(dtype))

        def pair(name: str) -> EntryPools | None:
            if f"{name} states" not in pools:
                return None
            return EntryPools(pages(f"{name} entries"), FloatPages(pools[f"{name} states"]))

        return CompressedCache(pages("rows"), pair("compressor"), pair("indexer"))

    def store(self, given: Any, at: Any, layer: Any = None, cache: Any = None) -> None:
        """As `World.store`."""
        self.backend.store(given.stored, cache or self.cache, at, layer or self.layer)

    def attend(self, given: Any, at: Any, layer: Any = None, cache: Any = None) -> Any:
        """As `World.attend`."""
        backend: Any = self.backend
        layer = layer or self.layer
        return self.told(backend.forward(given.q, cache or self.cache, at, layer, given.index), at, layer)

    def tokens_in(self, memory: Tensor) -> Tensor:
        """As `World.tokens_in`, the rows, as they are or their bytes."""
        pool, (size, _) = self.pools(memory)["rows"], self.places["rows"].shape
        if self.places["rows"].dtype is not None:
            return pool.flatten(0, 1)
        data, scales, _ = unpadded(pool, size).tensor_split((size * DATA, size * (DATA + SCALES)), dim=1)
        return torch.cat((data.unflatten(1, (size, DATA)), scales.unflatten(1, (size, SCALES))), dim=-1).flatten(0, 1)

    def token_of(self, vector: Tensor) -> Tensor:
        """As `World.token_of`. vector: [token_shape]."""
        row, dtype = self.split(vector)["row"], self.places["rows"].dtype
        return torch.cat(quantised(row), dim=-1) if dtype is None else row.to(dtype)

    def _places(self) -> dict[str, Pool]:
        """Where the pools lie in a page's bytes."""
        found, first = {}, 0
        for name, (_, *rows) in pool_shapes(self.geometry, self.layer, self.ring).items():
            shape, dtype = (rows[0], rows[1]), self.state_dtype if "states" in name else self.entry_dtype
            is_fp8 = self.is_fp8 and name in ("rows", "compressor entries")
            num_bytes = shape[0] * (shape[1] * dtype.itemsize)
            if is_fp8:
                num_bytes = -(-shape[0] * (DATA + SCALES) // DATA) * DATA
            found[name] = Pool(first, first + num_bytes, shape, None if is_fp8 else dtype)
            first += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return found


def state_dtype(setup: Setup) -> torch.dtype:
    """The type of the states, and of a layer's parameters."""
    return torch.float64 if setup.dtype is torch.float64 else torch.float32


def compressed_layer(setup: Setup, kernel: Kernel) -> CompressedLayer:
    """A layer of the setup's kind with random parameters, the same for all types and devices."""
    backend: Any = setup.backend
    own: tuple[Compression, ...] = backend.compressions
    is_fp8 = setup.cache_dtype is torch.float8_e4m3fn
    size, sizes = size_of(setup.size), head_sizes(backend, kernel, setup.format, setup.size)
    heads, most = query_heads(kernel), size.heads[1]
    dim = ROW_DIM if is_fp8 else sizes[0] if sizes else size.dim
    num_heads = most if heads is None or most in heads else min(heads)
    kinds = dict(zip(SHORT, SHORT_LAYERS, strict=True))
    named = {kinds.get(each, "selected" if each.indexed else "entries"): each for each in own}
    compression = None if setup.layer == "window" else named[setup.layer or "entries"]
    rng = torch.Generator().manual_seed(6)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(setup.device, state_dtype(setup))

    def compressor(dim: int, rope: int, eps: float) -> Compressor:
        assert compression is not None
        bias = draw(compression.ratio, dim * (2 if compression.overlap else 1))
        inv_freq = 0.9 ** torch.arange(rope // 2, device=setup.device, dtype=state_dtype(setup))
        return Compressor(bias, 1 + 0.3 * draw(dim), eps, inv_freq)

    indexed = compression is not None and compression.indexed
    return CompressedLayer(
        id=0,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=dim,
        v_head_dim=dim,
        scale=SCALE * (SMALL.dim / dim) ** 0.5,
        window=backend.window,
        sinks=torch.linspace(-1.0, 2.0, num_heads, device=setup.device).round(decimals=1),
        compression=compression,
        compressor=compressor(dim, TAIL if is_fp8 else ROPE, EPS) if compression else None,
        indexer=compressor(INDEX_DIM, ROPE, INDEX_EPS) if indexed else None,
        index_topk=3 if indexed else 0,
    )
