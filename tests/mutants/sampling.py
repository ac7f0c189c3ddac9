"""Mutants of sampling: wrong laws, noise that is not the request's own, wrong filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends_reference.eagle import phases
from spec_metadata import Acceptance, DraftTree, Sampling, SamplingParams, accept, choose, sampling
from tests.mutants.mutant import mutant


@mutant("the speculative sampling rule, acceptance left out", "sampling.law")
def always_accepting(patch: pytest.MonkeyPatch) -> None:
    """A node with children continues with the first, whatever the target chose."""

    def first_child(tree: DraftTree, chosen: Tensor, max_accepted: int) -> Acceptance:
        nodes = torch.arange(tree.parents.shape[1])
        children = (tree.parents.unsqueeze(1) == nodes.view(1, -1, 1)) & (nodes > 0)
        drafted = tree.tokens.gather(1, children.int().argmax(2))
        return accept(tree, torch.where(children.any(2), drafted, chosen), max_accepted)

    patch.setattr(phases, "accept", first_child)


def redraw(patch: pytest.MonkeyPatch, change: Callable[[DraftTree, Tensor], Tensor]) -> None:
    """The token after the accepted path is drawn a second time from all tokens, then changed."""
    again: list[Tensor] = []

    def twice(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
        again[:] = [choose(logits, params, positions + 1000)]
        return choose(logits, params, positions)

    def end_with_the_second(tree: DraftTree, chosen: Tensor, max_accepted: int) -> Acceptance:
        found = accept(tree, chosen, max_accepted)
        last = found.num_accepted.long().unsqueeze(1) - 1
        bonus = change(tree, again[0]).gather(1, found.path.gather(1, last))
        return replace(found, tokens=torch.where(torch.arange(max_accepted) < last, found.tokens, bonus))

    patch.setattr(phases, "choose", twice)
    patch.setattr(phases, "accept", end_with_the_second)


@mutant("the speculative sampling rule, residual taken with the rejected siblings in it", "sampling.law")
def siblings_left_in_the_residual(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the next token is drawn from the target's whole distribution."""
    redraw(patch, lambda tree, tokens: tokens)


@mutant("the speculative sampling rule, residual not renormalised", "sampling.law")
def residual_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    """What the rejected siblings had goes to the last token of the vocabulary, where a cumulative sum ends."""

    def to_the_last_token(tree: DraftTree, tokens: Tensor) -> Tensor:
        nodes = torch.arange(tree.parents.shape[1])
        children = (tree.parents.unsqueeze(1) == nodes.view(1, -1, 1)) & (nodes > 0)
        rejected = (children & (tree.tokens.unsqueeze(1) == tokens.unsqueeze(2))).any(2)
        return torch.where(rejected, 6, tokens)

    redraw(patch, to_the_last_token)


@mutant("one random number reused for two positions", "sampling.law")
def noise_without_the_position(patch: pytest.MonkeyPatch) -> None:
    """The key of the noise is the seed alone."""
    patch.setattr(phases, "choose", lambda logits, params, positions: choose(logits, params, 0 * positions))


@mutant("noise told by node", "sampling.reproducible", "worker.sampled_lossless")
def noise_of_the_node(patch: pytest.MonkeyPatch) -> None:
    """A node's noise is that of its number in the tree, not of its depth: no other tree or plain decoding has it."""

    def by_node(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
        return choose(logits, params, positions[:, :1] + torch.arange(positions.shape[1]))

    patch.setattr(phases, "choose", by_node)


@mutant("noise told by depth", "sampling.reproducible", "worker.sampled_lossless")
def noise_of_the_depth(patch: pytest.MonkeyPatch) -> None:
    """A node's noise is that of its depth in the tree: every cycle draws the same numbers again."""

    def by_depth(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
        return choose(logits, params, positions - positions[:, :1])

    patch.setattr(phases, "choose", by_depth)


@mutant("noise told by the batch's row", "sampling.reproducible")
def noise_of_the_batch_row(patch: pytest.MonkeyPatch) -> None:
    """A request's noise depends on where in the batch it stands."""

    def by_row(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
        seed = params.seed + torch.arange(len(params.seed))
        return choose(logits, replace(params, seed=seed), positions)

    patch.setattr(phases, "choose", by_row)


@mutant("a random number generator's offset frozen by capture", "sampling.reproducible")
def draws_counted_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """The host counts the draws; a graph keeps the count of its capture."""
    calls: list[int] = []

    def counted(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
        calls.append(len(calls))
        return choose(logits, params, torch.full_like(positions, calls[-1]))

    patch.setattr(phases, "choose", counted)


@mutant("filters that don't see each other", "sampling.filters")
def top_p_of_all_tokens(patch: pytest.MonkeyPatch) -> None:
    """top-p counts probabilities of tokens that top-k has taken out."""
    kept = sampling._kept

    def independently(scores: Tensor, params: SamplingParams) -> Tensor:
        by_top_p = kept(scores, replace(params, top_k=torch.zeros_like(params.top_k)))
        return by_top_p & kept(scores, replace(params, top_p=torch.ones_like(params.top_p)))

    patch.setattr(sampling, "_kept", independently)


@mutant("off by one", "sampling.filters")
def one_token_more_than_top_k(patch: pytest.MonkeyPatch) -> None:
    """top-k keeps k + 1 tokens."""
    kept = sampling._kept

    def one_more(scores: Tensor, params: SamplingParams) -> Tensor:
        return kept(scores, replace(params, top_k=torch.where(params.top_k > 0, params.top_k + 1, 0).int()))

    patch.setattr(sampling, "_kept", one_more)


@mutant("filters before the temperature", "sampling.filters")
def top_p_without_temperature(patch: pytest.MonkeyPatch) -> None:
    """top-p counts probabilities at temperature 1."""
    kept = sampling._kept
    patch.setattr(sampling, "_kept", lambda scores, params: kept(scores * params.temperature.view(-1, 1, 1), params))


@mutant("a batch that is greedy or sampled as a whole", "sampling.filters")
def greedy_requests_sampled(patch: pytest.MonkeyPatch) -> None:
    """A greedy request samples as soon as another of its batch does."""

    def of_the_batch(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
        temperature = params.temperature.max().expand_as(params.temperature)
        return choose(logits, replace(params, temperature=temperature), positions)

    patch.setattr(phases, "choose", of_the_batch)


@mutant("a hash of unsigned integers computed with signed ones", "sampling.noise", "sampling.filters")
def shift_brings_in_ones(patch: pytest.MonkeyPatch) -> None:
    """Negative numbers are shifted right with their sign."""
    patch.setattr(sampling, "_shift", lambda bits, count: bits >> count)


@mutant("a counter taken for noise", "sampling.noise")
def counter_not_mixed(patch: pytest.MonkeyPatch) -> None:
    """The numbers of a stream are steps of one length, so neighbours depend on each other."""
    patch.setattr(sampling, "_draw", lambda states, indices: states + (indices + 1) * sampling._GAMMA)


@mutant("parameters taken unseen", "sampling.ranges")
def nothing_refused(patch: pytest.MonkeyPatch) -> None:
    """Temperatures below zero and probabilities above one are taken."""
    patch.setattr(Sampling, "__post_init__", lambda self: None)
