"""Mutants of reports about compressed and selected keys; docs/real-bugs.md lists all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends import dsv4
from attn_backends.kernels import torch_compressed
from spec_metadata import Buffers, Step, StepKind
from spec_metadata.plans import compressed
from tests.mutants.compressed import change_entries
from tests.mutants.mutant import mutant


def change_selection(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Let change(slots, plan, num_visible, topk) -> slots follow every selection of an indexer."""
    select = dsv4._select

    def changed(index: Any, cache: Any, plan: Any, layer: Any) -> Tensor:
        num_visible = plan.entries[layer.compression.ratio].num_visible
        return change(select(index, cache, plan, layer), plan, num_visible.unsqueeze(1), layer.index_topk)

    patch.setattr(dsv4, "_select", changed)


@mutant("tokenspeed #207", "math.draft_decode", "laws.alone_or_in_a_batch", backend="dsv4")
def draft_window_of_another_request(patch: pytest.MonkeyPatch) -> None:
    """A draft row's window holds the tokens of the request before it, but for its own."""
    write = compressed.write_compressed

    def others(step: Step, buffers: Buffers, *rest: Any) -> None:
        write(step, buffers, *rest)
        if step.kind is StepKind.DRAFT_DECODE:
            window = buffers["window_slots"]
            window[..., 1:] = window[..., 1:].roll(1, dims=1)

    patch.setattr(compressed, "write_compressed", others)


@mutant("llama.cpp #26741", "compressed.rollback", backend="dsv4")
def states_of_the_first_request_alone(patch: pytest.MonkeyPatch) -> None:
    """Of requests that are verified together, the first alone leaves the states that a rejection goes back to."""

    def first(plan: Any, rows: Any, ratio: int) -> None:
        plan.state_writes.masked_fill_(rows.request > 0, -1)

    change_entries(patch, first)


@mutant("vLLM #57432", "math.decode", "math.target_verify", backend="dsv4")
def padded_keys_counted(patch: pytest.MonkeyPatch) -> None:
    """A list's padded width is taken for its length: what it holds after its keys weighs as scores of zero."""
    attend = torch_compressed.sparse_attention

    def counted(q: Tensor, keys: Tensor, visible: Tensor, scale: float, sinks: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, keys, visible, scale, sinks)
        hidden = (~visible).sum(dim=-1, keepdim=True)
        return out * torch.sigmoid(lse - hidden.log()).unsqueeze(-1), lse

    patch.setattr(torch_compressed, "sparse_attention", counted)


@mutant("vLLM #52512", "math.decode", "compressed.edges", backend="dsv4")
def indexer_skipped_where_all_entries_fit(patch: pytest.MonkeyPatch) -> None:
    """A row that sees no more entries than are selected is left to a dense path that is not there: it selects none."""
    change_selection(patch, lambda slots, plan, visible, topk: slots.masked_fill(visible <= topk, -1))


@mutant("vLLM #47629 (field report)", "math.target_verify", backend="dsv4")
def selection_of_a_request_s_first_row(patch: pytest.MonkeyPatch) -> None:
    """Where more entries are seen than are selected, all rows of a request take the selection of its first."""

    def of_first(slots: Tensor, plan: Any, visible: Tensor, topk: int) -> Tensor:
        first = plan.qo_indptr.long()[plan.request.long()].clamp(max=len(slots) - 1)
        return torch.where(visible > topk, slots[first], slots)

    change_selection(patch, of_first)
