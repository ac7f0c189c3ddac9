"""Views of the paged KV cache: shape, strides and format of memory that an engine may own.

A slot is page * page_size + offset. Views may have any strides; reading and writing goes through (page, offset) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from attn_backends.errors import MemoryLimitError, UnsupportedStepError
from attn_backends.kernels.device_memory import room_for
from attn_backends.kernels.operators import store_kv, store_rows
from attn_backends.layer import AttentionLayer
from spec_metadata import CacheGeometry


class CacheFormat(StrEnum):
    """Contents of a token's cache entry: key and value, or MLA's latent. Phases that share a cache agree on it."""

    KV = "kv"
    LATENT = "latent"


@dataclass(frozen=True, slots=True, eq=False)
class KeyValues:
    """Rows that a grouped-query layer stores. k: [num_tokens, num_kv_heads, head_dim], after RoPE; v: likewise."""

    k: Tensor
    v: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        return self.k.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """Rows that an MLA layer stores. latent: [num_tokens, rank + rope], normalised c_kv then rotated k_pe."""

    latent: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        return self.latent.dtype


CacheInputs = KeyValues | Latents


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PagedKV:
    """One layer's KV cache. k: [num_pages, page_size, num_kv_heads, head_dim]; v: likewise, with a
    last size of its own. Raises `UnsupportedStepError` for views that don't agree.
    """

    k: Tensor
    v: Tensor
    format: ClassVar[CacheFormat] = CacheFormat.KV

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        reasons = [
            f"{name} is {list(pages.shape)}, not [num_pages, page_size, num_kv_heads, dim]"
            for name, pages in (("k", k), ("v", v))
            if pages.ndim != 4
        ]
        if not reasons and k.shape[:3] != v.shape[:3]:
            reasons.append(f"k is {list(k.shape)} and v {list(v.shape)}; they may differ in the last size only")
        if (k.dtype, k.device) != (v.dtype, v.device):
            reasons.append(f"k is {k.dtype} on {k.device} and v {v.dtype} on {v.device}")
        if reasons:
            raise UnsupportedStepError("KV cache", reasons)

    @property
    def dtype(self) -> torch.dtype:
        """Type of an entry."""
        return self.k.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.k.nbytes + self.v.nbytes

    @property
    def entry_sizes(self) -> tuple[int, int, int]:
        """KV heads, key elements and value elements of an entry."""
        return self.k.shape[2], self.k.shape[3], self.v.shape[3]

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values, [num_pages, page_size, num_kv_heads, dim] each."""
        return self.k, self.v

    def store(self, inputs: CacheInputs, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        """Write one row of inputs, divided by the scales, to each slot. slots: [num_tokens] int64."""
        if not isinstance(inputs, KeyValues):
            raise UnsupportedStepError("KV cache", [f"it can't store {type(inputs).__name__}"])
        for name, given, page in (("k", inputs.k, self.k), ("v", inputs.v, self.v)):
            _check_rows(name, given, (slots.shape[0], *page.shape[2:]))
        store_kv(self.k, self.v, inputs.k, inputs.v, slots, k_scale, v_scale)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Entries [*slots.shape, num_kv_heads, dim] of keys and values, as they are stored. slots: [...] int64."""
        pages, offsets = _split(slots, self.k.shape[1])
        return self.k[pages, offsets], self.v[pages, offsets]

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots to slots; all sources are read first."""
        k, v = self.read(sources)
        self.store(KeyValues(k, v), destinations)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PagedLatent:
    """One layer's cache of MLA latents. latent: [num_pages, page_size, rank + rope], the first `rank` the values.
    Raises `UnsupportedStepError` for a view of another form.
    """

    latent: Tensor
    rank: int
    format: ClassVar[CacheFormat] = CacheFormat.LATENT

    def __post_init__(self) -> None:
        shape = list(self.latent.shape)
        if len(shape) != 3:
            raise UnsupportedStepError("cache of latents", [f"it is {shape}, not [num_pages, page_size, rank + rope]"])
        if not 1 <= self.rank <= shape[2]:
            raise UnsupportedStepError("cache of latents", [f"rank {self.rank} of entries of {shape[2]} elements"])

    @property
    def dtype(self) -> torch.dtype:
        """Type of an entry."""
        return self.latent.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the latents."""
        return self.latent.nbytes

    @property
    def entry_sizes(self) -> tuple[int, int, int]:
        """KV heads, key elements and value elements of an entry."""
        return 1, self.latent.shape[2], self.rank

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys [num_pages, page_size, 1, rank + rope] and values [..., rank], views of the latents."""
        keys = self.latent.unsqueeze(2)
        return keys, keys[..., : self.rank]

    def store(self, inputs: CacheInputs, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        """Write one row of inputs, divided by the one scale, to each slot. slots: [num_tokens] int64."""
        if not isinstance(inputs, Latents):
            raise UnsupportedStepError("cache of latents", [f"it can't store {type(inputs).__name__}"])
        if k_scale != v_scale:
            raise UnsupportedStepError("cache of latents", [f"one entry has two scales, {k_scale} and {v_scale}"])
        _check_rows("latent", inputs.latent, (slots.shape[0], *self.latent.shape[2:]))
        store_rows(self.latent, inputs.latent, slots, k_scale)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Entries [*slots.shape, 1, dim] of keys and values, as they are stored. slots: [...] int64."""
        pages, offsets = _split(slots, self.latent.shape[1])
        latent = self.latent[pages, offsets].unsqueeze(-2)
        return latent, latent[..., : self.rank]

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots to slots; all sources are read first."""
        pages, offsets = _split(sources, self.latent.shape[1])
        self.store(Latents(self.latent[pages, offsets]), destinations)


PagedCache = PagedKV | PagedLatent


def _check_rows(name: str, given: Tensor, needed: tuple[int, ...]) -> None:
    if given.shape != needed:
        raise UnsupportedStepError("cache", [f"{name} to store is {list(given.shape)}, not {list(needed)}"])


def _split(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    return torch.div(slots, page_size, rounding_mode="floor"), slots % page_size


class Sized(Protocol):
    """A cache of a layer, of any format."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its entries."""
        ...


Caches = TypeVar("Caches", bound=Sized)


def allocate_caches(
    geometry: CacheGeometry, make: Callable[[torch.device], list[Caches]], device: torch.device
) -> list[Caches]:
    """Caches on a device, one for each layer. Raises `MemoryLimitError`, before it allocates any, if not all fit.
    make: from a device to the caches; it is called on meta first, for their bytes.
    """
    sizes = [cache.num_bytes for cache in make(torch.device("meta"))]
    layers = f"{len(sizes)} layer{'' if len(sizes) == 1 else 's'}"
    what = f"a KV cache of {layers}, {geometry.num_pages:,} pages of {geometry.page_size} tokens"

    def refusal(found: str) -> MemoryLimitError:
        return MemoryLimitError(
            f"{what}, needs {sum(sizes):,} bytes and {found}; lower max_bs or max_context, or whatever its pages are "
            "counted from, or take a smaller cache type"
        )

    with room_for(sum(sizes), device, refusal):
        return make(device)


def check_cache(cache: PagedCache, geometry: CacheGeometry, layer: AttentionLayer) -> None:
    """Refuse a cache whose pages are not those that the metadata indexes, or whose entries are not the layer's."""
    pages = cache.k if isinstance(cache, PagedKV) else cache.latent
    reasons = []
    if pages.shape[0] < geometry.num_pages or pages.shape[1] != geometry.page_size:
        reasons.append(
            f"it holds {pages.shape[0]} pages of {pages.shape[1]} tokens, the backend was built for "
            f"{geometry.num_pages} pages of {geometry.page_size}"
        )
    if cache.entry_sizes != (layer.num_kv_heads, layer.head_dim, layer.v_head_dim):
        reasons.append(
            f"its entries have (KV heads, key, value) sizes {cache.entry_sizes}, the layer "
            f"{(layer.num_kv_heads, layer.head_dim, layer.v_head_dim)}"
        )
    if reasons:
        raise UnsupportedStepError(f"the cache of layer {layer.id}", reasons)
