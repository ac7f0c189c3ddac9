"""Mutants of where rows are written, and of what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheInputs, PagedCache, PagedKV
from attn_backends.planning import planners
from attn_backends.planning.metadata import ForwardMetadata, Metadata
from spec_metadata import CacheGeometry, Step, StepKind, static_inputs
from tests.mutants.mutant import mutant


def first_slots(meta: Metadata) -> None:
    """Let every forward write to the first slots of the flat list."""
    for write_slots in meta.buffers["write_slots"]:
        write_slots.copy_(meta.step.flat_slots()[: len(write_slots)])


@mutant(
    "SGLang #26239: the draft loop without graphs took the whole out_cache_loc",
    "cache.writes_owned_slots",
    "cache.writes_forward_by_forward",
    "plan.write_slots",
)
def eager_writes_not_sliced_by_step(patch: pytest.MonkeyPatch) -> None:
    """Eager forwards of a draft all write to the first slots of the step's list."""
    init = AttentionBackend.init_forward_metadata

    def whole(self: AttentionBackend, step: Step) -> Metadata:
        meta = init(self, step)
        first_slots(meta)
        return meta

    patch.setattr(AttentionBackend, "init_forward_metadata", whole)


@mutant(
    "SGLang 0.5.23: V4's replay pads by a negative amount, which truncates to the first slots",
    "cache.writes_owned_slots",
    "plan.write_slots",
    graph=True,
)
def replay_truncates_write_slots(patch: pytest.MonkeyPatch) -> None:
    """In a replay every forward writes to the first slots of the step's list."""
    refresh = AttentionBackend.refresh

    def truncated(self: AttentionBackend, meta: Metadata) -> None:
        refresh(self, meta)
        first_slots(meta)

    patch.setattr(AttentionBackend, "refresh", truncated)


@mutant(
    "SGLang 0.5.23: MLA cache writers read a strided view of the slots at stride one",
    "cache.writes_owned_slots",
    "plan.write_slots",
    backend="flashinfer_mla",
)
def strided_slots_read_as_dense(patch: pytest.MonkeyPatch) -> None:
    """Row j of draft forward i is written to flat[i + j]; one request shows nothing."""

    def as_dense(step: Step, forward: int = 0) -> Tensor:
        view = step.flat_slots().long().contiguous().view(-1, step.num_steps)[:, forward]
        return view.as_strided(view.shape, (1,), view.storage_offset())

    patch.setattr(planners, "write_slots", as_dense)


@mutant("padded rows that write slot 0", "graph.padded")
def padding_writes_slot_zero(patch: pytest.MonkeyPatch) -> None:
    """Padded rows write to slot 0, whoever owns it, not to the reserved page."""
    zeros = lambda self, num, device: torch.zeros(num, dtype=torch.int64, device=device)  # noqa: E731
    patch.setattr(CacheGeometry, "reserved_slots", zeros)


@mutant("SGLang 0.5.23: the guards that reset a draft extend's padding disagree", "graph.shrinking", graph=True)
def padding_keeps_old_slots(patch: pytest.MonkeyPatch) -> None:
    """Rows that were real in the last replay and are padding now still write where they wrote."""
    fill = static_inputs._fill

    def not_reset(static: Step, step: Step | None) -> None:
        old = static.out_cache_loc.clone()
        fill(static, step)
        if step is not None:
            static.out_cache_loc[step.num_writes :].copy_(old[step.num_writes :])

    patch.setattr(static_inputs, "_fill", not_reset)


@mutant("vLLM #14649: draft KV not overwritten after the verify", "cache.writes_owned_slots")
def extend_does_not_overwrite(patch: pytest.MonkeyPatch) -> None:
    """A draft extend leaves in the cache what the draft loop wrote."""
    store = AttentionBackend.store

    def kept(self: AttentionBackend, inputs: CacheInputs, cache: PagedCache, meta: ForwardMetadata, layer: Any) -> None:
        if meta.kind is not StepKind.DRAFT_EXTEND:
            store(self, inputs, cache, meta, layer)

    patch.setattr(AttentionBackend, "store", kept)


@mutant("`slot * stride` in int32", "cache.far_pages")
def slot_offsets_in_int32(patch: pytest.MonkeyPatch) -> None:
    """Offsets into the cache wrap at 2**31 elements."""
    store = PagedKV.store

    def wrapped(self: PagedKV, inputs: CacheInputs, slots: Tensor, *scales: float) -> None:
        page_size, stride = self.k.shape[1], self.k.stride(0)
        pages = (slots // page_size * stride).int().long().abs() // stride
        store(self, inputs, pages * page_size + slots % page_size, *scales)

    patch.setattr(PagedKV, "store", wrapped)
