"""Mutants of acceptance, of draft beams and of the moves of accepted tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.conformance import checks_worker
from spec_metadata import (
    Acceptance,
    BoundedQuery,
    DraftBeams,
    DraftTree,
    Step,
    accept,
    compaction_moves,
    confident_widths,
    fit_widths,
)
from tests.mutants.mutant import mutant

ACCEPTS, BEAMS, COMPACTS = "worker.accepts", "worker.beams", "worker.compacts"


@mutant("a right token below a rejected node", ACCEPTS)
def accepted_below_a_rejected_node(patch: pytest.MonkeyPatch) -> None:
    """A node is accepted if the target chose it at its parent, whether or not that parent is accepted."""

    def alone(tree: DraftTree, choices: Tensor, max_accepted: int) -> Acceptance:
        return accept(
            replace(tree, mask=torch.eye(tree.mask.shape[1], device=tree.mask.device).bool() & tree.mask),
            choices,
            max_accepted,
        )

    patch.setattr(checks_worker, "accept", alone)


@mutant("the target's token of another node", ACCEPTS)
def bonus_of_the_deepest_node(patch: pytest.MonkeyPatch) -> None:
    """The token after an accepted path is the target's choice at the last node, accepted or not."""

    def deepest(tree: DraftTree, choices: Tensor, max_accepted: int) -> Acceptance:
        got = accept(tree, choices, max_accepted)
        is_bonus = torch.arange(max_accepted, device=choices.device) >= got.num_accepted.unsqueeze(1) - 1
        return replace(got, tokens=torch.where(is_bonus, choices[:, -1:], got.tokens))

    patch.setattr(checks_worker, "accept", deepest)


@mutant("our own: no path had more than six nodes", ACCEPTS)
def paths_end_at_their_ninth_node(patch: pytest.MonkeyPatch) -> None:
    """No more than nine nodes are accepted."""

    def nine(*given: Any) -> Acceptance:
        got = accept(*given)
        return replace(got, num_accepted=got.num_accepted.clamp(max=9))

    patch.setattr(checks_worker, "accept", nine)


@mutant("our own: no id was over 1,100", ACCEPTS)
def ids_of_16_bits(patch: pytest.MonkeyPatch) -> None:
    """Of drafts and choices the lowest 16 bits are read."""

    def lowest(tree: DraftTree, choices: Tensor, most: int) -> Acceptance:
        return accept(replace(tree, tokens=tree.tokens.short().long()), choices.short().long(), most)

    patch.setattr(checks_worker, "accept", lowest)


@mutant("our own: no tree had more than five levels", BEAMS)
def ancestors_past_the_fifth_lost(patch: pytest.MonkeyPatch) -> None:
    """A node of a tree sees five nodes above it."""
    tree = DraftBeams.tree

    def five(*given: Any) -> DraftTree:
        right = tree(*given)
        return DraftTree.from_parents(right.tokens, right.parents, 5)

    patch.setattr(DraftBeams, "tree", five)


@mutant("branches ranked by a step alone", BEAMS)
def branches_ranked_by_their_last_step(patch: pytest.MonkeyPatch) -> None:
    """The best children of a level are those of the best last step, whatever led there."""
    advance = DraftBeams.advance

    def last_step(self: DraftBeams, tokens: Tensor, log_probs: Tensor) -> DraftBeams:
        return advance(replace(self, scores=torch.zeros_like(self.scores)), tokens, log_probs)

    patch.setattr(DraftBeams, "advance", last_step)


@mutant("a path of another branch's ancestors", BEAMS)
def ancestors_stay_where_branches_move(patch: pytest.MonkeyPatch) -> None:
    """The rows of ancestors stay in the order of the last level, whichever branches live on."""
    advance = DraftBeams.advance

    def in_place(self: DraftBeams, tokens: Tensor, log_probs: Tensor) -> DraftBeams:
        grown = advance(self, tokens, log_probs)
        return replace(grown, ancestors=torch.cat((self.ancestors, grown.ancestors[..., -1:]), dim=2))

    patch.setattr(DraftBeams, "advance", in_place)


@mutant("a child drafted without its parent where scores are equal", BEAMS)
def ties_go_to_the_later_node(patch: pytest.MonkeyPatch) -> None:
    """Of nodes that score the same, a tree takes the later, which may be a child of the earlier."""
    tree = DraftBeams.tree

    def later(self: DraftBeams, root_tokens: Tensor, num_draft_tokens: int) -> DraftTree:
        number = torch.arange(self.candidate_scores.shape[1], device=root_tokens.device)
        return tree(
            replace(self, candidate_scores=self.candidate_scores + 1e-5 * number), root_tokens, num_draft_tokens
        )

    patch.setattr(DraftBeams, "tree", later)


@mutant("drafts taken to lie where they are committed", COMPACTS)
def moved_to_drafted_slots(patch: pytest.MonkeyPatch) -> None:
    """Accepted tokens go to the first slots that the verify wrote, wherever those are."""

    def drafted(acceptance: Acceptance, step: Step) -> tuple[Tensor, Tensor]:
        depths = torch.arange(acceptance.path.shape[1], device=step.device)
        kept = torch.where(depths < acceptance.num_accepted.unsqueeze(1), depths, 0)
        slots = step.flat_slots().long().reshape(len(kept), -1)
        return compaction_moves(acceptance, step)[0], slots.gather(1, kept).reshape(-1)

    patch.setattr(checks_worker, "compaction_moves", drafted)


@mutant("rejected tokens moved with the accepted", COMPACTS)
def whole_path_moved(patch: pytest.MonkeyPatch) -> None:
    """As many tokens are moved as a path may have, rejected ones among them."""

    def whole(acceptance: Acceptance, step: Step) -> tuple[Tensor, Tensor]:
        most = torch.full_like(acceptance.num_accepted, acceptance.path.shape[1])
        return compaction_moves(replace(acceptance, num_accepted=most), step)

    patch.setattr(checks_worker, "compaction_moves", whole)


@mutant("a bound that is left to the step", "worker.widths")
def chains_are_cut_by_depth_alone(patch: pytest.MonkeyPatch) -> None:
    """A worker cuts chains by their threshold; over the bound it is the deepest rows that go, however probable."""

    def by_depth(scores: Tensor, threshold: float, num_tokens: int, real: Tensor) -> Tensor:
        free = confident_widths(scores, threshold, scores.numel() + len(scores), real)
        return torch.where(real, fit_widths(BoundedQuery(free, num_tokens, scores.shape[1] + 1), real), 1).int()

    patch.setattr(checks_worker, "confident_widths", by_depth)
