"""Mutants of what a row sees: lengths, causality, trees, page lists and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends import backend as base
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.kernels import torch_attention
from attn_backends.planning import metadata
from spec_metadata import BlockTable, BufferSpec, Capacity, Extent, PackedQuery, RequestTable, Step, StepKind
from spec_metadata.plans import block_table, csr, ragged, slots
from spec_metadata.visibility import (
    DensePart,
    TreePart,
    chain_parts,
    dense_part,
    query_starts,
    tree_part,
    write_pages,
)
from tests.mutants.mutant import mutant


def change_lengths(patch: pytest.MonkeyPatch, change: Callable[[Step, int, Tensor], Tensor]) -> None:
    """Let every plan see changed lengths. change: (step, forward, kv_lens) -> kv_lens."""

    def changed(step: Step, forward: int | None = 0) -> DensePart:
        dense = dense_part(step, forward)
        return replace(dense, kv_lens=change(step, forward, dense.kv_lens))

    for module in (csr, block_table, ragged, slots):
        patch.setattr(module, "dense_part", changed)


@mutant("SGLang 0.5.23: TRTLLM-MLA, FlashMLA and FlashInfer-MLA eager", "math.draft_decode", backend="trtllm_mla")
def draft_length_not_advanced(patch: pytest.MonkeyPatch) -> None:
    """Every draft forward sees the committed keys only, not even its own."""
    drafts = StepKind.DRAFT_DECODE
    change_lengths(patch, lambda step, i, lens: lens - (i + 1) if step.kind is drafts and not step.is_tree else lens)


@mutant(
    "SGLang 0.5.23: FlashInfer-MLA multi-step replay",
    "math.draft_decode",
    "laws.permuted_requests",
    "laws.alone_or_in_a_batch",
    backend="flashinfer_mla",
)
def rows_walked_by_other_lengths(patch: pytest.MonkeyPatch) -> None:
    """CSR rows are packed by the committed lengths and walked by the advanced ones."""

    def walked(self: FlashInferMLABackend, step: Step, buffers: base.Buffers) -> None:
        csr.write_csr(step, buffers)
        if step.kind is StepKind.DRAFT_DECODE:
            page_size = buffers.extent.page_size
            pages = (step.seq_lens + step.num_steps + page_size - 1) // page_size
            buffers["kv_indptr"][1:].copy_(pages.cumsum(0))

    patch.setattr(FlashInferMLABackend, "write", walked)


@mutant("an off-by-one of the drafted keys that are read by slot", "math.draft_decode", backend="flashinfer_mla")
def drafted_chain_one_key_short(patch: pytest.MonkeyPatch) -> None:
    """A forward of a drafted chain reads all that was drafted but its own key."""

    def short(step: Step, own: Tensor | None) -> list[TreePart]:
        parts = [replace(part, mask=part.mask.clone()) for part in chain_parts(step, own)]
        for part in parts:
            part.mask[..., -1] = False
        return parts

    patch.setattr(base, "chain_parts", short)


@mutant(
    "SGLang FA3 draft extend V2, about 82 % of the output wrong (KNOWN_FAILURES C.3)",
    "math.draft_extend",
    "math.packed_draft_extend",
)
def extend_sees_prefix_only(patch: pytest.MonkeyPatch) -> None:
    """A draft extend takes the committed length for the whole length."""
    extends = StepKind.DRAFT_EXTEND
    change_lengths(patch, lambda step, _, lens: step.seq_lens.int() if step.kind is extends else lens)


@mutant("an off-by-one of the draft loop", "math.draft_decode")
def draft_sees_one_key_less(patch: pytest.MonkeyPatch) -> None:
    """Draft forward i sees all keys but its own."""
    drafts = StepKind.DRAFT_DECODE
    change_lengths(patch, lambda step, _, lens: lens - 1 if step.kind is drafts and not step.is_tree else lens)


@mutant(
    "SGLang #12295: the KV length did not count what the queries add",
    "math.target_verify",
    "laws.chain_verify_is_repeated_decode",
    "poison.unowned_finite",
)
def verify_sees_one_key_more(patch: pytest.MonkeyPatch) -> None:
    """Verify rows see one key too many: the last row reads an uninitialised slot."""
    verifies = StepKind.TARGET_VERIFY
    change_lengths(patch, lambda step, _, lens: lens + 1 if step.kind is verifies else lens)


@mutant(
    "causal masks of FlashAttention 2.0 against 2.1",
    "math.prefill",
    "math.target_verify",
    "laws.chain_verify_is_repeated_decode",
)
def causal_from_the_top_left(patch: pytest.MonkeyPatch) -> None:
    """Row j sees j + 1 keys of the request, as if nothing were cached."""
    over_pages = torch_attention._over_pages

    def top_left(q, lens, k, v, pages, kv_lens, causal, *scales):
        return over_pages(q, lens, k, v, pages, lens if causal else kv_lens, causal, *scales)

    patch.setattr(torch_attention, "_over_pages", top_left)


@mutant("a tree verified as if it were a chain", "math.target_verify", "laws.tree_verify_is_each_path")
def verify_mask_ignored(patch: pytest.MonkeyPatch) -> None:
    """Every tree node sees all nodes before it."""

    def chain(step: Step, forward: int = 0, ancestors: Tensor | None = None) -> TreePart | None:
        part = tree_part(step, forward, ancestors)
        if part is None or step.kind is not StepKind.TARGET_VERIFY:
            return part
        return replace(part, mask=torch.ones_like(part.mask).tril())

    patch.setattr(metadata, "tree_part", chain)


@mutant("sibling branches of a draft see each other", "math.draft_decode")
def siblings_visible(patch: pytest.MonkeyPatch) -> None:
    """A draft row sees whatever any branch has drafted so far."""

    def siblings(step: Step, forward: int = 0, ancestors: Tensor | None = None) -> TreePart | None:
        part = tree_part(step, forward, ancestors)
        if part is None or step.kind is not StepKind.DRAFT_DECODE:
            return part
        return replace(part, mask=part.mask.any(dim=1, keepdim=True).expand_as(part.mask))

    patch.setattr(metadata, "tree_part", siblings)


@mutant("SGLang #7239: wrong trees for two requests and more", "math.draft_decode")
def tree_table_transposed(patch: pytest.MonkeyPatch) -> None:
    """The slots of a draft tree are read as (step, branch), not (branch, step)."""

    def transposed(step: Step, forward: int = 0, ancestors: Tensor | None = None) -> TreePart | None:
        part = tree_part(step, forward, ancestors)
        if part is None or step.kind is not StepKind.DRAFT_DECODE:
            return part
        by_step = part.slots.view(step.bs, step.num_steps, step.width)
        return replace(part, slots=by_step.transpose(1, 2).reshape(step.bs, -1))

    patch.setattr(metadata, "tree_part", transposed)


@mutant(
    "SGLang 0.5.23: `total_tokens % bs == 0` taken for uniform lengths (trtllm_mla_backend.py:1586)", "math.prefill"
)
def divisible_taken_for_uniform(patch: pytest.MonkeyPatch) -> None:
    """A packed query whose rows divide evenly among the requests is read at one stride."""

    def starts(step: Step) -> Tensor:
        if isinstance(step.query, PackedQuery) and step.num_tokens % step.bs == 0:
            width = step.num_tokens // step.bs
            return torch.arange(step.bs + 1, dtype=torch.int32, device=step.device) * width
        return query_starts(step)

    patch.setattr(ragged, "query_starts", starts)


@mutant("token ids used where page ids belong", "math.decode", "math.target_verify")
def slots_taken_for_pages(patch: pytest.MonkeyPatch) -> None:
    """Page lists hold slots; wrapped to the pool, where a GPU would read past it."""

    def not_divided(self: RequestTable, num_pages: int) -> Tensor:
        first_slots = self.table[:, : num_pages * self.geometry.page_size : self.geometry.page_size]
        return first_slots.index_select(0, self.rows).long() % self.geometry.num_pages

    patch.setattr(RequestTable, "pages", not_divided)


@mutant("FA3 and FlashInfer-MLA paths that assume tidy pages", "laws.relabelled_pages", "math.decode")
def pages_taken_for_neighbours(patch: pytest.MonkeyPatch) -> None:
    """A request's pages are taken to follow its first one."""
    for paging in (RequestTable, BlockTable):
        pages = paging.pages

        def tidy(self: RequestTable | BlockTable, num_pages: int, pages: Callable = pages) -> Tensor:
            first = pages(self, num_pages)[:, :1]
            return (first + torch.arange(num_pages, device=first.device)) % self.geometry.num_pages

        patch.setattr(paging, "pages", tidy)


@mutant("SGLang 0.5.23, its MLA tables: -1 past the visible pages", "plan.declared_buffers", backend="trtllm_mla")
def table_padded_with_minus_one(patch: pytest.MonkeyPatch) -> None:
    """Tables hold -1 past the visible pages, which no declaration allows and a kernel may follow."""

    def minus_one(step: Step, dense: DensePart, table: Tensor) -> None:
        table.fill_(-1)
        write_pages(step, dense, table)

    patch.setattr(block_table, "write_pages", minus_one)


@mutant("vLLM #43682 and #51318: padded rows told by what their table holds", "poison.table_tail")
def tail_of_the_table_read(patch: pytest.MonkeyPatch) -> None:
    """A request with an unknown page anywhere in its row is taken for padding."""

    def known(step: Step, forward: int, lens: Tensor) -> Tensor:
        pages = step.paging.pages(step.paging.row_tokens // step.paging.geometry.page_size)
        return torch.where((pages < step.paging.geometry.num_pages).all(dim=1), lens, step.width)

    change_lengths(patch, known)


@mutant(
    "a backend that is right at batch size 1 only",
    "math.decode",
    "laws.alone_or_in_a_batch",
    "laws.permuted_requests",
)
def first_length_for_all(patch: pytest.MonkeyPatch) -> None:
    """Every request has the length of the first."""
    change_lengths(patch, lambda step, forward, lens: lens[:1].expand_as(lens))


def context_pages(capacity: Capacity) -> int:
    """Pages of the context alone."""
    return -(-capacity.max_context // capacity.page_size)


@mutant("SGLang #34239: tables of ceil(context / page) columns, lengths of context + drafts", "math.target_verify")
def eager_table_without_draft_room(patch: pytest.MonkeyPatch) -> None:
    """Eager tables end at the context; what is drafted past it is not seen."""
    extent = Step.extent

    def short(self: Step, capacity: Capacity) -> Extent:
        whole = extent(self, capacity)
        return whole._replace(max_pages=min(whole.max_pages, context_pages(capacity)))

    patch.setattr(Step, "extent", short)


@mutant("SGLang #29695: graph buffers sized by the context", "math.target_verify", graph=True)
def graph_table_without_draft_room(patch: pytest.MonkeyPatch) -> None:
    """The buffers of a graph end at the context, not at the table's capacity."""
    of_bucket = Extent.of_bucket

    def short(bucket: base.Bucket, capacity: Capacity, *rest: int) -> Extent:
        return of_bucket(bucket, capacity, *rest)._replace(max_pages=context_pages(capacity))

    patch.setattr(Extent, "of_bucket", short)


@mutant("SGLang #27460 and #27338: buffers without the factor topk", "math.draft_extend")
def draft_room_without_topk(patch: pytest.MonkeyPatch) -> None:
    """Buffers have room for num_steps drafted tokens, whatever topk."""
    for name in ("draft_room", "max_tokens", "max_pages", "max_kv_len"):  # those before it are kept once computed
        patch.setattr(Capacity, name, property(getattr(Capacity, name).func))
    patch.setattr(Capacity, "draft_room", property(lambda self: self.num_steps))
    patch.setattr(base, "check_table_room", lambda step, capacity: None)


@mutant("our own, by a random change of one token", "plan.declared_buffers", backend="dsv4")
def padding_outside_its_range(patch: pytest.MonkeyPatch) -> None:
    """Slots of a window are declared to be padded with -2, and to be -1 at least."""
    buffers = DSV4Backend.buffers.__func__  # type: ignore[attr-defined]

    def declared(cls: type[DSV4Backend], kind: StepKind) -> tuple[BufferSpec, ...]:
        return tuple(replace(s, pad=-2) if s.name == "window_slots" else s for s in buffers(cls, kind))

    patch.setattr(DSV4Backend, "buffers", classmethod(declared))
