"""Mutants of mixed batches: whose widths, slots, lengths and table rows a part gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from spec_metadata import BoundedQuery, RequestTable, Step, StepKind, mixed
from tests.mutants.blocks import read_stored_bytes
from tests.mutants.mutant import mutant


@mutant("vLLM #57432: the padded width for the active one, in a mixed batch", "math.mixed")
def mixed_requests_have_the_largest_width(patch: pytest.MonkeyPatch) -> None:
    """Every request of a mixed batch gets as many rows as the longest part allows."""
    joined = mixed._joined_query

    def padded(parts: Sequence[Step]) -> object:
        query = joined(parts)
        widths = isinstance(query, BoundedQuery) and torch.full_like(query.widths, query.width)
        return replace(query, widths=widths) if isinstance(query, BoundedQuery) else query

    patch.setattr(mixed, "_joined_query", padded)


@mutant("a sum over the bucket, at the expense of another part", "math.mixed")
def ragged_rows_push_out_a_chunk(patch: pytest.MonkeyPatch) -> None:
    """A ragged part is cut with the whole batch: the deepest rows go, which are a chunk's."""
    patch.setattr(mixed, "fit_widths", lambda query, real: query.widths)


@mutant("SGLang #39287: gathered from offset 0 of the full row, in a mixed batch", "math.mixed")
def mixed_slots_are_packed_from_the_first(patch: pytest.MonkeyPatch) -> None:
    """Rows write to the first of all slots, not each request to its own."""
    slots = mixed._joined_slots

    def packed(parts: Sequence[Step]) -> Tensor:
        dense, own = torch.cat([part.flat_slots().long() for part in parts]), slots(parts)
        own[: len(dense)] = dense
        return own

    patch.setattr(mixed, "_joined_slots", packed)


@mutant("decodes stand before chunks, their lengths after", "math.mixed")
def tables_are_reordered_alone(patch: pytest.MonkeyPatch) -> None:
    """Table rows are those of the batch with its decodes first; lengths and rows stay in the order of the parts."""
    joined = mixed._joined_paging
    patch.setattr(mixed, "_joined_paging", lambda tables: joined([*tables[1:2], *tables[:1], *tables[2:]]))


@mutant("lengths with the new token for lengths before it", "math.mixed")
def decodes_count_their_own_token(patch: pytest.MonkeyPatch) -> None:
    """The length of a decode has its own token, where the lengths of other parts have not."""
    make = mixed.Step

    def counted(kind: StepKind, query: object, lens: Tensor, paging: RequestTable, *rest: object, **host: object):
        is_decode = torch.arange(len(lens), device=lens.device) == 1
        return make(kind, query, lens + is_decode, paging, *rest, **host)

    patch.setattr(mixed, "Step", counted)


@mutant("our own: no mixed batch had an 8-bit cache", "math.mixed", backend="flashinfer_mla")
def mixed_batches_read_stored_bytes(patch: pytest.MonkeyPatch) -> None:
    """Mixed batches with a ragged part read an 8-bit cache without its scales."""
    plan, is_mixed = AttentionBackend.init_forward_metadata, [False]

    def looked_at(self: AttentionBackend, step: Step) -> Any:
        is_mixed[0] = isinstance(step.query, BoundedQuery) and step.query.most is not None
        return plan(self, step)

    patch.setattr(AttentionBackend, "init_forward_metadata", looked_at)
    read_stored_bytes(patch, lambda cache, meta: is_mixed[0])


@mutant("parts of two tables, read through the first", "refusals.mixed")
def any_parts_are_mixed(patch: pytest.MonkeyPatch) -> None:
    """Parts of a mixed batch are joined whatever they are."""
    patch.setattr(mixed, "mixed_reasons", lambda parts: [])


@mutant("a random change of one token", "math.mixed")
def one_part_has_no_slots(patch: pytest.MonkeyPatch) -> None:
    """A step that is mixed of one part leaves its slots out."""
    own = mixed._joined_slots
    patch.setattr(mixed, "_joined_slots", lambda parts: own(parts) if parts[1:] else None)
