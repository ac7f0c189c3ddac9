"""Layers that tell which slots of the cache a kernel reads.

Queries are zeros, so a kernel gives each row the mean of the values that it sees. A value is one in the element of its
own slot and zero elsewhere, so an element of the mean is above zero exactly if the row sees that slot. A cache of more
slots than values have elements is shown in several passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedKV, PagedLatent
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.compressed_layer import CompressedLayer, Compressor, IndexQuery
from attn_backends.conformance.worlds import head_sizes, query_heads
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import ConfigError
from attn_backends.layer import AttentionLayer
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata import StepKind
from spec_metadata.plans.compressed import Compression

MAX_SLOTS = 1 << 15  # of a cache that is shown
ROWS = 0  # the pool of tokens; others are the entries of a ratio
_SIZES: dict[Any, tuple[int, int]] = {
    CacheFormat.KV: (128, 128),
    CacheFormat.LATENT: (576, 512),
    CompressedFormat.COMPRESSED: (512, 512),
}
_HEADS, _INDEX_HEADS, _INDEX_DIM, _INDEX_GROUP = 16, 64, 128, 64

Write = Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Probe:
    """A layer over a cache of its own, of all slots that metadata may name.

    pools: slots of each pool of the cache by its ratio, 1 for entries of tokens themselves (`ROWS`), and what writes
    [slots, dim] values to it. attend: (forward's metadata, rows) -> outputs [rows, heads, dim].
    """

    layer: AttentionLayer
    pools: Mapping[int, tuple[int, Write]]
    attend: Callable[[ForwardMetadata, int], Tensor]
    device: torch.device

    @property
    def num_places(self) -> int:
        """Slots of all pools."""
        return sum(num for num, _ in self.pools.values())

    def show(self, first: int) -> None:
        """Give each slot its value, of the pass that begins with slot `first` of all pools."""
        elements = torch.arange(self.layer.v_head_dim, device=self.device) + first
        start = 0
        for num, write in self.pools.values():
            places = torch.arange(start, start + num, device=self.device)
            write((places.unsqueeze(1) == elements).float())
            start += num

    def named(self, places: Counter[int]) -> dict[int, Counter[int]]:
        """Slots of each pool by its ratio. places: numbers of slots of all pools."""
        found: dict[int, Counter[int]] = {}
        start = 0
        for ratio, (num, _) in self.pools.items():
            found[ratio] = Counter({p - start: times for p, times in places.items() if start <= p < start + num})
            start += num
        return found


def probes_of(backend: AttentionBackend, kind: StepKind) -> list[Probe]:
    """A layer of each sort that a backend's metadata describes, for the kernel of a step kind."""
    if backend.geometry.num_slots > MAX_SLOTS:
        raise ConfigError(
            f"a cache of {backend.geometry.num_slots} slots is too large for a picture (at most {MAX_SLOTS}); "
            "explain the step on a backend of a smaller CacheGeometry"
        )
    formats: frozenset[Any] = backend.formats
    known = [format for format in _SIZES if format in formats]  # latents last of those that a backend has both of
    if not known:
        raise ConfigError(f"{backend.name}: no picture of caches of {', '.join(map(str, formats))}")
    if known[0] is CompressedFormat.COMPRESSED:
        compressed: Any = backend
        return [_compressed(compressed, kind, compression) for compression in (None, *compressed.compressions)]
    return [_dense(backend, kind, known[-1])]


def _kernel(backend: AttentionBackend, kind: StepKind, format: Any) -> tuple[Kernel, AttentionLayer, torch.dtype]:
    """The kernel of a kind, a layer of plain attention that it takes, and the type of its queries."""
    kernel = backend.kernel_of(kind)
    dim, v_dim = head_sizes(type(backend), kernel, format) or _SIZES[format]
    heads = query_heads(kernel)
    num_heads = _HEADS if heads is None or _HEADS in heads else min(heads)
    capabilities = _capabilities(kernel, kind)
    dtype = next(each for each in (torch.float32, torch.bfloat16, torch.float16) if each in capabilities.dtypes)
    return kernel, AttentionLayer(0, num_heads, 1, dim, v_dim, scale=1.0), dtype


def _capabilities(kernel: Kernel, kind: StepKind) -> Capabilities:
    """Of a kind; of an idle step, which launches nothing, those of any."""
    return kernel.capabilities.get(kind) or next(iter(kernel.capabilities.values()))


def _cache_dtype(kernel: Kernel, kind: StepKind, dtype: torch.dtype) -> torch.dtype:
    capabilities = _capabilities(kernel, kind)
    return dtype if capabilities.own_cache else min(capabilities.cache_dtypes, key=str)


def _dense(backend: AttentionBackend, kind: StepKind, format: CacheFormat) -> Probe:
    kernel, layer, dtype = _kernel(backend, kind, format)
    geometry, device = backend.geometry, backend.device
    shape = (geometry.num_pages, geometry.page_size)

    def zeros(*dims: int) -> Tensor:
        return torch.zeros(*shape, *dims, dtype=_cache_dtype(kernel, kind, dtype), device=device)

    cache = (
        PagedLatent(zeros(layer.head_dim), rank=layer.v_head_dim)
        if format is CacheFormat.LATENT
        else PagedKV(zeros(1, layer.head_dim), zeros(1, layer.v_head_dim))
    )
    values = cache.pages[1]

    def attend(at: ForwardMetadata, num_rows: int) -> Tensor:
        q = torch.zeros(num_rows, layer.num_heads, layer.head_dim, dtype=dtype, device=device)
        return backend.forward(q, cache, at, layer).out

    return Probe(layer, {ROWS: (geometry.num_slots, lambda given: _fill(values, given))}, attend, device)


def _fill(values: Tensor, given: Tensor) -> None:
    """Write [slots, dim] to pages [num_pages, page_size, 1, dim]."""
    values.copy_(given.view(*values.shape[:2], 1, -1))


def _compressed(backend: Any, kind: StepKind, compression: Compression | None) -> Probe:
    kernel, plain, dtype = _kernel(backend, kind, CompressedFormat.COMPRESSED)
    geometry, device = backend.geometry, backend.device
    layer = _compressed_layer(backend, plain, compression)
    cache = backend.allocate_cache(layer, _cache_dtype(kernel, kind, dtype))

    def attend(at: ForwardMetadata, num_rows: int) -> Tensor:
        index = None
        if layer.indexer is not None:
            index_q = torch.zeros(num_rows, _INDEX_HEADS, _INDEX_DIM, dtype=dtype, device=device)
            index = IndexQuery(index_q, index_q[..., 0].float())
        q = torch.zeros(num_rows, layer.num_heads, layer.head_dim, dtype=dtype, device=device)
        return backend.forward(q, cache, at, layer, index).out

    pools: dict[int, tuple[int, Write]] = {
        ROWS: (geometry.num_slots, partial(_write_all, cache.rows, geometry.reserved_page))
    }
    if compression is not None:
        entries = cache.compressor.entries
        num = geometry.num_slots // compression.ratio
        pools[compression.ratio] = (num, partial(_write_all, entries, geometry.reserved_page))
    return Probe(layer, pools, attend, device)


def _write_all(pages: Any, reserved_page: int, values: Tensor) -> None:
    pages.write(torch.arange(len(values), device=values.device), values, reserved_page)


def _compressed_layer(backend: Any, plain: AttentionLayer, compression: Compression | None) -> CompressedLayer:
    """A layer of one compression; where an indexer selects, it selects all that is visible."""
    layer = CompressedLayer(
        **{name: getattr(plain, name) for name in ("id", "num_heads", "num_kv_heads", "head_dim")},
        v_head_dim=plain.v_head_dim,
        scale=1.0,
        window=backend.window,
    )
    if compression is None:
        return layer
    device = backend.device

    def compressor(dim: int) -> Compressor:
        channels = dim * (2 if compression.overlap else 1)
        return Compressor(
            torch.zeros(compression.ratio, channels, device=device),
            torch.ones(dim, device=device),
            1e-6,
            torch.ones(32, device=device),
        )

    most = backend.capacity.max_kv_len // compression.ratio
    return replace(
        layer,
        compression=compression,
        compressor=compressor(plain.head_dim),
        indexer=compressor(_INDEX_DIM) if compression.indexed else None,
        index_topk=-(-most // _INDEX_GROUP) * _INDEX_GROUP if compression.indexed else 0,
    )
