"""The draft tree: grown level by level from top-k scores, pruned to the best nodes, as fixed-shape device code.

Follows EAGLE-2 (Li et al., 2024, https://arxiv.org/abs/2406.16858): a beam of topk branches a level, every candidate
ranked by its cumulative log-probability. A chain is a tree of topk 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.errors import INTEGERS, InvalidStepError, check_tensor

_LOG_PROBS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A batch of trees with the same number of nodes; node 0 is the root, parents come before their children.

    tokens: [bs, num_nodes] int64. parents: [bs, num_nodes] int64, the root's is itself. depths: [bs, num_nodes] int64,
    the root's is 0. mask: [bs, num_nodes, num_nodes] bool, node sees its ancestors and itself.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor, max_depth: int) -> DraftTree:
        """The tree of given parents. tokens, parents: [bs, num_nodes] int64; max_depth: no node lies deeper. Raises
        `InvalidStepError` for shapes and types that do not match.
        """
        check_tensor("parents", parents, ("bs", "num_nodes"), (torch.int64,))
        check_tensor("tokens", tokens, tuple(parents.shape), INTEGERS)
        bs, num_nodes = parents.shape
        own = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).expand(bs, -1, -1)
        index = parents.unsqueeze(2).expand(-1, -1, num_nodes)
        mask = own
        for _ in range(max_depth):
            mask = own | mask.gather(1, index)
        return cls(tokens, parents, mask.sum(2) - 1, mask)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBeams:
    """The state of drafting after some levels.

    tokens: [bs, topk] int64, the branches of the newest level. scores: [bs, topk] cumulative log-probabilities.
    parent_branches: [bs, topk] int64, the branch of the level before from which each grew: the row whose hidden state
    it continues. ancestors: [bs, topk, depth] int64, the branch of each path at every level so far, itself last.
    The candidate fields list every node proposed so far, [bs, num_candidates]: token, score and parent's candidate
    index (-1: the root); beam_candidates: [bs, topk], those of the branches.
    """

    tokens: Tensor
    scores: Tensor
    parent_branches: Tensor
    ancestors: Tensor
    beam_candidates: Tensor
    candidate_tokens: Tensor
    candidate_scores: Tensor
    candidate_parents: Tensor

    @classmethod
    def start(cls, tokens: Tensor, log_probs: Tensor) -> DraftBeams:
        """The first level. tokens [bs, topk] int64 and log_probs [bs, topk]: the draft's best after the root. Raises
        `InvalidStepError` for shapes and types that do not match.
        """
        check_tensor("tokens", tokens, ("bs", "topk"), (torch.int64,))
        check_tensor("log_probs", log_probs, tuple(tokens.shape), _LOG_PROBS)
        branches = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(
            tokens=tokens,
            scores=log_probs,
            parent_branches=torch.zeros_like(tokens),
            ancestors=branches.unsqueeze(2),
            beam_candidates=branches,
            candidate_tokens=tokens,
            candidate_scores=log_probs,
            candidate_parents=torch.full_like(tokens, -1),
        )

    def advance(self, tokens: Tensor, log_probs: Tensor) -> DraftBeams:
        """The next level: of all children [bs, topk, topk] (of each branch, its best), the best topk stay branches.

        Raises `InvalidStepError` for shapes and types that do not match.
        """
        bs, topk = self.tokens.shape
        check_tensor("tokens", tokens, (bs, topk, topk), INTEGERS)
        check_tensor("log_probs", log_probs, (bs, topk, topk), _LOG_PROBS)
        child_scores = (self.scores.unsqueeze(2) + log_probs).reshape(bs, -1)
        child_tokens = tokens.reshape(bs, -1)
        child_parents = self.beam_candidates.unsqueeze(2).expand(-1, -1, topk).reshape(bs, -1)
        scores, chosen = child_scores.topk(topk, dim=1)
        parent_branches = torch.div(chosen, topk, rounding_mode="floor")
        index = parent_branches.unsqueeze(2).expand(-1, -1, self.ancestors.shape[2])
        own = torch.arange(topk, device=tokens.device).expand(bs, -1).unsqueeze(2)
        return DraftBeams(
            tokens=child_tokens.gather(1, chosen),
            scores=scores,
            parent_branches=parent_branches,
            ancestors=torch.cat((self.ancestors.gather(1, index), own), dim=2),
            beam_candidates=self.candidate_tokens.shape[1] + chosen,
            candidate_tokens=torch.cat((self.candidate_tokens, child_tokens), dim=1),
            candidate_scores=torch.cat((self.candidate_scores, child_scores), dim=1),
            candidate_parents=torch.cat((self.candidate_parents, child_parents), dim=1),
        )

    def tree(self, root_tokens: Tensor, num_draft_tokens: int) -> DraftTree:
        """The root and the best num_draft_tokens - 1 candidates. root_tokens: [bs] int64.

        A candidate never scores higher than its parent and ties go to the earlier one, so the choice is a tree. NaN, of
        a draft that overflowed, counts as impossible: it would be sorted before its parent.
        """
        num_candidates = self.candidate_tokens.shape[1]
        check_tensor("root_tokens", root_tokens, (self.tokens.shape[0],), INTEGERS)
        if not 2 <= num_draft_tokens <= num_candidates + 1:
            raise InvalidStepError(
                f"the tree holds a root and {num_candidates} candidates, so num_draft_tokens must be in "
                f"[2, {num_candidates + 1}], got {num_draft_tokens}"
            )
        scores = self.candidate_scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        order = scores.sort(dim=1, descending=True, stable=True).indices
        nodes = order[:, : num_draft_tokens - 1].sort(dim=1).values
        parents = self.candidate_parents.gather(1, nodes)
        positions = torch.searchsorted(nodes, parents.contiguous()) + 1
        root = torch.zeros_like(root_tokens).unsqueeze(1)
        return DraftTree.from_parents(
            tokens=torch.cat((root_tokens.unsqueeze(1), self.candidate_tokens.gather(1, nodes)), dim=1),
            parents=torch.cat((root, torch.where(parents < 0, 0, positions)), dim=1),
            max_depth=self.ancestors.shape[2],
        )
