"""Mutants by an author who had read the contract and the library, and none of the suite, its tests and its pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends import fa3, flashinfer_mla, trtllm_mla
from spec_metadata import BoundStep, Buffers, Step, StepKind, UniformQuery
from spec_metadata.capacity import ceil_div
from spec_metadata.plans import block_table, compressed, csr, ragged
from spec_metadata.visibility import DensePart, dense_part, num_visible_pages, visible_pages, write_pages
from tests.mutants.mutant import mutant

BLIND, LISTS = "an author who had not read the suite", ("kv_indices", "kv_indptr")


@mutant(BLIND, "math.window", "math.window_and_sinks")
def tree_window_by_node_number(patch: pytest.MonkeyPatch) -> None:
    """In a windowed tree verify a node's number is taken for its depth: its window begins too late."""
    windowed = fa3.windowed

    def by_number(window: Any, drafted: Any) -> Any:
        if window is None or not isinstance(drafted, torch.Tensor):
            return windowed(window, drafted)
        bs, width, _ = drafted.shape
        return window, torch.arange(1, width + 1, dtype=torch.int32, device=drafted.device).repeat(bs)

    patch.setattr(fa3, "windowed", by_number)


@mutant(BLIND, "math.ragged_verify", "math.ragged_draft_extend", "math.ragged_cut", graph=True)
def page_row_kept_while_it_grows(patch: pytest.MonkeyPatch) -> None:
    """A row of the page table is not rewritten where its length grew within a page: it may be another request's."""

    def write(self: Any, step: Step, buffers: Buffers) -> None:
        old, table = buffers["seqused_k"][-1].clone(), buffers["page_table"].clone()
        ragged.write_ragged(step, buffers)
        new, page_size = buffers["seqused_k"][-1], buffers.extent.page_size
        kept = (old > step.width) & (new > old) & (new <= old + step.width)  # rows of padding see `width` keys
        kept &= (new - 1) // page_size == (old - 1) // page_size
        buffers["page_table"].copy_(torch.where(kept.unsqueeze(1), table, buffers["page_table"]))

    patch.setattr(fa3.FA3Backend, "write", write)


@mutant(BLIND, "graph.planned_ahead", "streams.planned_beside_a_graph", backend="flashinfer_mla", graph=True)
def compact_lists_in_a_shared_table(patch: pytest.MonkeyPatch) -> None:
    """Page lists in a table that captured phases share have no gaps, so planning one phase moves another's lists."""
    write = csr.write_csr

    def compact(step: Step, buffers: Buffers) -> None:
        write(step, buffers)
        dense, most, flat, starts = dense_part(step, None), buffers.extent.max_pages, *(buffers[name] for name in LISTS)
        starts.copy_(torch.nn.functional.pad(num_visible_pages(step, dense).cumsum(0), (1, 0)))
        request = torch.searchsorted(starts[1:].long(), entry := torch.arange(flat.numel()), right=True)
        place = request.clamp(max=step.bs - 1), (entry - starts[request]).clamp(0, most - 1)
        flat.copy_(torch.where(entry < starts[-1], visible_pages(step, dense, most)[place], flat))

    patch.setattr(csr, "write_csr", lambda step, buffers: (compact if step.bs else write)(step, buffers))


@mutant(BLIND, "api.kinds_in_turn", backend="flashinfer_mla")
def lengths_of_the_last_plan(patch: pytest.MonkeyPatch) -> None:
    """The kernel reads the lengths of the last step that was planned for the same number of requests."""
    last, write, attend = dict[int, Tensor](), csr.write_csr, flashinfer_mla.csr_attention

    def remember(step: Step, buffers: Buffers) -> None:
        write(step, buffers)
        last[step.bs] = buffers["kv_len"]

    def from_wrapper(*arguments: Any, **given: Any) -> Any:
        *lists, kv_len = arguments
        return attend(*lists, last.get(kv_len.shape[0], kv_len), **given)

    patch.setattr(csr, "write_csr", remember)
    patch.setattr(flashinfer_mla, "csr_attention", from_wrapper)


@mutant(BLIND, "math.draft_decode", backend="trtllm_mla")
def table_of_the_first_forward(patch: pytest.MonkeyPatch) -> None:
    """All forwards of a draft get the pages of the first one, though a chain may grow into another page."""

    def write(step: Step, buffers: Buffers) -> None:
        for forward, lens in enumerate(buffers["cache_seqlens"].unbind()):
            lens.copy_(dense_part(step, forward).kv_lens)
        write_pages(step, dense_part(step, 0), buffers["block_table"][:, : buffers.extent.max_pages])

    patch.setattr(block_table, "write_block_table", write)


@mutant(BLIND, "api.layers_of_one_step", "graph.layers_of_one_step", backend="trtllm_mla", graph=True)
def scale_of_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    """The scales of the first layer that attends by a plan are used for the layers after it."""
    attend, folded = trtllm_mla.block_table_attention, dict[str, Any]()

    def attend_folded(q: Tensor, k: Tensor, v: Tensor, table: Tensor, cache_seqlens: Tensor, **given: Any) -> Any:
        if folded.get("plan") is not cache_seqlens:
            folded.update(plan=cache_seqlens, scales={name: given[name] for name in ("k_scale", "v_scale")})
        return attend(q, k, v, table, cache_seqlens, **given | folded["scales"])

    patch.setattr(trtllm_mla, "block_table_attention", attend_folded)


@mutant(BLIND, "math.cache_types", "compressed.short_blocks", backend="dsv4")
def ring_across_pages(patch: pytest.MonkeyPatch) -> None:
    """A row's state is not written if the forward has a row one ring later, though that lies in another page's ring."""
    write = compressed._write_entries

    def across_pages(plan: Any, compression: Any, ring: Any, rows: Any) -> None:
        write(plan, compression, ring, rows)
        replaced = rows.position + ring < rows.end[rows.request]
        plan.state_writes.copy_(torch.where(replaced, -1, plan.state_writes))

    patch.setattr(compressed, "_write_entries", across_pages)


@mutant(BLIND, "plan.padding", "math.decode", backend="dsv4", graph=True)
def entries_of_the_last_replay(patch: pytest.MonkeyPatch) -> None:
    """A row that closes no entry keeps the slot of the last replay, so an old entry is overwritten."""
    write = compressed._write_made

    def only_live(plan: Any, compression: Any, ring: Any, rows: Any) -> None:
        old = plan.write_slots.clone()
        write(plan, compression, ring, rows)
        plan.write_slots.copy_(torch.where(plan.write_slots < 0, old, plan.write_slots))

    patch.setattr(compressed, "_write_made", only_live)


@mutant(BLIND, "math.prefill")
def tables_for_the_mean_prompt(patch: pytest.MonkeyPatch) -> None:
    """A bounded eager packed step has pages for the mean number of rows, not for the longest request's."""
    extent = Step.extent

    def for_the_mean(self: Step, capacity: Any) -> Any:
        right = extent(self, capacity)
        if isinstance(self.query, UniformQuery) or self.max_committed is None:
            return right
        room = max(right.num_writes // max(self.bs, 1), capacity.draft_room)
        pages = ceil_div(self.max_committed + room, capacity.page_size)
        return right._replace(max_pages=min(right.max_pages, pages))

    patch.setattr(Step, "extent", for_the_mean)


@mutant(BLIND, "graph.bound_ragged", graph=True)
def ragged_lengths_less_the_bound(patch: pytest.MonkeyPatch) -> None:
    """From bound lengths that include ragged rows, the bound on rows is subtracted, not each request's own number."""
    committed = BoundStep._committed

    def less_the_bound(self: BoundStep) -> Tensor:
        if self.inputs.widths is None or not self.inputs.lens_include_rows:
            return committed(self)
        return self.inputs.seq_lens.long() - self.static.width

    patch.setattr(BoundStep, "_committed", less_the_bound)


@mutant(BLIND, "graph.bound_ragged", graph=True)
def starts_kept_for_as_many_rows(patch: pytest.MonkeyPatch) -> None:
    """A replay keeps cu_seqlens_q of the last one if both have the same numbers of requests and rows."""

    def write(self: Any, step: Step, buffers: Buffers) -> None:
        (starts, old), lens = (buffers["cu_seqlens_q"], buffers["cu_seqlens_q"].clone()), buffers["seqused_k"].sum()
        ragged.write_ragged(step, buffers)
        real = (torch.arange(len(old), device=old.device) <= step.num_real) & (lens > 0)
        last = (real.sum() - 1).clamp_min(0).view(1)
        starts.copy_(torch.where(real & (old.gather(0, last) == starts.gather(0, last)), old, starts))

    patch.setattr(fa3.FA3Backend, "write", write)


@mutant(BLIND, "math.draft_block")
def block_without_a_prefix_is_padding(patch: pytest.MonkeyPatch) -> None:
    """In a draft block, a request that has no more keys than rows is taken for padding: its output is zeros."""
    attend = fa3.page_table_attention

    def skipping(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, table: Tensor, lens: Tensor, **given: Any) -> Any:
        out, lse = attend(q, k, v, starts, table, lens, **given)
        padded = (lens <= starts.diff()).repeat_interleave(q.shape[0] // max(len(lens), 1))
        return out if given["causal"] else torch.where(padded.view(-1, 1, 1), 0, out), lse

    patch.setattr(fa3, "page_table_attention", skipping)


@mutant(BLIND, "math.draft_block", backend="trtllm_mla")
def block_has_the_pages_of_its_root(patch: pytest.MonkeyPatch) -> None:
    """A draft block's table ends with the page of its first row, so rows on the next page read a wrong one."""

    def of_the_root(step: Step, dense: DensePart, table: Tensor) -> None:
        less = step.width - 1 if step.kind is StepKind.DRAFT_BLOCK else 0
        write_pages(step, replace(dense, kv_lens=dense.kv_lens - less), table)

    patch.setattr(block_table, "write_pages", of_the_root)


@mutant(BLIND, "math.ragged_verify", backend="flashinfer_mla")
def packed_lengths_end_at_the_context(patch: pytest.MonkeyPatch) -> None:
    """Lengths of packed rows are clamped to max_context: drafted rows after a full context lose keys."""

    def write(self: Any, step: Step, buffers: Buffers) -> None:
        csr.write_csr(step, buffers)
        if not isinstance(step.query, UniformQuery):
            buffers["kv_len"].clamp_(max=self.capacity.max_context)

    patch.setattr(flashinfer_mla.FlashInferMLABackend, "write", write)
