"""The reference worker of block drafts, DFlash (https://arxiv.org/abs/2602.06036) and DSpark. A cycle drafts all its
tokens in one forward, verifies them as a chain, and stores the draft's context of the accepted ones without attention.

The draft never runs over committed tokens: what it knows of them are keys and values made of the target's hidden
states. The context of accepted tokens is written over the rows of their block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import Metadata
from attn_backends.runner import PerToken, Phase
from attn_backends_reference.eagle.chains import Chains, chain_verify_phase
from attn_backends_reference.eagle.launches import Launch, Timings
from attn_backends_reference.eagle.options import DEFAULTS, PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.phases import Accepted, Model, Nothing
from attn_backends_reference.eagle.prefill_phases import DRAFT_PREFILL
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.tables import rows_of
from attn_backends_reference.eagle.worker import SpeculativeWorker
from attn_backends_reference.models.block import BlockModel
from attn_backends_reference.models.decoder import TargetModel
from attn_backends_reference.pieces import Forward, PackedPhase
from spec_metadata import (
    CacheGeometry,
    Capacity,
    Step,
    StepKind,
    UniformQuery,
    padding_step,
    token_positions,
)


@dataclass(frozen=True, slots=True, eq=False)
class ContextRows:
    """hidden: [num_tokens, F], what the draft takes of the target. positions: [num_tokens] int64."""

    hidden: PerToken
    positions: PerToken


class BlockWorker(SpeculativeWorker):
    """A block draft: the root and its masks in one forward, of the chain that the target verifies.

    Raises `UnsupportedStepError` for another shape of drafting than the draft's, for more positions than it has, and
    for a backend that has no draft blocks.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: BlockModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        _check(draft, capacity, options)
        target = target.tapped(draft.feature_layers)
        super().__init__(target, backends, capacity, geometry, options)
        step = padding_step(capacity.bucket(StepKind.DRAFT_BLOCK, 1), self._paging(), capacity)
        if reasons := backends.draft.unsupported_reasons(step):
            raise UnsupportedStepError(f"{backends.draft.name} can't draft blocks", reasons, "EagleWorker")
        self._check_lag({StepKind.DRAFT_BLOCK: backends.draft, StepKind.TARGET_VERIFY: backends.verify})
        self.draft, self.draft_caches = draft, draft.allocate_caches(backends.prefill, options.cache_dtype)
        drafting, extending, filling = (
            Model(draft, self.draft_caches, each) for each in (backends.draft, backends.draft_extend, backends.prefill)
        )
        self._roots = torch.zeros(capacity.max_bs + 1, dtype=torch.int64, device=self.device)
        self._draft = self._runner(block_phase(drafting, capacity, self._roots), backends.draft)
        self._context = self._runner(context_phase(extending, capacity), backends.draft_extend)
        verifying = Model(target, self.target_caches, backends.verify)
        self._verify = self._runner(chain_verify_phase(verifying, capacity, self._sampling), backends.verify)
        self._first_context = self._prefill_runner(context_prefill_phase(filling, capacity))

    @torch.no_grad()
    def cycle(self, rows: Sequence[int], max_committed: Sequence[int]) -> Launch:
        """One cycle, which emits the accepted drafts and the target's own token after them."""
        timings, capacity, index = Timings(self.device), self.capacity, self._index(rows)
        committed, bounds = self._load(index), self._bounds(max_committed)
        block = Step.draft_block(capacity.block_width, *committed, **bounds)
        chains = self._run(self._draft, block, Nothing())
        timings.mark("draft")
        verifying = Step.target_verify(capacity.num_draft_tokens, *committed, **bounds)
        accepted = self._run(self._verify, verifying, chains)
        timings.mark("verify")
        extending = Step.draft_extend(UniformQuery(capacity.max_accepted), *committed, **bounds)
        self._run(self._context, extending, accepted)
        timings.mark("context")
        launch = Launch(accepted.tokens, accepted.num_accepted, timings)
        self._roots[index] = accepted.tokens[:, -1]
        self._lens.index_add_(0, index, accepted.num_accepted)
        return launch

    @torch.no_grad()
    def _draft_prefill(self, chunks: Sequence[Chunk], features: Tensor, first: Tensor) -> None:
        """Store the context of chunks: behind a prompt, the root is `first`."""
        step = self._prefill_step(chunks)
        self._run(self._first_context, step, ContextRows(features, token_positions(step)))
        self._roots[self._index([chunk.row for chunk in chunks])] = first


def block_phase(draft: Model[BlockModel], capacity: Capacity, roots: Tensor) -> Phase[Nothing, Chains]:
    """One forward of the draft over a block, and the token that each of its rows proposes. roots: the table of the last
    sampled tokens, [n] int64.
    """

    def region(meta: Metadata, _: Nothing) -> Chains:
        root, attention = roots[rows_of(meta)], draft.attention(meta.at())
        rows = draft.model.forward(root, token_positions(meta.step), attention)
        return Chains(torch.cat((root.unsqueeze(1), draft.model.propose(rows, root)), dim=1))

    bucket = partial(capacity.bucket, StepKind.DRAFT_BLOCK)
    return Phase("draft", region, lambda bs: Nothing(), Chains, bucket)


def context_phase(draft: Model[BlockModel], capacity: Capacity) -> Phase[Accepted, Nothing]:
    """The draft's context of the accepted tokens, stored over the rows of their block."""
    model, width = draft.model, capacity.max_accepted

    def region(meta: Metadata, accepted: Accepted) -> Nothing:
        at = meta.keeping(accepted.num_accepted)
        assert at.kept is not None, "rows are kept"
        hidden, positions = accepted.hidden.flatten(0, 1)[at.kept], token_positions(meta.step)[at.kept]
        model.store_context(hidden, positions, draft.attention(at))
        return Nothing()

    def safe_inputs(bs: int) -> Accepted:
        return Accepted(
            num_accepted=torch.zeros(bs, dtype=torch.int32, device=model.device),
            tokens=torch.zeros(bs, width, dtype=torch.int64, device=model.device),
            hidden=torch.zeros(bs, width, model.feature_size, dtype=model.dtype, device=model.device),
        )

    return Phase("context", region, safe_inputs, Nothing, lambda bs: capacity.bucket(StepKind.DRAFT_EXTEND, bs))


def context_prefill_phase(draft: Model[BlockModel], capacity: Capacity) -> PackedPhase[ContextRows, Nothing]:
    """The draft's context of rows of prompts."""
    model = draft.model

    def region(forward: Forward, given: ContextRows) -> Nothing:
        model.store_context(given.hidden, given.positions, draft.attention(forward))
        return Nothing()

    def safe_inputs(num_tokens: int) -> ContextRows:
        hidden = torch.zeros(num_tokens, model.feature_size, dtype=model.dtype, device=model.device)
        return ContextRows(hidden, torch.zeros(num_tokens, dtype=torch.int64, device=model.device))

    return PackedPhase(DRAFT_PREFILL, region, safe_inputs, Nothing, capacity.prefill_bucket)


def _check(draft: BlockModel, capacity: Capacity, options: WorkerOptions) -> None:
    """Refuse what is not one chain of the draft's block."""
    size, drafted, reasons = draft.block_size, draft.num_drafted, []
    if (capacity.topk, capacity.num_steps, capacity.num_draft_tokens) != (1, drafted, drafted + 1):
        shape = f"topk={capacity.topk}, num_steps={capacity.num_steps}, num_draft_tokens={capacity.num_draft_tokens}"
        reasons.append(f"{shape} (the draft's block has {size} rows, {drafted} of which propose a token)")
    if capacity.num_rerun or capacity.block_width != size:
        reasons.append(f"num_rerun={capacity.num_rerun}, block_size={capacity.block_size} (a block runs once, whole)")
    if options.adaptive is not None:
        reasons.append("adaptive steps (a block has the draft's own number of masks)")
    if options.verifies_by_confidence:
        reasons.append("verifying by confidence (EagleWorker does)")
    if options.draft_window is not None:
        reasons.append(f"draft_window={options.draft_window} (a window is that of the draft's own layers)")
    if options.placeholder_token is not None:
        reasons.append("prompts with embeddings (a block's root is a token)")
    longest = capacity.max_context + capacity.draft_room
    if longest > draft.max_positions:
        reasons.append(f"max_context={capacity.max_context}, {longest} positions (the draft has {draft.max_positions})")
    if reasons:
        nearest = f"Capacity(..., 1, {drafted}, {drafted + 1}, block_size={size}), text, or EagleWorker"
        raise UnsupportedStepError("a block draft", reasons, nearest)
