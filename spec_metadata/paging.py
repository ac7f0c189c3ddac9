"""Paging of requests' tokens: cache geometry and the two forms of table that engines keep.

`RequestTable` is a request-to-token table (SGLang's req_to_token): a row per request slot, an entry per token position.
`BlockTable` is a padded block table (vLLM): a row per request of the batch, an entry per page. A plan asks either for
pages or for slots and never knows which one it got. A slot is page * page_size + offset in the page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from spec_metadata.errors import INTEGERS, InvalidStepError, describe


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The paged cache as indices see it.

    num_pages, page_size (tokens). reserved_page: belongs to no request, starts as zeros; padded rows read and write
    only there. reserved_row: the request-to-token row of padded rows, every entry of which points into that page.
    """

    num_pages: int
    page_size: int
    reserved_page: int = 0
    reserved_row: int = 0

    def __post_init__(self) -> None:
        if self.num_pages < 1 or self.page_size < 1:
            raise InvalidStepError(f"num_pages and page_size must be at least 1, got {self}")
        if not 0 <= self.reserved_page < self.num_pages:
            raise InvalidStepError(f"reserved_page {self.reserved_page} is not a page of [0, {self.num_pages})")

    @property
    def num_slots(self) -> int:
        """Token slots of the cache, the reserved page included."""
        return self.num_pages * self.page_size

    @property
    def reserved_slot(self) -> int:
        """The first slot of the reserved page."""
        return self.reserved_page * self.page_size

    def reserved_slots(self, num: int, device: torch.device) -> Tensor:
        """[num] int64: slots of the reserved page, walked round and round; what padded rows write to."""
        return self.reserved_slot + torch.arange(num, device=device) % self.page_size


def _check_index(name: str, tensor: Tensor, ndim: int) -> None:
    if not isinstance(tensor, Tensor) or tensor.ndim != ndim or tensor.dtype not in INTEGERS:
        raise InvalidStepError(f"{name} must be a {ndim}-dimensional int32 or int64 tensor, got {describe(tensor)}")


def _check_geometry(geometry: CacheGeometry) -> None:
    if not isinstance(geometry, CacheGeometry):
        raise InvalidStepError(f"geometry must be a CacheGeometry, got {geometry!r}")


@dataclass(frozen=True, slots=True, eq=False)
class RequestTable:
    """A request-to-token table.

    table: [num_rows, row_len] int32 or int64, the slot of each token position, shared by all requests of an engine. A
    row holds whole pages: kernels find a page by the slot of its first position.
    rows: [bs] int32 or int64, the row of each request of this step.
    """

    table: Tensor
    rows: Tensor
    geometry: CacheGeometry

    def __post_init__(self) -> None:
        _check_index("RequestTable.table", self.table, 2)
        _check_index("RequestTable.rows", self.rows, 1)
        _check_geometry(self.geometry)
        if not 0 <= self.geometry.reserved_row < self.table.shape[0]:
            raise InvalidStepError(
                f"reserved_row {self.geometry.reserved_row} is not a row of the table's [0, {self.table.shape[0]})"
            )

    @property
    def bs(self) -> int:
        """Requests of this step."""
        return self.rows.shape[0]

    @property
    def row_tokens(self) -> int:
        """Token positions that a row can address."""
        return self.table.shape[1]

    def slots(self, positions: Tensor) -> Tensor:
        """[bs, n] int64 slots of the token positions [bs, n]; outside of the table one of the reserved page."""
        rows, positions = self.rows.long().unsqueeze(1), positions.long()
        row, column = rows.clamp(0, self.table.shape[0] - 1), positions.clamp(0, self.table.shape[1] - 1)
        inside = (row == rows) & (column == positions)
        return torch.where(inside, self.table[row, column].long(), self.geometry.reserved_slot)

    def pages(self, num_pages: int) -> Tensor:
        """[bs, min(num_pages, pages of a row)] int64: the leading pages of each request's row. Those past the request's
        own pages may be anything (`visible_pages`).
        """
        page_size = self.geometry.page_size
        first_slots = self.table[:, : num_pages * page_size : page_size]
        return torch.div(first_slots.index_select(0, self.rows), page_size, rounding_mode="floor").long()

    def static_input(self) -> Tensor:
        """The per-step part, which a captured step copies; the table itself is read in place."""
        return self.rows

    @property
    def padding(self) -> int:
        """The per-step entry of a padded request: the reserved row."""
        return self.geometry.reserved_row

    def on_static(self, buffer: Tensor) -> Self:
        """The same paging, reading its per-step part from a static buffer, and the table where it lies now."""
        return replace(self, table=self.table.detach(), rows=buffer)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """A padded block table.

    table: [bs, max_pages] int32 or int64 page ids, one row per request of this step; entries past a request's pages
    may hold anything. Write slots are the step's out_cache_loc (vLLM's slot mapping).
    """

    table: Tensor
    geometry: CacheGeometry

    def __post_init__(self) -> None:
        _check_index("BlockTable.table", self.table, 2)
        _check_geometry(self.geometry)

    @property
    def bs(self) -> int:
        """Requests of this step."""
        return self.table.shape[0]

    @property
    def row_tokens(self) -> int:
        """Token positions that a row can address."""
        return self.table.shape[1] * self.geometry.page_size

    def slots(self, positions: Tensor) -> Tensor:
        """[bs, n] int64 slots of the token positions [bs, n]; outside of the table one of the reserved page."""
        page_size, positions = self.geometry.page_size, positions.long()
        inside = positions.clamp(0, self.row_tokens - 1)
        pages = self.table.gather(1, torch.div(inside, page_size, rounding_mode="floor"))
        slots = pages.long() * page_size + inside % page_size
        return torch.where(inside == positions, slots, self.geometry.reserved_slot)

    def pages(self, num_pages: int) -> Tensor:
        """[bs, min(num_pages, table.shape[1])] int64: the leading pages of each request's row. Those past the request's
        own pages may be anything (`visible_pages`).
        """
        return self.table[:, :num_pages].long()

    def static_input(self) -> Tensor:
        """The per-step part, which a captured step copies: the whole table."""
        return self.table

    @property
    def padding(self) -> int:
        """The per-step entry of a padded request: the reserved page."""
        return self.geometry.reserved_page

    def on_static(self, buffer: Tensor) -> Self:
        """The same paging, reading its per-step part from a static buffer."""
        return replace(self, table=buffer)


Paging = RequestTable | BlockTable
