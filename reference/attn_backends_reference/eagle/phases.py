"""The phases of an EAGLE cycle as regions of device work: draft, verify and accept, draft extend; and plain decode.

No region reads the device from the host, so each can be captured whole. H is the draft's hidden size, F the number of
columns that it takes of the target (H, or more for EAGLE-3) and A max_accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import PagedCache
from attn_backends.kernels.sampling_operators import choose
from attn_backends.planning.metadata import Metadata
from attn_backends.runner import PerRequest, Phase
from attn_backends_reference.eagle.tables import kept, rows_of
from attn_backends_reference.models.attention import Attention, ForwardAttention, PiecewiseAttention
from attn_backends_reference.models.decoder import DraftModel, PagedModel, TargetModel
from attn_backends_reference.pieces import Forward, PiecewiseGraph
from spec_metadata import (
    Capacity,
    DraftBeams,
    DraftTree,
    SamplingParams,
    StepKind,
    accept,
    compaction_moves,
    token_positions,
)

M = TypeVar("M", bound=PagedModel, covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """Start of a draft loop. root: [bs] int64, the last sampled token. tokens: [bs, topk] int64 and log_probs
    [bs, topk]: the draft's best at depth 1. hidden: [bs, H], the draft's state at its last committed row.
    """

    root: PerRequest
    tokens: PerRequest
    log_probs: PerRequest
    hidden: PerRequest

    @classmethod
    def empty(cls, bs: int, topk: int, draft: DraftModel) -> DraftState:
        """Zeros."""
        ids = torch.zeros(bs, topk, dtype=torch.int64, device=draft.device)
        hidden = torch.zeros(bs, draft.hidden_size, dtype=draft.dtype, device=draft.device)
        return cls(root=ids[:, 0].clone(), tokens=ids, log_probs=ids.float(), hidden=hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Nothing:
    """The inputs of a phase that reads all in the worker's tables, or the outputs of one that stores."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeFields:
    """A `DraftTree`, field by field."""

    tokens: PerRequest
    parents: PerRequest
    depths: PerRequest
    mask: PerRequest

    @property
    def tree(self) -> DraftTree:
        """The fields put together again."""
        return DraftTree(self.tokens, self.parents, self.depths, self.mask)


@dataclass(frozen=True, slots=True, eq=False)
class Drafted(TreeFields):
    """A tree and what its draft thinks of it. scores: [bs, num_nodes - 1], the log-probability of each proposed path in
    the order of proposal, which is that of the nodes of a chain.
    """

    scores: PerRequest


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """An `Acceptance` with what the draft takes of the target on its path. num_accepted: [bs] int32. tokens: [bs, A]
    int64. hidden: [bs, A, F], the target's features; rows past num_accepted are garbage.
    """

    num_accepted: PerRequest
    tokens: PerRequest
    hidden: PerRequest


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """tokens: [bs] int64."""

    tokens: PerRequest


@dataclass(frozen=True, slots=True, eq=False)
class Model(Generic[M]):
    """A model with its caches and the backend of one phase."""

    model: M
    caches: Sequence[PagedCache]
    backend: AttentionBackend

    def attention(self, forward: Forward) -> Attention:
        """The attention of one forward, or that of all replays of a piecewise graph."""
        if isinstance(forward, PiecewiseGraph):
            return PiecewiseAttention(self.backend, self.caches, forward, self.model.layers)
        return ForwardAttention(self.backend, self.caches, forward, self.model.layers)


def draft_phase(
    draft: Model[DraftModel], capacity: Capacity, states: DraftState, lens: Tensor
) -> Phase[Nothing, Drafted]:
    """The whole draft loop: num_steps - 1 forwards from the scores of depth 1, then the tree of the best nodes.

    states: the table that requests begin from, whose tokens of depth 1 are topk or more, best first. lens: the table of
    committed tokens, [n] int32; where the draft reads a window, a step's lengths do not count all of them.
    """
    topk, hidden_size = capacity.topk, draft.model.hidden_size

    def region(meta: Metadata, _: Nothing) -> Drafted:
        state, committed = kept(states, rows_of(meta)), lens[rows_of(meta)]
        beams = DraftBeams.start(state.tokens[:, :topk], state.log_probs[:, :topk])
        hidden = state.hidden.unsqueeze(1).expand(-1, topk, -1)
        for i in range(capacity.num_steps - 1):
            of_parent = beams.parent_branches.unsqueeze(2).expand(-1, -1, hidden_size)
            rows = hidden.gather(1, of_parent).reshape(-1, hidden_size)
            attention = draft.attention(meta.at(i, beams.ancestors))
            positions = _draft_positions(meta, committed, i)
            out = draft.model.forward(beams.tokens.reshape(-1), rows, positions, attention)
            log_probs, tokens = best_drafts(draft.model, out, topk)
            beams = beams.advance(tokens.view(-1, topk, topk), log_probs.view(-1, topk, topk))
            hidden = out.view(-1, topk, hidden_size)
        tree = beams.tree(state.root, capacity.num_draft_tokens)
        scores = beams.candidate_scores[:, : capacity.num_draft_tokens - 1]
        return Drafted(tree.tokens, tree.parents, tree.depths, tree.mask, scores)

    bucket = partial(capacity.bucket, StepKind.DRAFT_DECODE)
    return Phase("draft", region, lambda bs: Nothing(), Drafted, bucket)


def _draft_positions(meta: Metadata, committed: Tensor, forward: int) -> Tensor:
    """[num_tokens] int64, where the rows of a forward stand. committed: [bs] int32."""
    return (committed.long() + forward).unsqueeze(1).expand(-1, meta.step.width).reshape(-1)


def verify_phase(
    target: Model[TargetModel], capacity: Capacity, sampling: SamplingParams
) -> Phase[TreeFields, Accepted]:
    """One target forward over the tree, its choice at every node, acceptance of the path that the choices take, and the
    accepted KV moved after the committed. sampling: the table of how requests sample.
    """
    num_nodes, max_accepted = capacity.num_draft_tokens, capacity.max_accepted

    def region(meta: Metadata, given: TreeFields) -> Accepted:
        tree, params = given.tree, kept(sampling, rows_of(meta))
        positions = meta.step.seq_lens.long().unsqueeze(1) + tree.depths
        attention = target.attention(meta.at())
        hidden, features = target.model.forward_features(tree.tokens.reshape(-1), positions.reshape(-1), attention)
        logits = target.model.logits(hidden).unflatten(0, (-1, num_nodes))
        acceptance = accept(tree, choose(logits, params, positions), max_accepted)
        if meta.step.is_tree:
            sources, destinations = compaction_moves(acceptance, meta.step)
            for cache in target.caches:
                cache.move(sources, destinations)
        on_path = acceptance.path.unsqueeze(2).expand(-1, -1, features.shape[-1])
        accepted_features = features.view(-1, num_nodes, features.shape[-1]).gather(1, on_path)
        return Accepted(acceptance.num_accepted, acceptance.tokens, accepted_features)

    def safe_inputs(bs: int) -> TreeFields:
        ids = torch.zeros(bs, num_nodes, dtype=torch.int64, device=target.model.device)
        return TreeFields(ids, ids.clone(), ids.clone(), ids.new_zeros(bs, num_nodes, num_nodes, dtype=torch.bool))

    def bound(given: TreeFields) -> dict[str, Tensor]:
        return {"tree_mask": given.mask} if capacity.topk > 1 else {}

    bucket = partial(capacity.bucket, StepKind.TARGET_VERIFY)
    return Phase("verify", region, safe_inputs, Accepted, bucket, bound)


def extend_phase(draft: Model[DraftModel], capacity: Capacity, num_best: int = 0) -> Phase[Accepted, DraftState]:
    """The draft catches up over the accepted path, and scores depth 1 at its last row. num_best: of `draft_phase`."""
    max_accepted, hidden_size = capacity.max_accepted, draft.model.hidden_size

    def region(meta: Metadata, accepted: Accepted) -> DraftState:
        rows = draft.model.fuse(accepted.hidden.flatten(0, 1))
        attention = draft.attention(meta.at())
        out = draft.model.forward(accepted.tokens.reshape(-1), rows, token_positions(meta.step), attention)
        last = (accepted.num_accepted.long() - 1).clamp_min(0).view(-1, 1, 1).expand(-1, -1, hidden_size)
        hidden = out.view(-1, max_accepted, hidden_size).gather(1, last).squeeze(1)
        log_probs, tokens = best_drafts(draft.model, hidden, num_best or capacity.topk)
        return DraftState(root=accepted.tokens[:, -1], tokens=tokens, log_probs=log_probs, hidden=hidden)

    def safe_inputs(bs: int) -> Accepted:
        device = draft.model.device
        return Accepted(
            num_accepted=torch.zeros(bs, dtype=torch.int32, device=device),
            tokens=torch.zeros(bs, max_accepted, dtype=torch.int64, device=device),
            hidden=torch.zeros(bs, max_accepted, draft.model.feature_size, dtype=draft.model.dtype, device=device),
        )

    return Phase("draft_extend", region, safe_inputs, DraftState, lambda bs: capacity.bucket(StepKind.DRAFT_EXTEND, bs))


def decode_phase(
    target: Model[TargetModel], capacity: Capacity, sampling: SamplingParams, last: Tensor
) -> Phase[Nothing, NextTokens]:
    """One target forward of width 1 and its choice: plain decoding. sampling, last: tables of how requests sample, and
    of the last token of each, [n] int64.
    """

    def region(meta: Metadata, _: Nothing) -> NextTokens:
        rows, positions = rows_of(meta), token_positions(meta.step)
        hidden = target.model.forward(last[rows], positions, target.attention(meta.at()))
        return NextTokens(next_tokens(target.model.logits(hidden), kept(sampling, rows), positions))

    bucket = partial(capacity.bucket, StepKind.DECODE)
    return Phase("decode", region, lambda bs: Nothing(), NextTokens, bucket)


def next_tokens(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
    """[bs] int64, the target's choice at one row of each request. logits: [bs, vocab]. positions: [bs] int64, where the
    rows' own tokens stand: of the first token after a prompt, the prompt's last position.
    """
    return choose(logits.unsqueeze(1), params, positions.unsqueeze(1)).squeeze(1)


def best_drafts(draft: DraftModel, hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the target's ids, [rows, topk], of a draft's best tokens. hidden: [rows, H], its rows'."""
    log_probs, ids = draft.logits(hidden).float().log_softmax(dim=-1).topk(topk, dim=-1)
    return log_probs, draft.target_ids(ids)


def by_name(value: Any) -> dict[str, Tensor]:
    """The fields of a dataclass of tensors."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
