"""Mutants of capture and replay: what is frozen, moved, shared, or refreshed in part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend, Metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.graphs import is_capturing
from attn_backends.memory import phases
from attn_backends.planning import planners
from attn_backends.planning.captured import Captured
from spec_metadata import (
    Arena,
    Bucket,
    Buffers,
    Extent,
    PackedQuery,
    Paging,
    Step,
    StepKind,
    UniformQuery,
    static_inputs,
)
from spec_metadata.buffers import Layout
from spec_metadata.plans import ragged
from spec_metadata.visibility import DensePart, visible_pages
from tests.mutants.mutant import mutant


def after_refresh(patch: pytest.MonkeyPatch, backend: type[AttentionBackend], spoil: Any) -> None:
    """Let spoil(metadata) follow every planning of a replay."""
    refresh = backend.refresh

    def spoilt(self: AttentionBackend, meta: Metadata) -> None:
        refresh(self, meta)
        spoil(meta)

    patch.setattr(backend, "refresh", spoilt)


@mutant(
    "SGLang #21987: uniform stride at capture, accept lengths at replay",
    "math.draft_extend",
    "graph.equals_eager",
    backend="reference",
    graph=True,
)
def replay_packs_rows(patch: pytest.MonkeyPatch) -> None:
    """A replay spreads the rows over the requests by accept lengths."""

    def packed(meta: Metadata) -> None:
        bs, width, rows = meta.step.bs, meta.step.width, meta.buffers["request"]
        accepted = torch.arange(bs, device=rows.device) % width + 1
        of_row = torch.searchsorted(accepted.cumsum(0), torch.arange(bs * width, device=rows.device), right=True)
        rows.copy_(of_row.clamp(max=bs - 1).expand_as(rows))

    after_refresh(patch, ReferenceBackend, packed)


@mutant(
    "SGLang #19807 and #21212: accept lengths at replay",
    "math.draft_extend",
    "graph.equals_eager",
    backend="flashinfer_mla",
    graph=True,
)
def replay_counts_accepted_keys(patch: pytest.MonkeyPatch) -> None:
    """Lengths count the uniform width at capture and the accepted rows alone at replay."""

    def accepted(meta: Metadata) -> None:
        lens = meta.buffers["kv_len"]
        lens -= torch.arange(meta.step.bs, dtype=lens.dtype, device=lens.device) % meta.step.width

    after_refresh(patch, AttentionBackend, accepted)


@mutant("a host maximum taken at capture", "math.decode", "math.target_verify", graph=True)
def longest_length_frozen(patch: pytest.MonkeyPatch) -> None:
    """The kernel reads as many pages as the longest request had when the plan was made, a number that a graph keeps."""

    def cut(self: FA3Backend, step: Step, buffers: Buffers) -> list[ragged.RaggedPlan]:
        longest = int(buffers["seqused_k"].max()) if step.bs else 0
        pages = buffers["page_table"][:, : -(-longest // buffers.extent.page_size)]
        return [replace(plan, page_table=pages) for plan in ragged.view_ragged(step, buffers)]

    patch.setattr(FA3Backend, "plans", cut)


@mutant(
    "SGLang #27664: new tensors at every replay",
    "graph.stable_addresses",
    "graph.keeps_no_memory",
    "math.decode",
    graph=True,
)
def replay_rebinds_tensors(patch: pytest.MonkeyPatch) -> None:
    """A replay plans into fresh tensors; the graph still reads the old ones."""

    def rebind(self: AttentionBackend, meta: Metadata) -> None:
        fresh = Buffers({name: tensor.clone() for name, tensor in meta.buffers.items()}, meta.buffers.extent)
        planners.bind_torch(self.write, meta.step, fresh, None)()
        object.__setattr__(meta, "plans", self.plans(meta.step, fresh))
        object.__setattr__(meta, "buffers", fresh)

    patch.setattr(AttentionBackend, "refresh", rebind)


@mutant(
    "vLLM #41162 and #46849: the plan of a draft graph is not advanced",
    "math.draft_decode",
    "graph.equals_eager",
    graph=True,
)
def replay_plans_first_forward_only(patch: pytest.MonkeyPatch) -> None:
    """In a replay every draft forward has the plan of the first."""

    def first(meta: Metadata) -> None:
        lens = meta.buffers["seqused_k"]
        lens.copy_(lens[:1].expand_as(lens).clone())

    after_refresh(patch, AttentionBackend, first)


@mutant("a backend whose replay does nothing", "graph.captured_batch", "graph.sequence", "math.decode", graph=True)
def replay_does_nothing(patch: pytest.MonkeyPatch) -> None:
    """A replay leaves the metadata as it was captured."""
    patch.setattr(AttentionBackend, "replay", lambda self, meta, step: None)


@mutant("SGLang #39825: the graph of the metadata froze a plan that the host fed", "graph.refresh_recorded", graph=True)
def recorded_plan_frozen(patch: pytest.MonkeyPatch) -> None:
    """`replay` plans; `refresh`, which a graph may record, does nothing."""

    def replay(self: AttentionBackend, meta: Metadata, step: Step) -> None:
        self.copy_inputs(meta, step)
        meta.write()

    patch.setattr(AttentionBackend, "replay", replay)
    patch.setattr(AttentionBackend, "refresh", lambda self, meta: None)


@mutant("SGLang #26521: lengths not seeded at capture", "graph.captured_batch", graph=True)
def first_replay_lost(patch: pytest.MonkeyPatch) -> None:
    """The replay before the capture is dropped, as if the graph's first batch did not matter."""
    replay, seen = AttentionBackend.replay, set[int]()

    def late(self: AttentionBackend, meta: Metadata, step: Step) -> None:
        if id(meta.buffers) in seen:
            replay(self, meta, step)
        seen.add(id(meta.buffers))

    patch.setattr(AttentionBackend, "replay", late)


@mutant("SGLang #33892: idle batches", "graph.idle", "graph.sequence", graph=True)
def idle_replay_skipped(patch: pytest.MonkeyPatch) -> None:
    """A replay without requests does nothing, and the graph runs the batch before once more."""
    replay = AttentionBackend.replay

    def busy(self: AttentionBackend, meta: Metadata, step: Step) -> None:
        if step.kind is not StepKind.IDLE:
            replay(self, meta, step)

    patch.setattr(AttentionBackend, "replay", busy)


def keep_captures(patch: pytest.MonkeyPatch, key: Callable[[Bucket], object]) -> None:
    """Let a capture take the place of the one before with its key, whose plan then stays as it was captured."""
    kept: dict[object, Metadata] = {}
    planned: dict[int, dict[str, Tensor]] = {}
    capture, refresh = AttentionBackend.capture, AttentionBackend.refresh

    def keeping(self: AttentionBackend, bucket: Bucket, paging: Paging, **options: Any) -> Metadata:
        meta = kept[key(bucket)] = capture(self, bucket, paging, **options)
        names = [spec.name for spec in self.buffers(bucket.kind)]
        planned[id(meta.buffers)] = {name: meta.buffers[name].clone() for name in names}
        return meta

    def planning(self: AttentionBackend, meta: Metadata) -> None:
        if meta is kept[key(meta.bucket)]:
            return refresh(self, meta)
        for name, tensor in planned[id(meta.buffers)].items():
            meta.buffers[name].copy_(tensor)

    patch.setattr(AttentionBackend, "capture", keeping)
    patch.setattr(AttentionBackend, "refresh", planning)


@mutant("SGLang 0.5.23: metadata of captures kept under the batch size alone", "graph.two_kinds", graph=True)
def captures_kept_by_batch_size(patch: pytest.MonkeyPatch) -> None:
    """A graph's metadata is replaced by the next capture of its batch size, of another kind, and not planned again."""
    keep_captures(patch, lambda bucket: bucket.bs)


@mutant("SGLang 0.5.23: metadata of captures kept under a part of their key", "graph.two_buckets", graph=True)
def captures_kept_by_kind(patch: pytest.MonkeyPatch) -> None:
    """A graph's metadata is replaced by the next capture of its kind, at another batch size, and not planned again."""
    keep_captures(patch, lambda bucket: bucket.kind)


@mutant("phases whose buffers lie over each other", "graph.planned_ahead", graph=True)
def phases_over_each_other(patch: pytest.MonkeyPatch) -> None:
    """All phases are given one memory, as if each were planned right before its graph."""
    arena, blocks = phases.Arena, dict[torch.device, Tensor]()

    def over(specs: Any, largest: Extent, device: torch.device, **options: Any) -> Arena:
        if any(spec.name == "write_slots" for spec in specs):
            block = torch.empty(2**26, dtype=torch.uint8, device=device)
            options["memory"] = blocks.setdefault(torch.device(device), block)
        return arena(specs, largest, device, **options)

    patch.setattr(phases, "Arena", over)


@mutant("a table of all phases, padded after one's own pages", "graph.planned_ahead", graph=True)
def shared_table_padded(patch: pytest.MonkeyPatch) -> None:
    """A planner pads the rest of a row, which a longer phase of the same request sees."""

    def padded(step: Step, dense: DensePart, table: Tensor) -> None:
        table.copy_(visible_pages(step, dense, table.shape[1]))

    patch.setattr(ragged, "write_pages", padded)


@mutant("metadata that another replay has overwritten, used all the same", "graph.stale_is_refused", graph=True)
def stale_metadata_taken(patch: pytest.MonkeyPatch) -> None:
    """It is not checked which bucket of a phase was planned last."""
    patch.setattr(Captured, "check_phase", lambda self: None)


@mutant("planning in the graph, left out of it", "graph.refresh_recorded", "runner.planned_in_graph", graph=True)
def recorded_refresh_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What a graph is to plan is planned at its capture, and not recorded."""
    refresh = AttentionBackend.refresh
    patch.setattr(AttentionBackend, "refresh", lambda self, meta: None if is_capturing() else refresh(self, meta))


@mutant(
    "SGLang #26019 and #26056: a fresh tensor where a copy in place was needed", "graph.owns_its_inputs", graph=True
)
def tree_mask_aliased(patch: pytest.MonkeyPatch) -> None:
    """A replay lets the tree mask be the caller's tensor; a CUDA graph still reads the one of its capture."""
    copy_step = planners.copy_step

    def aliased(static: Step, step: Step) -> None:
        mask = static.tree_mask
        before = None if mask is None else mask.clone()
        copy_step(static, step)
        if mask is not None and step.bs == static.bs:
            mask.copy_(before)
            mask.set_(step.tree_mask)

    patch.setattr(planners, "copy_step", aliased)


@mutant("SGLang #30916: a batch larger than the graph", "graph.larger_than_bucket", graph=True)
def larger_batch_cut(patch: pytest.MonkeyPatch) -> None:
    """A batch larger than the graph is accepted, and its last requests are dropped."""
    copy_inputs = AttentionBackend.copy_inputs

    def cut(self: AttentionBackend, meta: Metadata, step: Step) -> None:
        bs, writes = meta.step.bs, step.flat_slots()[: meta.step.num_writes]
        if step.bs > bs and step.tree_mask is None:
            paging = step.paging.on_static(step.paging.static_input()[:bs])
            real = min(int(step.num_real), bs)
            step = replace(step, seq_lens=step.seq_lens[:bs], paging=paging, out_cache_loc=writes, num_real=real)
        copy_inputs(self, meta, step)

    patch.setattr(AttentionBackend, "copy_inputs", cut)


@mutant(
    "SGLang 0.5.23: `total_tokens % bs == 0` taken for uniform lengths, in a graph",
    "graph.packed_is_not_uniform",
    graph=True,
)
def divisible_replayed_as_uniform(patch: pytest.MonkeyPatch) -> None:
    """A packed query whose rows divide evenly among the requests is taken by a graph of one width."""
    copy_inputs = AttentionBackend.copy_inputs

    def viewed(self: AttentionBackend, meta: Metadata, step: Step) -> None:
        if isinstance(step.query, PackedQuery) and step.num_tokens % step.bs == 0:
            step = replace(step, query=UniformQuery(step.num_tokens // step.bs))
        copy_inputs(self, meta, step)

    patch.setattr(AttentionBackend, "copy_inputs", viewed)


@mutant(
    "SGLang #27460: kv_indices without the factor topk, written past its end",
    "graph.guards",
    backend="flashinfer_mla",
)
def plan_writes_past_its_buffer(patch: pytest.MonkeyPatch) -> None:
    """A plan writes one word more than its buffer was declared to hold."""
    write = FlashInferMLABackend.write

    def longer(self: FlashInferMLABackend, step: Step, buffers: Buffers) -> None:
        write(self, step, buffers)
        for phase in self.phases._phases.values() if self.checking else ():
            whole = phase.arenas[0]._full["kv_indices"]
            whole.as_strided((1,), (1,), whole.storage_offset() + whole.numel()).zero_()

    patch.setattr(FlashInferMLABackend, "write", longer)


@mutant("SGLang #28569: stale rows when a batch grows or shrinks", "math.decode", "graph.sequence", graph=True)
def number_of_requests_frozen(patch: pytest.MonkeyPatch) -> None:
    """A graph keeps the number of requests of its first replay; later ones are cut or padded to it."""
    fill = static_inputs._fill

    def kept(static: Step, step: Step | None) -> None:
        first = static.num_real.clone()
        fill(static, step)
        static.num_real.copy_(torch.where(first > 0, first, static.num_real))

    patch.setattr(static_inputs, "_fill", kept)


@mutant(
    "rejected draft KV stays visible after the accept",
    "graph.shrinking",
    "graph.sequence",
    graph=True,
)
def lengths_only_grow(patch: pytest.MonkeyPatch) -> None:
    """A length that falls back after a rejection is ignored: the larger one of the last replay stays."""
    write = FA3Backend.write

    def largest(self: FA3Backend, step: Step, buffers: Buffers) -> None:
        lens = buffers["seqused_k"]
        old = lens.clone()
        write(self, step, buffers)
        lens.copy_(torch.maximum(lens, old))

    patch.setattr(FA3Backend, "write", largest)


@mutant("vLLM #48261: draft metadata aliases the target's", "api.keeps_no_state")
def steps_share_buffers(patch: pytest.MonkeyPatch) -> None:
    """Buffers of one name lie in the same memory, whichever step and backend they belong to."""
    kept: dict[str, Tensor] = {}
    fresh = Layout.fresh

    def shared(layout: Layout, device: torch.device) -> Buffers:
        buffers = dict(fresh(layout, device))
        for name, buffer in buffers.items():
            old = kept.setdefault(name, buffer).flatten()
            if old.numel() >= buffer.numel():
                buffers[name] = old[: buffer.numel()].copy_(buffer.flatten()).view(buffer.shape)
        return Buffers(buffers, layout.extent)

    patch.setattr(Layout, "fresh", shared)


@mutant("a planner that changes the caller's layout in place", "plan.leaves_the_step_alone")
def planner_changes_the_step(patch: pytest.MonkeyPatch) -> None:
    """Planning advances the caller's own lengths."""
    init = AttentionBackend.init_forward_metadata

    def advanced(self: AttentionBackend, step: Step) -> Metadata:
        meta = init(self, step)
        step.seq_lens.add_(step.width)
        return meta

    patch.setattr(AttentionBackend, "init_forward_metadata", advanced)


@mutant(
    "mini-sglang #103: a pinned staging buffer reused in flight",
    "math.decode",
    "graph.sequence",
    graph=True,
    needs=("cuda",),
)
def staging_reused_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Lengths go through one pinned host buffer, which is cleared before a busy stream has read it."""
    fill, staging = static_inputs._fill, torch.zeros(64, dtype=torch.int32).pin_memory()

    def staged(static: Step, step: Step | None) -> None:
        fill(static, step)
        bs = static.bs
        staging[:bs].copy_(static.seq_lens)
        torch.cuda._sleep(50_000_000)
        static.seq_lens.copy_(staging[:bs], non_blocking=True)
        staging.zero_()

    patch.setattr(static_inputs, "_fill", staged)
