"""Mutants of moving accepted tokens in a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.cache import KeyValues, PagedKV
from tests.mutants.mutant import mutant


@mutant("SGLang #31218: index keys corrupted after tree verify at page sizes over 1", "worker.moves")
def move_knows_no_pages(patch: pytest.MonkeyPatch) -> None:
    """Slots are taken for pages, and every offset for the first of its page."""

    def flat(self: PagedKV, sources: Tensor, destinations: Tensor) -> None:
        page_size = self.k.shape[1]
        k, v = self.read(sources // page_size * page_size)
        self.store(KeyValues(k, v), destinations)

    patch.setattr(PagedKV, "move", flat)


@mutant("SGLang #26982: a side cache stays behind when the others move", "worker.moves")
def values_stay_behind(patch: pytest.MonkeyPatch) -> None:
    """Keys move, values do not."""

    def keys_alone(self: PagedKV, sources: Tensor, destinations: Tensor) -> None:
        self.store(KeyValues(self.read(sources)[0], self.read(destinations)[1]), destinations)

    patch.setattr(PagedKV, "move", keys_alone)


@mutant("local-inference-lab/vllm #105: an overlapping shift in place", "worker.moves")
def moved_one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    """Each slot is written before the next is read."""
    move: Any = PagedKV.move

    def in_turn(self: PagedKV, sources: Tensor, destinations: Tensor) -> None:
        for place in range(len(sources)):
            move(self, sources[place : place + 1], destinations[place : place + 1])

    patch.setattr(PagedKV, "move", in_turn)


@mutant("a move that knows one 8-bit type", "worker.moves")
def eight_bit_entries_moved_through_another_type(patch: pytest.MonkeyPatch) -> None:
    """8-bit entries are rounded to float8_e5m2 on their way."""
    move: Any = PagedKV.move

    def rounded(self: PagedKV, sources: Tensor, destinations: Tensor) -> None:
        move(self, sources, destinations)
        if self.k.dtype.itemsize == 1:
            k, v = (x.to(torch.float8_e5m2).to(x.dtype) for x in self.read(destinations))
            self.store(KeyValues(k, v), destinations)

    patch.setattr(PagedKV, "move", rounded)
