"""Mutants of entries of one and of two tokens, as DeepSeek-V4.1 has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_metadata.plans.compressed import EntryPlan
from tests.mutants.compressed import change_entries, with_visible
from tests.mutants.mutant import mutant

CHECK = "compressed.short_blocks"


def change_ratio(patch: pytest.MonkeyPatch, ratio: int, change: Callable[[EntryPlan, Any], None]) -> None:
    """Let the plans of one ratio be changed in place."""
    change_entries(patch, lambda plan, rows, own: change(plan, rows) if own == ratio else None)


@mutant("entries of one token taken for those of earlier forwards alone", CHECK, backend="dsv4")
def own_token_not_visible(patch: pytest.MonkeyPatch) -> None:
    """A row does not see the entry of its own token."""
    change_ratio(patch, 1, lambda plan, rows: with_visible(plan, rows.position))


@mutant("ratio 1 read as no compression, which is 0", CHECK, backend="dsv4")
def ratio_1_is_none(patch: pytest.MonkeyPatch) -> None:
    """Entries of one token are not written."""
    change_ratio(patch, 1, lambda plan, rows: plan.write_slots.fill_(-1))


@mutant("pages of entries counted in the tokens of the other ratio", CHECK, backend="dsv4")
def entries_of_the_other_ratio(patch: pytest.MonkeyPatch) -> None:
    """Entries of one token are written where those of two belong."""

    def halved(plan: EntryPlan, rows: Any) -> None:
        plan.write_slots.copy_(torch.where(plan.write_slots < 0, -1, plan.write_slots // 2))

    change_ratio(patch, 1, halved)


@mutant("a pair rounded up: (pos + 2) // 2 for (pos + 1) // 2", CHECK, "math.target_verify", backend="dsv4")
def open_pair_visible(patch: pytest.MonkeyPatch) -> None:
    """A row sees the pair that its token begins, before it is closed."""
    change_ratio(patch, 2, lambda plan, rows: with_visible(plan, (rows.position + 2) // 2))


@mutant(
    "vLLM's ring of an open pair, not read at the first token of a step", CHECK, "compressed.rollback", backend="dsv4"
)
def first_half_of_a_pair_lost(patch: pytest.MonkeyPatch) -> None:
    """A pair that an earlier forward began is made of its second token alone."""
    change_ratio(patch, 2, lambda plan, rows: plan.state_reads.fill_(-1))
