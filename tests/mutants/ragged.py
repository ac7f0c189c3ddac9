"""Mutants of ragged verifies and draft extends: whose widths count, what is cut, where the rows that are left write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends_reference.eagle import ragged as worker
from spec_metadata import StepKind, static_inputs
from spec_metadata.plans import ragged
from tests.mutants.mutant import mutant

FIT, FILL, STARTS = static_inputs.fit_widths, static_inputs._fill_bounded, worker.query_starts


@mutant("vLLM #57432: the padded width for the active one", "math.ragged_verify")
def every_request_has_the_largest_width(patch: pytest.MonkeyPatch) -> None:
    """Every request gets as many rows as the bound on one allows, whatever the device says."""
    patch.setattr(
        static_inputs,
        "fit_widths",
        lambda query, real: FIT(replace(query, widths=torch.full_like(query.widths, query.width)), real),
    )


@mutant("vLLM #57432: the padded width as a length", "math.ragged_verify", "math.ragged_cut")
def lengths_count_the_largest_width(patch: pytest.MonkeyPatch) -> None:
    """Keys of a request are counted with the bound on its rows, not with the rows that it has."""
    dense = ragged.dense_part

    def longer(step, forward=0):
        part = dense(step, forward)
        is_real = (step.seq_lens > 0) & (step.kind is StepKind.TARGET_VERIFY)
        return replace(part, kv_lens=torch.where(is_real, step.seq_lens.int() + step.width, part.kv_lens))

    patch.setattr(ragged, "dense_part", longer)


@mutant("SGLang #39287: gathered from offset 0 of the full row", "math.ragged_verify", "math.ragged_cut")
def slots_are_packed_from_the_first(patch: pytest.MonkeyPatch) -> None:
    """Rows write to the first of all slots that were reserved, not each request to its own."""
    fill = static_inputs.fill_rows

    def packed(static, query, widths, slots):
        fill(static, query, widths, slots)
        row, own = torch.arange(static.num_tokens, device=slots.device), static.out_cache_loc
        dense = slots[row.clamp(max=slots.shape[0] - 1)].to(own.dtype)
        own.copy_(torch.where(row < widths.sum(), dense, own))

    patch.setattr(static_inputs, "fill_rows", packed)


@mutant("a sum over the bucket", "math.ragged_cut")
def rows_behind_the_bound_go(patch: pytest.MonkeyPatch) -> None:
    """What is over the bound is taken from the last requests whole, roots too."""

    def first_come(query, real):
        ends = torch.where(real, query.widths.long().clamp(1, query.width), 0).cumsum(0).clamp(max=query.num_tokens)
        return torch.nn.functional.pad(ends, (1, 0)).diff()

    patch.setattr(static_inputs, "fit_widths", first_come)


@mutant("SGLang #21987: the host's widths, of the capture", "math.ragged_verify", graph=True)
def widths_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    """A replay has the widths that the host saw when it captured."""
    first = {}

    def once(query, real):
        seen = first.setdefault("widths", query.widths.clone())
        again = torch.arange(len(real), device=seen.device) % len(seen)
        return FIT(replace(query, widths=seen[again]), real)

    patch.setattr(static_inputs, "fit_widths", once)


@mutant("least confident rows first, of the wrong requests", "math.ragged_cut")
def earlier_requests_are_cut_first(patch: pytest.MonkeyPatch) -> None:
    """Of equally deep rows those of the earlier requests go."""
    patch.setattr(
        static_inputs,
        "fit_widths",
        lambda query, real: FIT(replace(query, widths=query.widths.flip(0)), real.flip(0)).flip(0),
    )


@mutant("a draft extend that pays for all rows", "math.ragged_draft_extend")
def rejected_rows_extend_the_draft(patch: pytest.MonkeyPatch) -> None:
    """A draft extend has and writes as many rows as the longest path, of tokens that were rejected too."""

    def whole(static, step, query):
        is_extend = step.kind is StepKind.DRAFT_EXTEND
        FILL(static, step, replace(query, widths=torch.full_like(query.widths, query.width)) if is_extend else query)

    patch.setattr(static_inputs, "_fill_bounded", whole)


@mutant("the state at the last row of a uniform layout", "serving.ragged_drafts")
def last_row_of_the_bound(patch: pytest.MonkeyPatch) -> None:
    """Drafts begin at the row where the bound on a request's rows ends, not where those that the device gives it do."""

    def of_the_bound(step):
        ends = torch.arange(step.bs + 1, dtype=torch.int32, device=step.device) * step.width
        return ends.clamp(max=step.num_tokens) if step.kind is StepKind.DRAFT_EXTEND else STARTS(step)

    patch.setattr(worker, "query_starts", of_the_bound)


@mutant("a random change of one token", "math.ragged_cut")
def padded_requests_have_a_token(patch: pytest.MonkeyPatch) -> None:
    """Requests that the device says are padding have a committed token."""

    def filled(static, step, query):
        FILL(static, step, query)
        static.seq_lens[: step.bs].clamp_(min=1)

    patch.setattr(static_inputs, "_fill_bounded", filled)
