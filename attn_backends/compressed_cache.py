"""The cache of a compressed layer: pools of rows, entries, index keys and states, as they are or in 8-bit pages.

Pools are addressed by position (`spec_metadata.plans.compressed`): a token's row by its slot. The entry of a block of
`ratio` tokens is at its last token's slot // ratio, in the same page. A state is addressed by the row of a ring in each
page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from attn_backends.cache import allocate_caches
from attn_backends.compressed_layer import CompressedLayer
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels import fp8_pages
from attn_backends.kernels.compressor_operators import write_rows
from attn_backends.kernels.torch_compressed import read_rows
from spec_metadata import CacheGeometry
from spec_metadata.plans.compressed import max_rows


class CompressedFormat(StrEnum):
    """The format of these caches, beside those of `attn_backends.cache.CacheFormat`."""

    COMPRESSED = "compressed"


@dataclass(frozen=True, slots=True, eq=False)
class FloatPages:
    """A pool of rows as they are. data: [num_pages, rows of a page, dim], any strides."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Pages, rows of a page and elements of a row."""
        return tuple(self.data.shape)

    @property
    def num_rows(self) -> int:
        """Rows of a page."""
        return self.data.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of an element."""
        return self.data.dtype

    def read(self, slots: Tensor) -> Tensor:
        """[*slots.shape, dim] rows of slots [...]; a slot of -1 reads anything."""
        return read_rows(self.data, self.num_rows, slots)

    def write(self, slots: Tensor, rows: Tensor, reserved_page: int) -> None:
        """Write rows [n, dim] to slots [n], nothing to a slot of -1, which only looks at the reserved page."""
        write_rows(self.data, self.num_rows, slots, rows, reserved_page)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Pages:
    """A pool of rows of 512 in the 8-bit page format (`attn_backends.kernels.fp8_pages`).

    data: [num_pages, page_bytes(num_rows)] uint8. num_rows: of a page.
    """

    data: Tensor
    num_rows: int
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    @property
    def shape(self) -> tuple[int, ...]:
        """Pages, rows of a page and elements of a row."""
        return self.data.shape[0], self.num_rows, fp8_pages.ROW_DIM

    def read(self, slots: Tensor) -> Tensor:
        """[*slots.shape, 512] float32 rows of slots [...]; a slot of -1 reads anything."""
        return read_rows(self.data, self.num_rows, slots)

    def write(self, slots: Tensor, rows: Tensor, reserved_page: int) -> None:
        """Write rows [n, 512] to slots [n], nothing to a slot of -1, which only looks at the reserved page."""
        write_rows(self.data, self.num_rows, slots, rows, reserved_page)

    @property
    def rows_view(self) -> Tensor:
        """[num_pages, num_rows, 1, 584] as FlashMLA takes it: a page's first bytes, though scales lie at its end."""
        size = (self.data.shape[0], self.num_rows, 1, fp8_pages.ROW_BYTES)
        return self.data.as_strided(size, (self.data.stride(0), fp8_pages.ROW_BYTES, fp8_pages.ROW_BYTES, 1))


Pages = FloatPages | Fp8Pages


@dataclass(frozen=True, slots=True, eq=False)
class EntryPools:
    """Pools of one compressor. entries: of compressed blocks, one slot each. states: values and gates of recent tokens,
    [num_pages, ring, 2 * channels] float32.
    """

    entries: Pages
    states: FloatPages


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompressedCache:
    """The cache of one layer. rows: of tokens. compressor: its entries, None without a compression. indexer: the keys
    by which entries are selected, None where they are not.
    """

    rows: Pages
    compressor: EntryPools | None = None
    indexer: EntryPools | None = None
    format: ClassVar[CompressedFormat] = CompressedFormat.COMPRESSED

    @property
    def dtype(self) -> torch.dtype:
        """Type of rows and entries; float8_e4m3fn stands for the 8-bit page format."""
        return self.rows.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        pools = [pool for each in (self.compressor, self.indexer) if each for pool in (each.entries, each.states)]
        return sum(pool.data.nbytes for pool in (self.rows, *pools))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Pages, rows of a page and elements of a row, of each pool that it has."""
        shapes = {"rows": self.rows.shape}
        for name, pools in (("compressor", self.compressor), ("indexer", self.indexer)):
            if pools is not None:
                shapes |= {f"{name} entries": pools.entries.shape, f"{name} states": pools.states.shape}
        return shapes


def pool_shapes(geometry: CacheGeometry, layer: CompressedLayer, ring: int) -> dict[str, tuple[int, ...]]:
    """The required `CompressedCache.shapes` of a layer's cache. ring: state rows of a page."""
    shapes: dict[str, tuple[int, ...]] = {"rows": (geometry.num_pages, geometry.page_size, layer.head_dim)}
    for name, compressor in (("compressor", layer.compressor), ("indexer", layer.indexer)):
        if layer.compression is not None and compressor is not None:
            num_entries = geometry.page_size // layer.compression.ratio
            shapes[f"{name} entries"] = (geometry.num_pages, num_entries, compressor.dim)
            shapes[f"{name} states"] = (geometry.num_pages, ring, 2 * compressor.channels)
    return shapes


def cache_reasons(cache: CompressedCache, geometry: CacheGeometry, layer: CompressedLayer, ring: int) -> list[str]:
    """Reasons why a cache is not that of a layer, or not what metadata indexes; empty if it is. ring: state rows of a
    page.
    """
    needed, reasons = pool_shapes(geometry, layer, ring), []
    if needed.keys() != cache.shapes.keys():
        return [f"a cache of {', '.join(cache.shapes)} (its layer has {', '.join(needed)})"]
    for name, shape in cache.shapes.items():
        if shape[1:] == needed[name][1:] and shape[0] >= needed[name][0]:
            continue
        reasons.append(f"{name} of (pages, rows of a page, elements) {shape}, not {needed[name]}")
        if name.endswith("states") and shape[1] < ring and layer.compression is not None:
            most = max_rows(layer.compression.read_window, shape[1], geometry.page_size)
            reasons[-1] += f": a ring of {shape[1]} would allow {most} draft tokens"
    return reasons


def allocate_compressed(
    geometry: CacheGeometry, layer: CompressedLayer, ring: int, dtype: torch.dtype, device: torch.device | str
) -> CompressedCache:
    """A zeroed cache for one layer.

    ring: state rows of a page, `DSV4Backend.ring(layer)`. dtype: of rows, entries and index keys; float8_e4m3fn for the
    8-bit page format, which has rows of 512 only; its index keys are bfloat16. Raises `MemoryLimitError` where it does
    not fit.
    """
    if dtype is torch.float8_e4m3fn and layer.head_dim != fp8_pages.ROW_DIM:
        raise UnsupportedStepError(
            f"the 8-bit cache of layer {layer.id}",
            [f"rows of {layer.head_dim} (the format has {fp8_pages.NOPE} 8-bit elements and {fp8_pages.ROPE} rotated)"],
            f"a head size of {fp8_pages.ROW_DIM}, or a cache of bfloat16",
        )
    make = partial(_allocate, pool_shapes(geometry, layer, ring), dtype)
    return allocate_caches(geometry, lambda place: [make(place)], torch.device(device))[0]


def _allocate(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> CompressedCache:
    """Zeroed pools of these shapes."""
    is_fp8 = dtype is torch.float8_e4m3fn

    def pages(name: str) -> Pages:
        if not is_fp8:
            return FloatPages(torch.zeros(shapes[name], dtype=dtype, device=device))
        num_pages, num_rows, _ = shapes[name]
        size = (num_pages, fp8_pages.page_bytes(num_rows))
        return Fp8Pages(torch.zeros(size, dtype=torch.uint8, device=device), num_rows)

    def states(name: str) -> FloatPages:
        state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        return FloatPages(torch.zeros(shapes[f"{name} states"], dtype=state_dtype, device=device))

    main = index = None
    if "compressor entries" in shapes:
        main = EntryPools(pages("compressor entries"), states("compressor"))
    if "indexer entries" in shapes:
        key_dtype = torch.bfloat16 if is_fp8 else dtype
        keys = torch.zeros(shapes["indexer entries"], dtype=key_dtype, device=device)
        index = EntryPools(FloatPages(keys), states("indexer"))
    return CompressedCache(pages("rows"), main, index)
