"""Batches of scenes, and requests by the names of their tokens: an int for a position, a tuple for a drafted node."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from spec_metadata import StepKind

Name = Hashable


@dataclass(frozen=True)
class Batch:
    """lens: committed tokens of each request. widths: query rows of each in a packed step, else the capacity's; in a
    verify, and in a draft extend that is `ragged`, only the device knows them. asked: its widths where they do not fit.
    bounded: the step promises its longest.
    """

    kind: StepKind
    lens: tuple[int, ...]
    widths: tuple[int, ...] = ()
    bounded: bool = False
    asked: tuple[int, ...] = ()
    ragged: bool = False

    @property
    def is_ragged(self) -> bool:
        """Whether only the device knows the widths."""
        return bool(self.widths) and (self.ragged or self.kind is StepKind.TARGET_VERIFY)

    @property
    def bound(self) -> int:
        """Bound on the rows of a ragged step: one more than there are, where the widths fit; of others 0."""
        return sum(self.widths) + (not self.asked) if self.is_ragged else 0


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
    them, by compressor and precision. made: those that a step has stored, by block, found right.
    """

    length: int
    slots: dict[Name, int] = field(default_factory=dict)
    vectors: dict[Name, Tensor] = field(default_factory=dict)
    seen: dict[torch.dtype | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    entries: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[Name, int]:
        """The number of each token among the vectors."""
        return {name: place for place, name in enumerate(self.vectors)}
