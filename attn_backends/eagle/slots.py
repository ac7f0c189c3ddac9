"""The reference worker's slot allocator: pages for requests, and the request-to-token table that steps read."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from attn_backends.errors import AttnBackendsError
from spec_metadata import CacheGeometry, Capacity, RequestTable
from spec_metadata.capacity import ceil_div


class OutOfSlotsError(AttnBackendsError):
    """No free page or table row is left."""


class SlotAllocator:
    """Gives pages to table rows and takes them back.

    Row `geometry.reserved_row` and page `geometry.reserved_page` belong to padding and are never given. Unowned entries
    of the table point into the reserved page. seed: order in which pages are given, shuffled so that no kernel can
    rely on neighbouring pages.
    """

    def __init__(self, geometry: CacheGeometry, capacity: Capacity, device: torch.device, seed: int = 0) -> None:
        self.geometry = geometry
        self.max_tokens = capacity.max_kv_len
        self._reserved = geometry.reserved_slots(capacity.max_kv_len, device).to(torch.int32)
        self.table = self._reserved.repeat(capacity.max_bs + 1, 1)
        self._pages: dict[int, list[int]] = {}
        self._free_rows = [row for row in range(capacity.max_bs + 1) if row != geometry.reserved_row]
        self._free_pages = [page for page in range(geometry.num_pages) if page != geometry.reserved_page]
        random.Random(seed).shuffle(self._free_pages)

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be admitted."""
        return len(self._free_rows)

    @property
    def num_free_pages(self) -> int:
        """Pages that belong to nobody."""
        return len(self._free_pages)

    def admit(self) -> int:
        """A row for a new request."""
        if not self._free_rows:
            raise OutOfSlotsError(f"all {len(self._pages)} rows of the table are taken")
        row = self._free_rows.pop()
        self._pages[row] = []
        return row

    def reserve(self, row: int, num_tokens: int) -> None:
        """Give a row pages for its first num_tokens positions, if it lacks any."""
        pages, page_size = self._pages[row], self.geometry.page_size
        num_missing = ceil_div(num_tokens, page_size) - len(pages)
        if num_tokens > self.max_tokens:
            raise OutOfSlotsError(f"row {row} asks for {num_tokens} tokens; a table row holds {self.max_tokens}")
        if num_missing > len(self._free_pages):
            raise OutOfSlotsError(
                f"row {row} needs {num_missing} more pages of {page_size} tokens, {len(self._free_pages)} are free"
            )
        for _ in range(num_missing):
            page, start = self._free_pages.pop(), len(pages) * page_size
            pages.append(page)
            width = min(page_size, self.max_tokens - start)
            self.table[row, start : start + width] = page * page_size + torch.arange(width, device=self.table.device)

    def release(self, row: int) -> None:
        """Take a row and its pages back."""
        self._free_pages.extend(self._pages.pop(row))
        self._free_rows.append(row)
        self.table[row] = self._reserved

    def paging(self, rows: Tensor) -> RequestTable:
        """The table for a batch. rows: [bs] int64."""
        return RequestTable(self.table, rows, self.geometry)
