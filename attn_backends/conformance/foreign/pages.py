"""Slots and pages in another project's numbers: its padding uses page 0, the suite reserves another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.conformance.foreign.driver import NOWHERE
from spec_metadata import CacheGeometry, RequestTable, Step

Rows = list[list[int]]
"""The slots that each query row attends to, in the other project's numbers."""


@dataclass(frozen=True)
class Numbers:
    """Slots in the other project's numbers, and back: the reserved page and page 0 change places, which is its own
    inverse.
    """

    geometry: CacheGeometry

    def slots(self, slots: Tensor) -> Tensor:
        """The other side's numbers of slots, int64."""
        size, reserved = self.geometry.page_size, self.geometry.reserved_page
        slots = slots.long()
        page = torch.div(slots, size, rounding_mode="floor")
        swapped = torch.where(page == reserved, 0, torch.where(page == 0, reserved, page))
        return swapped * size + slots % size


def token_slots(step: Step, num_tokens: int) -> Tensor:
    """[bs, up to num_tokens] the suite's slots of each request's leading tokens."""
    paging, size = step.paging, step.paging.geometry.page_size
    if isinstance(paging, RequestTable):
        return paging.table[paging.rows.long(), :num_tokens]
    offsets = torch.arange(size, device=paging.table.device)
    return (paging.table.long().unsqueeze(2) * size + offsets).flatten(1)[:, :num_tokens]


def copy_pages(source: Tensor, destination: Tensor, reserved: int) -> None:
    """Copy all pages; page 0 and the reserved one change places."""
    destination.copy_(source)
    destination[reserved].copy_(source[0])
    destination[0].copy_(source[reserved])


def leading_slots(pages: list[int], page_size: int, length: int) -> list[int]:
    """The first `length` slots of pages; missing pages map to no slot (`NOWHERE`)."""
    slots = [page * page_size + offset for page in pages for offset in range(page_size)]
    return slots[:length] + [NOWHERE] * (length - len(slots))


def seen_by_rows(listed: list[int], width: int) -> Rows:
    """The keys that each of a request's rows sees; the last row sees all."""
    return [listed[: max(len(listed) - width + 1 + row, 0)] for row in range(width)]
