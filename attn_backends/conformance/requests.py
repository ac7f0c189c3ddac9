"""Requests of a scene by the names of their tokens: an int for a position, a tuple for a drafted tree node."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

Name = Hashable


@dataclass(frozen=True)
class Row:
    """A query row: the token that it writes and those that it sees, by name."""

    request: int
    token: Name
    visible: list[Name]


@dataclass
class Request:
    """Slots and vectors [planes, kv_heads, dim] of a request's tokens, committed and drafted, by name.

    seen: their keys and values as attention sees them, [num_tokens, kv_heads, dim] each, by precision; of a
    compressed layer rows and entries. entries: of a compressed layer, [num_blocks, dim], not yet as the cache holds
    them, by compressor and precision.
    """

    length: int
    slots: dict[Name, int] = field(default_factory=dict)
    vectors: dict[Name, Tensor] = field(default_factory=dict)
    seen: dict[torch.dtype | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    entries: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[Name, int]:
        """The number of each token among the vectors."""
        return {name: place for place, name in enumerate(self.vectors)}
