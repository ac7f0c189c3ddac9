"""A verify of as many drafts as each request's draft is sure of: how many, and the phases that verify them and extend
the draft by what was accepted.

What is cut depends on the draft alone, and a row's choice on the row alone, so that tokens are those of plain decoding,
greedy and sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.sampling_operators import choose
from attn_backends.planning.metadata import Metadata
from attn_backends.runner import PerRequest, Phase
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.phases import (
    Accepted,
    Drafted,
    DraftState,
    Model,
    TreeFields,
    best_drafts,
    extend_phase,
    verify_phase,
)
from attn_backends_reference.eagle.tables import kept, rows_of
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from spec_metadata import (
    BoundedQuery,
    Capacity,
    SamplingParams,
    Step,
    StepKind,
    TokenBucket,
    UniformQuery,
    accept,
    confident_widths,
    packed_rows,
    query_starts,
    token_positions,
)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTree(TreeFields):
    """widths: [bs] int64, nodes of each chain that are verified."""

    widths: PerRequest


def num_rows(capacity: Capacity, options: WorkerOptions, bs: int) -> int:
    """Bound on the rows of a verify of so many requests."""
    most = bs * capacity.num_draft_tokens
    return most if options.verify_rows is None else min(most, max(options.verify_rows, bs))


def verified_rows(
    drafted: Drafted, capacity: Capacity, options: WorkerOptions
) -> tuple[int | BoundedQuery, TreeFields]:
    """The rows of a verify and its inputs: all nodes, or the draft is cut where its probability falls under the
    threshold, and to the bound.
    """
    if not options.verifies_by_confidence:
        return capacity.num_draft_tokens, drafted
    bs = drafted.scores.shape[0]
    bound, real = num_rows(capacity, options, bs), drafted.scores.new_ones(bs, dtype=torch.bool)
    widths = confident_widths(drafted.scores, options.verify_threshold or 0.0, bound, real)
    tree = RaggedTree(drafted.tokens, drafted.parents, drafted.depths, drafted.mask, widths)
    return BoundedQuery(widths, bound, capacity.num_draft_tokens), tree


def accepted_rows(accepted: Accepted, capacity: Capacity, options: WorkerOptions) -> UniformQuery | BoundedQuery:
    """The rows of a draft extend: those of the longest path, or of accepted tokens, no more than the verify had."""
    if not options.verifies_by_confidence:
        return UniformQuery(capacity.max_accepted)
    bound = num_rows(capacity, options, accepted.tokens.shape[0])
    return BoundedQuery(accepted.num_accepted, bound, capacity.max_accepted)


def verify_phase_of(
    target: Model[TargetModel], capacity: Capacity, options: WorkerOptions, sampling: SamplingParams
) -> Phase[Any, Accepted]:
    """The verify of all drafted tokens, or of those that the draft is sure of. sampling: as of `verify_phase`."""
    if not options.verifies_by_confidence:
        return verify_phase(target, capacity, sampling)
    _check(StepKind.TARGET_VERIFY, target.backend, capacity, options)
    return ragged_verify_phase(target, capacity, options, sampling)


def extend_phase_of(
    draft: Model[DraftModel], capacity: Capacity, options: WorkerOptions, num_best: int = 0
) -> Phase[Accepted, DraftState]:
    """The draft extend over all rows of the longest path, or over those that were accepted. num_best: of
    `draft_phase`.
    """
    if not options.verifies_by_confidence:
        return extend_phase(draft, capacity, num_best)
    _check(StepKind.DRAFT_EXTEND, draft.backend, capacity, options)
    return ragged_extend_phase(draft, capacity, options, num_best)


def _check(kind: StepKind, backend: AttentionBackend, capacity: Capacity, options: WorkerOptions) -> None:
    """Refuse ragged steps where the backend of their kind or another option has none."""
    bucket = capacity.ragged_bucket(kind, 1, capacity.num_draft_tokens)
    reasons = [f"{reason}, in a {kind} step" for reason in backend.capture_reasons(bucket)]
    if capacity.topk > 1:
        reasons = [f"topk={capacity.topk} (the rows of a ragged verify are a chain: topk=1)", *reasons]
    if options.adaptive is not None:
        reasons = ["adaptive steps (they cut every draft of a cycle alike)", *reasons]
    if reasons:
        nearest = "no verify_threshold and verify_rows, which verifies all that is drafted"
        raise UnsupportedStepError("verifying by confidence", reasons, nearest)


def ragged_verify_phase(
    target: Model[TargetModel], capacity: Capacity, options: WorkerOptions, sampling: SamplingParams
) -> Phase[RaggedTree, Accepted]:
    """As `verify_phase`, over chains of which the step says how many rows it has of each."""
    uniform, num_nodes = verify_phase(target, capacity, sampling), capacity.num_draft_tokens

    def region(meta: Metadata, given: RaggedTree) -> Accepted:
        step, bs, tree = meta.step, given.tokens.shape[0], given.tree
        request, node = _rows(step, bs, num_nodes)
        positions = token_positions(step)
        hidden, features = target.model.forward_features(
            given.tokens[request, node], positions, target.attention(meta.at())
        )
        params = kept(sampling, rows_of(meta)[request])
        chosen = choose(target.model.logits(hidden).unsqueeze(1), params, positions.unsqueeze(1)).squeeze(1)
        rows, is_verified = _rows_of_nodes(query_starts(step).long()[: bs + 1], num_nodes, step.num_tokens)
        tree = replace(tree, tokens=torch.where(is_verified, tree.tokens, -1))  # which no choice is
        acceptance = accept(tree, chosen[rows], capacity.max_accepted)
        accepted = features[rows.gather(1, acceptance.path)]
        return Accepted(acceptance.num_accepted, acceptance.tokens, accepted)

    def safe_inputs(bs: int) -> RaggedTree:
        tree = uniform.safe_inputs(bs)
        return RaggedTree(tree.tokens, tree.parents, tree.depths, tree.mask, tree.tokens.new_zeros(bs))

    def bucket(bs: int) -> TokenBucket:
        return capacity.ragged_bucket(StepKind.TARGET_VERIFY, bs, num_rows(capacity, options, bs))

    return Phase(uniform.name, region, safe_inputs, Accepted, bucket, lambda given: {"widths": given.widths})


def ragged_extend_phase(
    draft: Model[DraftModel], capacity: Capacity, options: WorkerOptions, num_best: int = 0
) -> Phase[Accepted, DraftState]:
    """As `extend_phase`, over the rows of accepted tokens alone."""
    uniform, max_accepted = extend_phase(draft, capacity, num_best), capacity.max_accepted

    def region(meta: Metadata, accepted: Accepted) -> DraftState:
        step, bs = meta.step, accepted.tokens.shape[0]
        request, row = _rows(step, bs, max_accepted)
        features, attention = draft.model.fuse(accepted.hidden[request, row]), draft.attention(meta.at())
        out = draft.model.forward(accepted.tokens[request, row], features, token_positions(step), attention)
        hidden = out[(query_starts(step).long()[1 : bs + 1] - 1).clamp_min(0)]
        log_probs, tokens = best_drafts(draft.model, hidden, num_best or capacity.topk)
        return DraftState(root=accepted.tokens[:, -1], tokens=tokens, log_probs=log_probs, hidden=hidden)

    def bucket(bs: int) -> TokenBucket:
        return capacity.ragged_bucket(StepKind.DRAFT_EXTEND, bs, num_rows(capacity, options, bs))

    return replace(uniform, region=region, bucket=bucket, bound=lambda given: {"widths": given.num_accepted})


def _rows(step: Step, bs: int, width: int) -> tuple[Tensor, Tensor]:
    """The request of each query row and the row's number in it, both [num_tokens] int64; of padding those of any."""
    request, row = packed_rows(step.query)
    return request.clamp(max=bs - 1), row.clamp(max=width - 1)


def _rows_of_nodes(starts: Tensor, num_nodes: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The query row of each node, [bs, num_nodes] int64, of one that is not verified its request's last; and which are.

    starts: [bs + 1] int64.
    """
    widths, nodes = starts.diff().unsqueeze(1), torch.arange(num_nodes, device=starts.device)
    rows = starts[:-1].unsqueeze(1) + torch.minimum(nodes, (widths - 1).clamp_min(0))
    return rows.clamp(max=num_tokens - 1), nodes < widths
