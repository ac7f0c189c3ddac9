"""A verify of as many drafts as each request's draft is sure of: how many, and the phase that verifies them.

What is cut depends on the draft alone, and a row's choice on the row alone, so that tokens are those of plain decoding,
greedy and sampled.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.sampling_operators import choose
from attn_backends.planning.metadata import Metadata
from attn_backends.runner import Phase
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.phases import Accepted, Drafted, Model, VerifyInputs, by_name, verify_phase
from attn_backends_reference.models.decoder import TargetModel
from spec_metadata import (
    BoundedQuery,
    Capacity,
    SamplingParams,
    StepKind,
    TokenBucket,
    accept,
    confident_widths,
    packed_rows,
    query_starts,
    token_positions,
)


def num_rows(capacity: Capacity, options: WorkerOptions, bs: int) -> int:
    """Bound on the rows of a verify of so many requests."""
    most = bs * capacity.num_draft_tokens
    return most if options.verify_rows is None else min(most, max(options.verify_rows, bs))


def ragged_query(drafted: Drafted, capacity: Capacity, options: WorkerOptions) -> BoundedQuery:
    """The rows of a verify: the draft is cut where its probability falls under the threshold, and to the bound."""
    bs = drafted.scores.shape[0]
    bound, real = num_rows(capacity, options, bs), drafted.scores.new_ones(bs, dtype=torch.bool)
    widths = confident_widths(drafted.scores, options.verify_threshold or 0.0, bound, real)
    return BoundedQuery(widths, bound, capacity.num_draft_tokens)


def verify_phase_of(
    target: Model[TargetModel], capacity: Capacity, options: WorkerOptions
) -> Phase[VerifyInputs, Accepted]:
    """The verify of all drafted tokens, or of those that the draft is sure of."""
    if not options.verifies_by_confidence:
        return verify_phase(target, capacity)
    reasons = target.backend.capture_reasons(
        capacity.ragged_bucket(StepKind.TARGET_VERIFY, 1, capacity.num_draft_tokens)
    )
    if capacity.topk > 1:
        reasons = [f"topk={capacity.topk} (the rows of a ragged verify are a chain: topk=1)", *reasons]
    if options.adaptive is not None:
        reasons = ["adaptive steps (they cut every draft of a cycle alike)", *reasons]
    if reasons:
        nearest = "no verify_threshold and verify_rows, which verifies all that is drafted"
        raise UnsupportedStepError("verifying by confidence", reasons, nearest)
    return ragged_verify_phase(target, capacity, options)


def ragged_verify_phase(
    target: Model[TargetModel], capacity: Capacity, options: WorkerOptions
) -> Phase[VerifyInputs, Accepted]:
    """As `verify_phase`, over chains of which the step says how many rows it has of each."""
    uniform, num_nodes = verify_phase(target, capacity), capacity.num_draft_tokens

    def region(meta: Metadata, given: VerifyInputs) -> Accepted:
        step, bs, tree = meta.step, given.tokens.shape[0], given.tree
        request, node = packed_rows(step.query)
        request, node = request.clamp(max=bs - 1), node.clamp(max=num_nodes - 1)
        positions = token_positions(step)
        hidden, features = target.model.forward_features(
            given.tokens[request, node], positions, target.attention(meta.at())
        )
        params = SamplingParams(**{name: each[request] for name, each in by_name(given.params).items()})
        chosen = choose(target.model.logits(hidden).unsqueeze(1), params, positions.unsqueeze(1)).squeeze(1)
        rows, is_verified = _rows_of_nodes(query_starts(step).long()[: bs + 1], num_nodes, step.num_tokens)
        tree = replace(tree, tokens=torch.where(is_verified, tree.tokens, -1))  # which no choice is
        acceptance = accept(tree, chosen[rows], capacity.max_accepted)
        accepted = features[rows.gather(1, acceptance.path)]
        return Accepted(acceptance.num_accepted, acceptance.tokens, accepted)

    def bucket(bs: int) -> TokenBucket:
        return capacity.ragged_bucket(StepKind.TARGET_VERIFY, bs, num_rows(capacity, options, bs))

    return replace(uniform, region=region, bucket=bucket)


def _rows_of_nodes(starts: Tensor, num_nodes: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The query row of each node, [bs, num_nodes] int64, of one that is not verified its request's last; and which are.

    starts: [bs + 1] int64.
    """
    widths, nodes = starts.diff().unsqueeze(1), torch.arange(num_nodes, device=starts.device)
    rows = starts[:-1].unsqueeze(1) + torch.minimum(nodes, (widths - 1).clamp_min(0))
    return rows.clamp(max=num_tokens - 1), nodes < widths
