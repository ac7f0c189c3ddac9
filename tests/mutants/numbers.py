"""Mutants that only numbers show which small worlds never reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import backend as base
from attn_backends.backend import AttentionBackend, Metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels import torch_attention
from attn_backends.planning.metadata import check_forward
from spec_metadata import Buffers, Capacity, InvalidStepError, PackedQuery, RequestTable, Step, StepKind
from spec_metadata.plans import ragged
from tests.mutants.mutant import mutant


@mutant("scores under 88 in float32", "math.large_scores")
def largest_score_not_subtracted(patch: pytest.MonkeyPatch) -> None:
    """A softmax of the scores as they are."""
    attend = torch_attention.attend

    def plain(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*arguments)
        total = lse.exp()
        return out * (total / total).nan_to_num(nan=0.0).unsqueeze(-1), total.log()

    patch.setattr(torch_attention, "attend", plain)


@mutant("log-sum-exp joins at large magnitudes", "math.large_scores")
def parts_joined_by_exponentials(patch: pytest.MonkeyPatch) -> None:
    """A tree's prefix and drafted tokens are weighted by the exponentials of their log-sum-exps."""

    def joined(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = lse_a.exp().unsqueeze(-1), lse_b.exp().unsqueeze(-1)
        out_a, out_b = (out.masked_fill(weight == 0, 0) for out, weight in ((out_a, a), (out_b, b)))
        return ((a * out_a + b * out_b) / (a + b)).nan_to_num(nan=0.0), torch.logaddexp(lse_a, lse_b)

    patch.setattr(torch_attention, "merge_states", joined)


@mutant("page ids in 16 bits", "cache.many_pages", backend="flashinfer_mla")
def page_ids_in_16_bits(patch: pytest.MonkeyPatch) -> None:
    """The number of a page is kept in 15 bits and a sign."""
    over_pages = torch_attention._over_pages

    def short(q: Tensor, lens: Tensor, k: Tensor, v: Tensor, pages: Tensor, *rest: Any) -> Any:
        return over_pages(q, lens, k, v, pages % 2**15, *rest)

    patch.setattr(torch_attention, "_over_pages", short)


@mutant("tables exactly as wide as the capacity", "math.narrow_tables")
def tables_as_wide_as_the_capacity(patch: pytest.MonkeyPatch) -> None:
    """A step whose table is narrower than the capacity is refused, though its requests are shorter."""
    check = base.check_table_room

    def asked(step: Step, capacity: Capacity) -> None:
        check(step, capacity)
        if step.kind is not StepKind.IDLE and step.paging.row_tokens < capacity.max_tokens:
            raise InvalidStepError(f"a table of {step.paging.row_tokens} tokens, not {capacity.max_tokens}")

    patch.setattr(base, "check_table_room", asked)


@mutant("poisoned table tails, never planned", "poison.planned_tails")
def tails_of_prompts_copied(patch: pytest.MonkeyPatch) -> None:
    """The plan of a prefill holds the table's row as it is, past the request's tokens too."""
    write = FA3Backend.write

    def whole_rows(self: Any, step: Step, buffers: Buffers) -> None:
        write(self, step, buffers)
        table = buffers["page_table"]
        if isinstance(step.query, PackedQuery) and step.kind is StepKind.PREFILL and table.shape[1]:
            pages = step.paging.pages(table.shape[1])
            table[:, : pages.shape[1]].copy_(pages)

    patch.setattr(FA3Backend, "write", whole_rows)


@mutant("uninitialised memory: what was allocated as zeros is taken for zeros", "poison.stale_buffers", graph=True)
def first_start_left_as_allocated(patch: pytest.MonkeyPatch) -> None:
    """The plan writes where queries end, and leaves the 0 that the first of them starts at to the allocation."""
    write = ragged.write_ragged

    def but_the_first(step: Step, buffers: Buffers) -> None:
        first = buffers["cu_seqlens_q"][..., :1].clone()
        write(step, buffers)
        buffers["cu_seqlens_q"][..., :1].copy_(first)

    patch.setattr(ragged, "write_ragged", but_the_first)


@mutant("an idle table of another width", "graph.idle_of_another_width", graph=True)
def idle_tables_of_one_width(patch: pytest.MonkeyPatch) -> None:
    """A graph refuses an idle step whose table is not as wide as that of its capture."""
    copy_inputs = AttentionBackend.copy_inputs

    def asked(self: Any, meta: Metadata, step: Step) -> None:
        ours, theirs = (each.paging.table.shape[1] for each in (meta.step, step))
        if step.kind is StepKind.IDLE and ours != theirs and not isinstance(step.paging, RequestTable):
            raise UnsupportedStepError(self.name, [f"{theirs} columns, not {ours}"])
        copy_inputs(self, meta, step)

    patch.setattr(AttentionBackend, "copy_inputs", asked)


@mutant("staleness asked of one entry point of many", "graph.stale_everywhere", graph=True)
def staleness_asked_by_at_alone(patch: pytest.MonkeyPatch) -> None:
    """`store` and `forward` take what another graph has overwritten since `at` was called."""
    patch.setattr(base, "check_forward", lambda backend, meta: check_forward(backend, replace(meta, captured=None)))


@mutant("staleness asked of one entry point of many", "graph.stale_everywhere", graph=True)
def stale_metadata_refreshed(patch: pytest.MonkeyPatch) -> None:
    """`refresh` plans into memory that another graph's metadata has now."""
    patch.setattr(AttentionBackend, "refresh", lambda self, meta: meta.write())
