"""Known bugs of engines, put into this code: the checks of `test_backends` must catch each, and pass without it.

D1, D2, D3 and D8 are SGLang 0.5.23's on an H200; 001 and 002 its pull requests 21987 and 27460. Every check runs at
least two requests of different lengths; with one, most of these defects are invisible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import backend as base
from attn_backends.backend import AttentionBackend, Metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch
from attn_backends.conformance.sizes import NUM_STEPS
from attn_backends.conformance.worlds import Setup, World
from attn_backends.planning import planners
from spec_metadata import Buffers, Capacity, InvalidStepError, RequestTable, Step, StepKind
from spec_metadata.plans import block_table, csr, ragged, slots
from spec_metadata.visibility import DensePart, TreePart, chain_parts, dense_part
from tests.checks import check_eager, check_replay

KV, LATENT = CacheFormat.KV, CacheFormat.LATENT
FLASHINFER = Setup(FlashInferMLABackend, LATENT, 1)
TRTLLM = Setup(TrtllmMLABackend, LATENT, 32)
FA3 = Setup(FA3Backend, KV, 4)
REFERENCE = Setup(ReferenceBackend, KV, 4)
ALL = [FLASHINFER, TRTLLM, FA3, REFERENCE]

Check = Callable[[Setup], None]


def eager_draft(setup: Setup) -> None:
    """An eager draft loop of two requests."""
    check_eager(World(setup), Batch(StepKind.DRAFT_DECODE, (4, 7)))


def replayed_draft(setup: Setup) -> None:
    """A draft loop captured on two requests and replayed on two others."""
    check_replay(World(setup), Batch(StepKind.DRAFT_DECODE, (3, 5)), Batch(StepKind.DRAFT_DECODE, (4, 7)), 3)


def replayed_extend(setup: Setup) -> None:
    """A draft extend captured on two requests and replayed on two others."""
    check_replay(World(setup), Batch(StepKind.DRAFT_EXTEND, (3, 5)), Batch(StepKind.DRAFT_EXTEND, (4, 7)), 3)


def replayed_full_verify(setup: Setup) -> None:
    """A verify replayed at the end of the context, into the last slot of the last page."""
    world = World(setup)
    context = world.capacity.max_context
    check_replay(world, Batch(StepKind.TARGET_VERIFY, (3, 5)), Batch(StepKind.TARGET_VERIFY, (context, 7)), 3)


def short_table_refused(setup: Setup) -> None:
    """A table that has no room for all branches of a draft at a full context must be refused."""
    world = World(replace(setup, topk=3, page_size=1, checking=False))
    table = RequestTable(world.table[:, :-1], torch.tensor([0, 2]), world.geometry)
    slots = torch.arange(2 * 3 * NUM_STEPS)
    step = Step.draft_decode(3, NUM_STEPS, torch.tensor([4, 7]), table, slots)
    try:
        world.backend.init_forward_metadata(step)
    except InvalidStepError:
        return
    raise AssertionError("a table one token short of context + topk * num_steps was accepted")


def plant_d1(patch: pytest.MonkeyPatch) -> None:
    """Every draft forward sees the committed keys only: the length is not advanced."""

    def not_advanced(step: Step, forward: int = 0) -> DensePart:
        dense = dense_part(step, forward)
        drafts = step.kind is StepKind.DRAFT_DECODE
        return replace(dense, kv_lens=dense.kv_lens - (forward + 1)) if drafts else dense

    for module in (block_table, ragged, slots):
        patch.setattr(module, "dense_part", not_advanced)
    patch.setattr(base, "chain_parts", lambda step, own: [unseen(part) for part in chain_parts(step, own)])


def unseen(part: TreePart) -> TreePart:
    """Drafted tokens that no row sees."""
    return replace(part, mask=torch.zeros_like(part.mask))


def plant_d2(patch: pytest.MonkeyPatch) -> None:
    """CSR rows are packed by the committed lengths and walked by the advanced ones."""

    def walked_by_advanced(self: FlashInferMLABackend, step: Step, buffers: Buffers) -> None:
        csr.write_csr(step, buffers)
        buffers["kv_indptr"][1:].copy_((step.seq_lens + 1).cumsum(0))

    patch.setattr(FlashInferMLABackend, "write", walked_by_advanced)


def plant_d3(patch: pytest.MonkeyPatch) -> None:
    """Every forward takes the first slots of the flat out_cache_loc instead of its step's."""
    patch.setattr(planners, "write_slots", lambda step, forward=0: step.flat_slots()[: step.num_tokens])


def plant_d3_in_replay(patch: pytest.MonkeyPatch) -> None:
    """The same in a replay only, as SGLang has it."""

    def truncate(self: AttentionBackend, meta: Metadata, step: Step) -> None:
        self.copy_inputs(meta, step)
        self.refresh(meta)
        for write_slots in meta.buffers["write_slots"]:
            write_slots.copy_(meta.step.flat_slots()[: len(write_slots)])

    patch.setattr(base.AttentionBackend, "replay", truncate)


def plant_d8(patch: pytest.MonkeyPatch) -> None:
    """A writer reads the strided view of one step as if it were dense."""

    def read_as_dense(step: Step, forward: int = 0) -> Tensor:
        view = step.flat_slots().contiguous().view(-1, step.num_steps)[:, forward]
        return view.as_strided(view.shape, (1,), view.storage_offset())

    patch.setattr(planners, "write_slots", read_as_dense)


def plant_001(patch: pytest.MonkeyPatch) -> None:
    """Captured on a uniform query stride, replayed with the accept lengths packed."""
    refresh, calls = base.AttentionBackend.refresh, []

    def packed_after_capture(self: AttentionBackend, meta: Metadata) -> None:
        refresh(self, meta)
        calls.append(meta)
        if len(calls) > 1:
            accepted = torch.arange(meta.step.bs) % meta.step.width + 1
            meta.buffers[{"fa3": "cu_seqlens_q"}.get(self.name, "qo_indptr")][1:].copy_(accepted.cumsum(0))

    patch.setattr(base.AttentionBackend, "refresh", packed_after_capture)


def plant_002_context_alone(patch: pytest.MonkeyPatch) -> None:
    """Buffers sized by the context, without room for what is drafted (pages of 32 would hide it by rounding up)."""
    patch.setattr(Capacity, "max_pages", property(lambda self: -(-self.max_context // self.page_size)))
    patch.setattr(base, "check_table_room", lambda step, capacity: None)


def plant_002_without_topk(patch: pytest.MonkeyPatch) -> None:
    """Draft room without the topk factor."""
    patch.setattr(Capacity, "draft_room", property(lambda self: self.num_steps))
    patch.setattr(base, "check_table_room", lambda step, capacity: None)


DEFECTS: list[Any] = [
    *[pytest.param(plant_d1, eager_draft, setup, id=f"D1-eager-{setup}") for setup in ALL],
    *[pytest.param(plant_d1, replayed_draft, setup, id=f"D1-replay-{setup}") for setup in ALL],
    pytest.param(plant_d2, eager_draft, FLASHINFER, id="D2-eager"),
    pytest.param(plant_d2, replayed_draft, FLASHINFER, id="D2-replay"),
    *[pytest.param(plant_d3, eager_draft, setup, id=f"D3-eager-{setup}") for setup in ALL],
    *[pytest.param(plant_d3, replayed_draft, setup, id=f"D3-both-{setup}") for setup in ALL],
    *[pytest.param(plant_d3_in_replay, replayed_draft, setup, id=f"D3-replay-{setup}") for setup in ALL],
    *[pytest.param(plant_d3, replayed_draft, replace(s, topk=3), id=f"D3-tree-{s}") for s in ALL],
    *[pytest.param(plant_d8, eager_draft, setup, id=f"D8-eager-{setup}") for setup in ALL],
    *[pytest.param(plant_d8, replayed_draft, setup, id=f"D8-replay-{setup}") for setup in ALL],
    *[pytest.param(plant_d8, replayed_draft, replace(s, topk=3), id=f"D8-tree-{s}") for s in ALL],
    *[pytest.param(plant_001, replayed_extend, setup, id=f"001-{setup}") for setup in (FLASHINFER, FA3)],
    *[
        pytest.param(plant_002_context_alone, replayed_full_verify, s, id=f"002-context-{s}")
        for s in (FLASHINFER, FA3, REFERENCE)
    ],
    *[pytest.param(plant_002_without_topk, short_table_refused, s, id=f"002-topk-{s}") for s in (FLASHINFER, FA3)],
]


@pytest.mark.parametrize(("plant", "check", "setup"), DEFECTS)
def test_planted_defect_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], check: Check, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = replace(setup, checking=False)  # the comparison itself must see it, not the range checks
    check(setup)
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            check(setup)
    check(setup)
