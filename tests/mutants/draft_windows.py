"""Mutants of windowed drafts: which tokens a draft reads, where its rows stand, and whose table is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends_reference.eagle import phases
from attn_backends_reference.eagle.draft_window import DraftWindow
from tests.mutants.mutant import mutant

OF, READ, SKIPPED = DraftWindow.of, DraftWindow.read, DraftWindow.num_skipped


@mutant("SGLang #39287: a clipped prefix gathered from offset 0", "eagle3.window")
def draft_window_clipped_from_offset_zero(patch: pytest.MonkeyPatch) -> None:
    """A windowed draft reads the right number of tokens, but the first ones of the request."""

    def first(self, rows, lens):
        left = READ(self, rows, lens)
        self.table.copy_(self.slots.table)
        return left

    patch.setattr(DraftWindow, "read", first)


@mutant("a window that reaches into the sinks beside it", "eagle3.window")
def sink_tokens_read_twice(patch: pytest.MonkeyPatch) -> None:
    """Where a request is shorter than sinks and window, what lies in both is read twice."""

    def unclamped(self, lens):
        page_size = self.slots.geometry.page_size
        sinks = -(-self.num_sinks // page_size)
        return (torch.div((lens - self.size).clamp_min(0), page_size, rounding_mode="floor") - sinks) * page_size

    patch.setattr(DraftWindow, "num_skipped", unclamped)


@mutant("a window without the sinks that it was given", "eagle3.window")
def sink_tokens_left_out(patch: pytest.MonkeyPatch) -> None:
    """A windowed draft reads as many tokens before its window as it has sinks, and not the first ones."""

    def without(self, rows, lens):
        skipped = self.num_skipped(lens)
        columns = torch.arange(self.table.shape[1])
        self.table[rows] = self.slots.paging(rows).slots(columns + skipped.unsqueeze(1)).int()
        return lens - skipped

    patch.setattr(DraftWindow, "read", without)


@mutant("positions of a compact cache taken for a request's", "eagle3.window")
def windowed_drafts_stand_in_the_window(patch: pytest.MonkeyPatch) -> None:
    """Drafted rows are rotated by their place among the tokens that are left, not in the text."""
    patch.setattr(phases, "_draft_positions", lambda meta, committed, i: phases.token_positions(meta.step, i))


@mutant("a page table of the first cycle, under a replay", "eagle3.window", graph=True)
def draft_window_does_not_move(patch: pytest.MonkeyPatch) -> None:
    """A row's table is made for the first cycle of a request, and the lengths for each."""

    def once(self, rows, lens):
        before, seen = self.table.clone(), vars(self.slots).setdefault("seen", set())
        made = READ(self, rows, lens)
        stay = [row for row in rows.tolist() if (row, tuple(self.slots.pages(row))) in seen]
        self.table[stay] = before[stay]
        seen |= {(row, tuple(self.slots.pages(row))) for row in rows.tolist()}
        return made

    patch.setattr(DraftWindow, "read", once)


@mutant("SGLang #31501: a window that whole tiles round the wrong way", "eagle3.window")
def draft_window_rounded_down_to_pages(patch: pytest.MonkeyPatch) -> None:
    """A window begins at the page after its first token's."""
    patch.setattr(
        DraftWindow, "num_skipped", lambda self, lens: SKIPPED(self, lens + self.slots.geometry.page_size - 1)
    )


@mutant("one table for the draft and its target", "eagle3.window")
def verify_reads_the_draft_s_window(patch: pytest.MonkeyPatch) -> None:
    """The table that is cut is the engine's own, which the verify reads after the draft."""

    def own(cls, *given):
        made = OF(*given)
        return made and replace(made, table=made.slots.table)

    patch.setattr(DraftWindow, "of", classmethod(own))
