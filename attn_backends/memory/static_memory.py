"""Static memory: tables that captured phases share, because they are of the same requests.

Phases that read one engine table in place are planned for the requests of one batch at a time, in one order, whatever
the lengths. What depends on the requests alone, such as page ids, is then the same for all of them: it is in memory
once, and planning one phase leaves what another one sees as it is. So phases stay planned side by side, and a page size
of 1 takes the memory of one table.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import le

import torch
from torch import Tensor

from spec_metadata import Arena, BufferSpec, Extent, Paging


@dataclass(slots=True, eq=False)
class SharedTable:
    """read_in_place: the engine's table, kept so that no other comes to lie at its address. planned: the phases that
    were planned in it, the last one last, and which bucket of each.
    """

    arena: Arena
    read_in_place: Tensor
    planned: dict[object, object] = field(default_factory=dict)


class StaticMemory:
    """Tables of the backends that are given it, one for each engine table and form. A table is as large as the largest
    step of the phase that asked for it first. A phase that needs more has another one, so capture first what has the
    most rows: a ragged step, whose padding has rows of its own.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, list[SharedTable]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(table.arena.num_bytes for tables in self._tables.values() for table in tables)

    def find(self, spec: BufferSpec, extent: Extent, paging: Paging, device: torch.device) -> SharedTable | None:
        """The first table that is large enough."""
        sizes, alike = spec.sizes(extent), self._tables.get(_key(spec, extent, paging, device), ())
        return next((each for each in alike if all(map(le, sizes, spec.sizes(each.arena.largest)))), None)

    def table(self, spec: BufferSpec, extent: Extent, paging: Paging, device: torch.device) -> SharedTable:
        """The buffer of a declaration for the phases that read the table of `paging` in place. extent: the largest of
        the phase.
        """
        found = self.find(spec, extent, paging, device)
        if found is None:
            found = SharedTable(Arena((spec,), extent, device), paging.table)
            self._tables.setdefault(_key(spec, extent, paging, device), []).append(found)
        return found


def _key(spec: BufferSpec, extent: Extent, paging: Paging, device: torch.device) -> Hashable:
    """Lists of all requests lie one behind the other, of as many pages each."""
    table, place = paging.table, torch.empty(0, device=device).device  # "cuda" has no index
    return spec, extent.max_pages, table.data_ptr(), table.stride(), paging.geometry, place
