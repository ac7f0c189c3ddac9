"""Static memory: tables that captured phases share, because they are of the same requests.

Phases that read one engine table in place are planned for the requests of one batch at a time, in one order, whatever
the lengths. What depends on the requests alone, such as page ids, is then the same for all of them: it is in memory
once, and planning one phase leaves what another one sees as it is. So phases stay planned side by side, and a page size
of 1 takes the memory of one table.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec_metadata import Arena, BufferSpec, Extent, Paging


@dataclass(slots=True, eq=False)
class SharedTable:
    """planned: the phases that were planned in it, the last one last, and which bucket of each."""

    arena: Arena
    planned: dict[object, object] = field(default_factory=dict)


class StaticMemory:
    """Tables of the backends that are given it, one for each engine table and form. A table is as large as the largest
    step of the phase that asked for it first. A phase that needs more has another one, so capture first what has the
    most rows: a ragged step, whose padding has rows of its own.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, list[SharedTable]] = {}
        self._read_in_place: list[Tensor] = []  # kept, so that no other engine table comes to lie at its address

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(table.arena.num_bytes for tables in self._tables.values() for table in tables)

    def holds(self, spec: BufferSpec, extent: Extent, paging: Paging, device: torch.device) -> bool:
        """Whether a table is there that is large enough."""
        return self._find(spec, extent, paging, device) is not None

    def table(self, spec: BufferSpec, extent: Extent, paging: Paging, device: torch.device) -> SharedTable:
        """The buffer of a declaration for the phases that read the table of `paging` in place. extent: the largest of
        the phase.
        """
        found = self._find(spec, extent, paging, device)
        if found is None:
            found = SharedTable(Arena((spec,), extent, device))
            self._tables.setdefault(_key(spec, paging, device), []).append(found)
            self._read_in_place.append(paging.table)
        return found

    def _find(self, spec: BufferSpec, extent: Extent, paging: Paging, device: torch.device) -> SharedTable | None:
        """The first that was allocated with the rows of an extent or more, and with rows as wide."""
        rows, *width = spec.sizes(extent)
        for table in self._tables.get(_key(spec, paging, device), ()):
            most, *own = spec.sizes(table.arena.largest)
            if rows <= most and own == width:
                return table
        return None


def _key(spec: BufferSpec, paging: Paging, device: torch.device) -> Hashable:
    table, place = paging.table, torch.empty(0, device=device).device  # "cuda" has no index
    return spec, table.data_ptr(), table.stride(), paging.geometry, place
