"""Mutants of ten reports of users that were found by search, and written before looking for what kills them. Their
author had read the lists of checks, and not most of their code.

Seven were killed. An eighth, a padded request that keeps its last length, reads within bounds, and no output shows it:
`plan.padding` was written to kill it. Two are not here. A host bound of a draft's lengths that is too short is read by
no kernel on a CPU. A verify planned as one row a request breaks the case: an error, not a fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends import fa3
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.conformance import checks_plan
from attn_backends.planning import planners
from spec_metadata import Buffers, PackedQuery, Step, StepKind
from spec_metadata.visibility import write_slots
from tests.mutants.mutant import mutant


def after_write(patch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Let spoil(step, buffers, what the buffers held before) follow every planning of FA3."""
    write = FA3Backend.write

    def spoilt(self: Any, step: Step, buffers: Buffers) -> None:
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        write(self, step, buffers)
        spoil(step, buffers, before)

    patch.setattr(FA3Backend, "write", spoilt)


@mutant("vLLM #46849: metadata of draft steps is updated in place", "math.draft_decode", graph=True)
def draft_lengths_advance_from_replay_to_replay(patch: pytest.MonkeyPatch) -> None:
    """Lengths of a draft are those of the last replay and one more, where it was planned before."""
    planned = set[int]()

    def advanced(step: Step, buffers: Buffers, before: Any) -> None:
        if step.kind is StepKind.DRAFT_DECODE and buffers["seqused_k"].data_ptr() in planned:
            buffers["seqused_k"].copy_((before["seqused_k"] + 1).clamp(max=buffers.extent.max_kv_len))
        planned.add(buffers["seqused_k"].data_ptr())

    after_write(patch, advanced)


@mutant("vLLM #54498: a drafter addresses slots by positions of another kind", "plan.write_slots")
def later_slots_counted_from_the_first(patch: pytest.MonkeyPatch) -> None:
    """Forward i of a draft writes i slots after its first one, whatever page that is on."""
    patch.setattr(planners, "write_slots", lambda step, forward=0: write_slots(step, 0) + forward)


@mutant("FlashInfer #3864: one head of one row leaves the window of a verify over 8-bit caches", "math.window")
def window_lost_in_one_head_of_the_last_row(patch: pytest.MonkeyPatch) -> None:
    """The last head of the last row of a step of several rows has no window."""
    attention = fa3.page_table_attention

    def lost(q: Tensor, *args: Any, window: int | None, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, *args, window=window, **options)
        if window is not None and options["max_seqlen_q"] > 1 and len(out):
            out[-1, -1] = attention(q, *args, window=None, **options)[0][-1, -1]
        return out, lse

    patch.setattr(fa3, "page_table_attention", lost)


@mutant("tokenspeed #207: a draft's graph is replayed without the block tables", "math.draft_decode", graph=True)
def draft_replayed_on_a_sentinel_table(patch: pytest.MonkeyPatch) -> None:
    """Page lists of a draft hold page 0, once it was planned before."""
    planned = set[int]()

    def sentinel(step: Step, buffers: Buffers, before: Any) -> None:
        if step.kind is StepKind.DRAFT_DECODE and buffers["page_table"].data_ptr() in planned:
            buffers["page_table"].zero_()
        planned.add(buffers["page_table"].data_ptr())

    after_write(patch, sentinel)


@mutant("SGLang #31501: the window of a paged prefill skips whole tiles alone", "math.window")
def window_rounded_up_to_a_tile(patch: pytest.MonkeyPatch) -> None:
    """A window is rounded up to a whole number of 4 keys."""
    windowed = fa3.windowed

    def coarse(window: int | None, drafted: Any) -> Any:
        whole, drafted = windowed(window, drafted)
        return (None if whole is None else -(-whole // 4) * 4), drafted

    patch.setattr(fa3, "windowed", coarse)


@mutant("vLLM-Ascend #5626: query starts cut at the wrong end", "math.packed_draft_extend")
def packed_starts_are_their_ends(patch: pytest.MonkeyPatch) -> None:
    """Packed rows of all requests but the last begin where those of the next one do."""

    def cut(step: Step, buffers: Buffers, before: Any) -> None:
        if isinstance(step.query, PackedQuery):
            buffers["cu_seqlens_q"][1:-1].copy_(buffers["cu_seqlens_q"][2:].clone())

    after_write(patch, cut)


@mutant("vLLM-Ascend #16347: requests counted by padded tokens", "math.target_verify")
def last_request_has_another_one_s_length(patch: pytest.MonkeyPatch) -> None:
    """The last request of a verify has the length of the one before it."""

    def shifted(step: Step, buffers: Buffers, before: Any) -> None:
        if step.kind is StepKind.TARGET_VERIFY and step.bs > 1:
            buffers["seqused_k"][:, -1].copy_(buffers["seqused_k"][:, -2])

    after_write(patch, shifted)


@mutant("a padded request keeps its last length", "plan.padding", graph=True)
def padded_requests_keep_their_last_length(patch: pytest.MonkeyPatch) -> None:
    """A replay writes the lengths of real requests alone: a padded one keeps that of the request that was there."""
    planned = set[int]()

    def kept(step: Step, buffers: Buffers, before: Any) -> None:
        if buffers["seqused_k"].data_ptr() in planned and not isinstance(step.num_real, int):
            padded = torch.arange(step.bs) >= step.num_real
            buffers["seqused_k"].copy_(torch.where(padded, before["seqused_k"], buffers["seqused_k"]))
        planned.add(buffers["seqused_k"].data_ptr())

    after_write(patch, kept)


@mutant("our own, by a random change of one token", "plan.token_positions")
def nodes_stand_by_their_number(patch: pytest.MonkeyPatch) -> None:
    """A node of a verified tree stands as far after the committed tokens as its number, not its depth."""
    positions = checks_plan.token_positions
    flat = lambda step, forward=0: positions(replace(step, tree_mask=None), forward)  # noqa: E731
    patch.setattr(checks_plan, "token_positions", flat)
