"""Mutants of what users of the engines reported from 2024 to 2026, in dense backends; docs/real-bugs.md lists all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Schedules
from attn_backends.kernels import torch_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.planning import planners
from spec_metadata import Buffers, Step, StepKind, write_slots
from spec_metadata.plans import block_table, csr, ragged
from spec_metadata.visibility import HostLens
from tests.mutants import hosted
from tests.mutants.hosts import HOSTED
from tests.mutants.mutant import mutant
from tests.mutants.visibility import change_lengths

PREFILL, VERIFY = StepKind.PREFILL, StepKind.TARGET_VERIFY
Attend = Callable[..., tuple[Tensor, Tensor]]


def instead_of_attention(patch: pytest.MonkeyPatch, attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Let attend(over_pages, q, *arguments) take the place of the attention of padded requests [bs, width, ...]."""
    over_pages = torch_attention._over_pages
    patch.setattr(torch_attention, "_over_pages", lambda q, *arguments: attend(over_pages, q, *arguments))


@mutant("vllm-ascend #15329", "math.target_verify", "laws.chain_verify_is_repeated_decode")
def verify_weighs_keys_alike(patch: pytest.MonkeyPatch) -> None:
    """Steps of more than one row per request take scores of zero: all keys weigh the same."""

    def flat(over_pages: Attend, q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        return over_pages(q * (q.shape[1] == 1), *arguments)

    instead_of_attention(patch, flat)


@mutant("vLLM #45227", "math.target_verify", "laws.chain_verify_is_repeated_decode", backend="trtllm_mla")
def verify_planned_for_one_row(patch: pytest.MonkeyPatch) -> None:
    """A verify's lengths count one query row of each request, as a decode's do."""
    change_lengths(patch, lambda step, _, lens: lens - (step.width - 1) * (step.kind is VERIFY and not step.is_tree))


@mutant("SGLang #32269, #36038", "math.target_verify", "laws.chain_verify_is_repeated_decode")
def verify_without_causal_mask(patch: pytest.MonkeyPatch) -> None:
    """Every row of a verify sees the drafted tokens after it."""

    def plans(self: FA3Backend, step: Step, buffers: Buffers) -> Any:
        causal = step.kind is not VERIFY
        return tuple(replace(plan, causal=plan.causal and causal) for plan in ragged.view_ragged(step, buffers))

    patch.setattr(FA3Backend, "plans", plans)


@mutant("vLLM #5412", "math.draft_decode", "laws.alone_or_in_a_batch", backend="flashinfer_mla")
def draft_pages_counted_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """A draft's kv_indptr counts a page more where a request fills its last one, and kv_indices does not."""

    def written(self: FlashInferMLABackend, step: Step, buffers: Buffers) -> None:
        csr.write_csr(step, buffers)
        if step.kind is StepKind.DRAFT_DECODE:
            num_pages = buffers["kv_len"] // buffers.extent.page_size + 1
            buffers["kv_indptr"][1:].copy_(num_pages.cumsum(0))

    patch.setattr(FlashInferMLABackend, "write", written)


@mutant("vLLM #31540", "plan.write_slots", "cache.writes_owned_slots")
def slots_of_another_block_size(patch: pytest.MonkeyPatch) -> None:
    """Write slots are made with the block size of another cache group, twice the draft's own."""

    def other_size(step: Step, forward: int = 0) -> Tensor:
        slots, geometry = write_slots(step, forward), step.paging.geometry
        num_slots, size = geometry.num_pages * geometry.page_size, geometry.page_size
        return (slots // size * size * 2 + slots % size) % num_slots

    patch.setattr(planners, "write_slots", other_size)


@mutant("flashinfer #2511", "math.decode", "graph.shrinking", backend="trtllm_mla", graph=True)
def block_table_of_the_capture(patch: pytest.MonkeyPatch) -> None:
    """The block table is made by the vendor's plan, for the capture and the batch after it, and not by a replay."""
    write, seen = block_table.write_block_table, dict[int, list[Tensor]]()

    def written(step: Step, buffers: Buffers) -> None:
        table = buffers["block_table"]
        times = seen.setdefault(table.data_ptr(), [])
        before = table.clone()
        write(step, buffers)
        if len(times) >= 2:
            table.copy_(before)
        times.append(table)  # which keeps an eager step's memory, so that no other gets it

    patch.setattr(block_table, "write_block_table", written)


@mutant("TensorRT-LLM #18769", "graph.layers_of_one_step", backend=HOSTED, graph=True)
def plans_of_two_wrappers_deferred(patch: pytest.MonkeyPatch) -> None:
    """Where layers have more than one shape, plans are left to their next forward, which a replay never runs."""
    plan_host = Schedules.plan_host

    def deferred(self: Schedules, lens: Any) -> None:
        if len({shape for _, shape in self._made}) == 1:
            plan_host(self, lens)

    patch.setattr(Schedules, "plan_host", deferred)


@mutant("vLLM #48167", "math.draft_block", "math.draft_extend", "graph.shrinking", backend=HOSTED, graph=True)
def wrapper_captured_without_graph_mode(patch: pytest.MonkeyPatch) -> None:
    """Every plan on the host allocates the lengths anew, and a graph still reads those of its capture."""

    def fresh(self: hosted.OnHost, lens: HostLens) -> None:
        self.lens = torch.tensor(lens.kv_lens, dtype=torch.int32, device=self.lens.device)

    patch.setattr(hosted.OnHost, "plan_host", fresh)


@mutant("tokenspeed #348 (review)", "math.decode", "graph.shrinking", graph=True)
def length_read_in_the_forward(patch: pytest.MonkeyPatch) -> None:
    """The captured forward reads the longest length from the device, and takes so many pages."""

    def cut(over_pages: Attend, q: Tensor, lens: Tensor, k: Tensor, v: Tensor, pages: Tensor, *rest: Any) -> Any:
        longest = int(rest[0].max())
        return over_pages(q, lens, k, v, pages[:, : max(1, -(-longest // k.shape[1]))], *rest)

    instead_of_attention(patch, cut)


@mutant("vllm-ascend #5046", "math.decode", "graph.sequence", backend=HOSTED, graph=True)
def host_lengths_of_the_batch_before(patch: pytest.MonkeyPatch) -> None:
    """The host's lengths are those of the previous step, unlike the block table: a replay plans the old ones."""
    plan = hosted.OnHost.plan_host

    def late(self: hosted.OnHost, lens: HostLens) -> None:
        plan(self, getattr(self, "lately", lens))
        self.lately = lens

    patch.setattr(hosted.OnHost, "plan_host", late)


@mutant("local-inference-lab/vllm #105", "scale.edges")
def page_ids_shifted_by_racing_lanes(patch: pytest.MonkeyPatch) -> None:
    """Page ids are shifted in place by 32 lanes at a time: the last of each gets what its neighbour wrote already."""
    write = ragged.write_ragged

    def raced(step: Step, buffers: Buffers) -> None:
        write(step, buffers)
        table = buffers["page_table"]
        lanes = torch.arange(32, max(table.shape[1], 32), 32)
        table[:, lanes] = table[:, lanes - 1]

    patch.setattr(ragged, "write_ragged", raced)


def share_page_tables(patch: pytest.MonkeyPatch, where: Callable[[Step], bool]) -> None:
    """Let a step whose lengths are those of the step before get its page table. where: whether to, of a step."""
    write = ragged.write_ragged

    def shared(self: FA3Backend, step: Step, buffers: Buffers) -> None:
        write(step, buffers)
        last, table = getattr(self, "last", (None, None)), buffers["page_table"]
        same = where(step) and last[0] is not None and torch.equal(last[0], step.seq_lens)
        if same and last[1].shape == table.shape:
            table.copy_(last[1])
        self.last = step.seq_lens.clone(), table.clone()

    patch.setattr(FA3Backend, "write", shared)


@mutant("vLLM #50707", "api.cache_groups")
def one_table_for_two_cache_groups(patch: pytest.MonkeyPatch) -> None:
    """A step whose lengths are those of the step before gets its page table: one builder serves two cache groups."""
    share_page_tables(patch, lambda step: True)


@mutant("our own: no prompt had two cache groups", "api.cache_groups")
def one_table_for_the_prompts_of_two_cache_groups(patch: pytest.MonkeyPatch) -> None:
    """A prompt whose lengths are those of the prompt before gets its page table."""
    share_page_tables(patch, lambda step: step.kind is PREFILL)


@mutant("vLLM #44879, #24505", "refusals.cache_dtype", backend="tests.mutants.narrow:NarrowBackend")
def draft_forced_to_the_target_s_cache_type(patch: pytest.MonkeyPatch) -> None:
    """Whether a kernel takes a cache's type is not asked: the target's is given to the draft."""
    reasons = Capabilities.layer_reasons
    patch.setattr(Capabilities, "layer_reasons", lambda self, layer, dtype, cache: reasons(self, layer, dtype, dtype))


@mutant("vLLM #40831", "math.cache_types")
def verify_reads_stored_bytes(patch: pytest.MonkeyPatch) -> None:
    """Steps of more than one row per request read an 8-bit cache without its scales."""

    def unscaled(over_pages: Attend, q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, extras = arguments
        return over_pages(q, *given, extras._replace(k_scale=1.0, v_scale=1.0) if q.shape[1] > 1 else extras)

    instead_of_attention(patch, unscaled)


@mutant("vLLM #13264", "api.layers_of_one_step", "graph.layers_of_one_step", graph=True)
def window_and_scale_of_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    """Layers of a step take the window and scale of the first that attends: metadata has one of each."""
    forward, kept = AttentionBackend.forward, dict[int, Any]()

    def first(self: Any, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        _, its = kept.setdefault(id(meta.schedules), (meta.schedules, layer))
        return forward(self, q, cache, meta, replace(layer, window=its.window, scale=its.scale))

    patch.setattr(AttentionBackend, "forward", first)


@mutant("our own: no prompt had layers of two scales", "api.layers_of_one_step", "graph.layers_of_one_step", graph=True)
def scale_of_the_first_layer_in_prompts(patch: pytest.MonkeyPatch) -> None:
    """Layers of a prompt take the scale of the first that attends."""
    forward, kept = AttentionBackend.forward, dict[int, Any]()

    def first(self: Any, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        _, its = kept.setdefault(id(meta.schedules), (meta.schedules, layer))
        return forward(self, q, cache, meta, replace(layer, scale=its.scale) if meta.kind is PREFILL else layer)

    patch.setattr(AttentionBackend, "forward", first)
