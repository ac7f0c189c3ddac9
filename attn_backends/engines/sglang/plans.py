"""Plans of SGLang's batches: eagerly, and for its CUDA graphs.

A graph reads the runner's static buffers in place (`BoundInputs`), so its metadata is planned inside the graph and a
replay has nothing to do on the host. Where a kernel plans on the host, what it plans from is copied before the replay,
and the rest is planned inside.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from attn_backends.adapters.batch import MixedBatches
from attn_backends.adapters.sglang import num_running, split
from attn_backends.backend import AttentionBackend
from attn_backends.engines.sglang.facts import RunnerFacts
from attn_backends.planning.metadata import ForwardMetadata, Metadata
from spec_metadata import Step, StepKind

logger = logging.getLogger(__name__)
_KINDS = {
    "TARGET_VERIFY": (StepKind.TARGET_VERIFY, StepKind.DRAFT_BLOCK),
    "DRAFT_EXTEND_V2": (StepKind.DRAFT_EXTEND,),
}
"""What a forward mode may be; a runner has one of these kinds at most."""


class Plans:
    """The plans of one backend for one runner."""

    def __init__(self, facts: RunnerFacts, backend: AttentionBackend) -> None:
        self.facts, self.backend = facts, backend
        self._mixed = MixedBatches(backend, logger)
        self._captured: dict[tuple[StepKind, int, int | None], tuple[Metadata, bool]] = {}  # and if the host plans it

    def eager(self, batch: Any) -> list[Metadata]:
        """Metadata of a batch without a graph: two of a mixed batch where one step is slower, else one. SGLang calls a
        mixed batch EXTEND before it is planned. So requests of one row that come last are taken for running ones.
        """
        step = self.facts.batches.step(batch)
        running = num_running(step) if self.facts.mixes else 0
        apart = self._mixed.are_apart(running, step.num_tokens - running)
        steps = split(step, step.bs - running) if apart else (step,)
        return [self.backend.init_forward_metadata(each) for each in steps]

    def kind_of(self, batch: Any) -> StepKind:
        """The kind of what a graph is captured for. Without a draft, verifies and draft extends have one row each."""
        drafts = StepKind.DECODE if batch.spec_info is None else StepKind.DRAFT_DECODE
        kinds = _KINDS.get(batch.forward_mode.name, (drafts,))
        for kind in kinds:
            if kind in self.facts.kinds:
                return kind
        return StepKind.DECODE

    def capture(self, batch: Any, masks: Tensor | None) -> Metadata:
        """Metadata of a batch over the runner's static buffers. masks: flat bool, to which SGLang writes those of
        trees.
        """
        key = kind, bs, num_rows = self._key(batch)
        capacity, mask = self.facts.capacity, None
        bucket = capacity.bucket(kind, bs)
        if bucket.tree and kind is StepKind.TARGET_VERIFY:
            assert masks is not None, "SGLang asks for its buffer before it captures"
            mask = masks[: bs * bucket.width**2].view(bs, bucket.width, bucket.width)
        paging, inputs = self.facts.batches.bound(batch, mask)
        asked = bucket if num_rows is None else capacity.ragged_bucket(kind, bs, num_rows)
        on_host = self.plans_on_host(kind)
        captured = self.backend.capture(asked, paging, None if on_host else inputs)
        self._captured[key] = captured, on_host
        return captured

    def _key(self, batch: Any) -> tuple[StepKind, int, int | None]:
        """What tells graphs apart: kind, requests, and the rows of all in a ragged verify. SGLang captures several such
        for as many requests.
        """
        layout = getattr(batch.spec_info, "ragged_verify_layout", None)
        return self.kind_of(batch), batch.batch_size, None if layout is None else layout.graph_num_tokens

    def load(self, view: Any) -> Metadata:
        """Before a replay; nothing happens here but for kernels that plan on the host. view: SGLang's of the replay."""
        meta, on_host = self._captured[self._key(view)]
        if on_host:
            self.backend.copy_inputs(meta, self.facts.batches.replayed(view, meta.step.width))
        return meta

    def refresh(self, batch: Any) -> None:
        """The first nodes of a graph: read its inputs and plan it."""
        self.backend.refresh(self._captured[self._key(batch)][0])

    def plans_on_host(self, kind: StepKind) -> bool:
        """Whether a kernel's vendor plans from lengths on the host."""
        return self.backend.kernel_of(kind).capabilities[kind].needs_host_lens

    @property
    def takes_ragged_verifies(self) -> bool:
        """Whether the kernel of verifies takes rows that the device divides among requests, also in a graph."""
        kind = StepKind.TARGET_VERIFY
        return kind in self.facts.kinds and self.backend.kernel_of(kind).capabilities[kind].captures_packed

    @property
    def needs_host_lens(self) -> bool:
        """Whether any step that its runner runs is planned on the host."""
        return any(self.plans_on_host(kind) for kind in self.facts.kinds)


def forwards_of(meta: Metadata) -> list[ForwardMetadata]:
    """The metadata of each forward of a draft. In SGLang's trees branch t sees what branch t wrote, whatever node it
    grew from: keys and values are not moved to another branch (`EagleDraftWorker.draft_forward`).
    """
    step = meta.step
    return [meta.at(i, own_branches(step, i) if step.is_tree else None) for i in range(step.num_forwards)]


def own_branches(step: Step, forward: int) -> Tensor:
    """[bs, topk, forward + 1] int64: at every depth a branch itself."""
    branches = torch.arange(step.width, device=step.device).view(1, -1, 1)
    return branches.expand(step.bs, step.width, forward + 1).contiguous()
