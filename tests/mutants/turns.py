"""Mutants of state that one step leaves for another: of other kinds, other batch sizes, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend, Metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.kernels import torch_attention
from attn_backends.planning import metadata
from attn_backends.planning.captured import Captured
from spec_metadata import Buffers, Step, StepKind, UniformQuery
from spec_metadata.plans import ragged
from tests.mutants.mutant import mutant

TURNS = ("api.kinds_in_turn", "graph.kinds_in_turn")


@mutant("SGLang #31198: Kimi-K2.6 DFlash on trtllm_mla, illegal access on the first batch", *TURNS)
def prefill_leaves_its_flag(patch: pytest.MonkeyPatch) -> None:
    """A prefill, captured or planned, leaves a flag on the backend that sends verifies to the kernel of prompts, which
    hides nothing.
    """
    view = ragged.view_ragged

    def flagged(self: Any, step: Step, buffers: Buffers) -> Any:
        self.was_prefill = getattr(self, "was_prefill", False) or step.kind is StepKind.PREFILL
        misled = self.was_prefill and step.kind is StepKind.TARGET_VERIFY
        return tuple(replace(plan, causal=plan.causal and not misled) for plan in view(step, buffers))

    patch.setattr(FA3Backend, "plans", flagged)


@mutant("SGLang #31198, of a capture alone", "graph.kinds_in_turn", graph=True)
def captured_prefill_leaves_its_flag(patch: pytest.MonkeyPatch) -> None:
    """The capture of a prefill leaves a flag that makes draft extends one key short."""
    capture, write = AttentionBackend.capture, FA3Backend.write

    def flagged(self: Any, bucket: Any, paging: Any) -> Metadata:
        self.misled = getattr(self, "misled", 0) or int(bucket.kind is StepKind.PREFILL)
        return capture(self, bucket, paging)

    def short(self: Any, step: Step, buffers: Buffers) -> None:
        write(self, step, buffers)
        buffers["seqused_k"].sub_(getattr(self, "misled", 0) * (step.kind is StepKind.DRAFT_EXTEND)).clamp_(min=0)

    patch.setattr(AttentionBackend, "capture", flagged)
    patch.setattr(FA3Backend, "write", short)


@mutant("vLLM #45227: ROCm AITER MLA, metadata of one row per request where a verify has four", *TURNS)
def width_of_the_first_step_kept(patch: pytest.MonkeyPatch) -> None:
    """Lengths count the query rows of the narrowest kind of step that the backend has planned."""
    write = FA3Backend.write

    def sized(self: Any, step: Step, buffers: Buffers) -> None:
        write(self, step, buffers)
        if isinstance(step.query, UniformQuery):
            self.narrowest = min(getattr(self, "narrowest", step.width), step.width)
            buffers["seqused_k"].sub_(step.width - self.narrowest).clamp_(min=0)

    patch.setattr(FA3Backend, "write", sized)


@mutant("SGLang #24055 (review): acceptance changes with the captured batch sizes", "graph.other_buckets", graph=True)
def splits_by_the_largest_capture(patch: pytest.MonkeyPatch) -> None:
    """The largest batch size that was captured chooses the number of splits, which are joined in another order."""
    capture, attend = AttentionBackend.capture, torch_attention.attend

    def noted(self: Any, bucket: Any, paging: Any) -> Metadata:
        splits = torch_attention.attend is not attend or bucket.bs == self.capacity.max_bs
        patch.setattr(torch_attention, "attend", in_two if splits else attend)
        return capture(self, bucket, paging)

    def in_two(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        even = visible & (torch.arange(k.shape[1], device=k.device) % 2 == 0)
        return torch_attention.merge_states(*attend(q, k, v, even, *rest), *attend(q, k, v, visible & ~even, *rest))

    patch.setattr(AttentionBackend, "capture", noted)


@mutant("lengths over the capacity, once a layout was taken", "graph.after_a_refusal", graph=True)
def known_layout_taken_at_any_length(patch: pytest.MonkeyPatch) -> None:
    """A step of a layout that a graph took before is not asked for its lengths."""
    patch.setattr(Captured, "admits", lambda self, step: step.layout == self._layout)


@mutant("two instances given each other's metadata", "refusals.anothers_metadata")
def metadata_of_any_instance_taken(patch: pytest.MonkeyPatch) -> None:
    """Metadata is asked for the class of its backend, not for the instance."""
    patch.setattr(metadata, "_refuse_owner", lambda backend, owner, kind: None)


@mutant("a store that counts its calls", "cache.stores_in_any_order")
def stores_counted(patch: pytest.MonkeyPatch) -> None:
    """A draft's rows go where the next forward writes that was not stored yet, whichever is given."""
    at, store = Metadata.at, AttentionBackend.store
    number: dict[int, int] = {}

    def counted(self: Any, inputs: Any, cache: Any, meta: Any, layer: Any) -> None:
        slots = meta.schedules.all_slots
        number[id(slots)] = number.get(id(slots), -1) + 1
        store(self, inputs, cache, replace(meta, write_slots=slots[number[id(slots)] % len(slots)]), layer)

    patch.setattr(Metadata, "at", lambda self, *which: _with_slots(at(self, *which), self.buffers["write_slots"]))
    patch.setattr(AttentionBackend, "store", counted)


def _with_slots(meta: Any, slots: Tensor) -> Any:
    meta.schedules.all_slots = slots
    return meta


@mutant("our own, by a random change of one token", "refusals.ancestors")
def paths_of_any_shape_taken(patch: pytest.MonkeyPatch) -> None:
    """Paths of a drafted tree are cut and repeated to the shape that is due."""
    part = metadata.tree_part

    def shaped(step: Step, forward: int = 0, ancestors: Tensor | None = None) -> Any:
        if step.kind is StepKind.DRAFT_DECODE and step.is_tree:
            due = torch.zeros(step.bs, step.width, forward + 1, dtype=torch.int64)
            given = due if ancestors is None else ancestors.long()
            due[: len(given)] = given[:, :, : forward + 1]
            ancestors = due
        return part(step, forward, ancestors)

    patch.setattr(metadata, "tree_part", shaped)
