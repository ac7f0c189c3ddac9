"""Draft trees against a brute-force EAGLE-2 on Python lists."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from attn_backends.conformance.worker_laws import VOCAB, Draft, check_tree, grow
from spec_metadata import Capacity, DraftBeams, DraftTree, InvalidStepError

SHAPES = [(1, 1, 2), (1, 3, 4), (2, 1, 3), (2, 2, 4), (3, 3, 9), (4, 3, 16), (4, 4, 30), (3, 4, 31)]
BS = 3


@pytest.mark.parametrize("levels", [None, 1, 2, 3], ids=["no ties", "all tied", "two values", "three values"])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), SHAPES)
def test_tree_of_brute_force_eagle_2(topk: int, num_steps: int, num_nodes: int, levels: int | None) -> None:
    drafts = [Draft(topk, levels, seed) for seed in range(BS)]
    growth, roots = grow(drafts, num_steps), torch.arange(BS) + VOCAB
    check_tree(growth.beams.tree(roots, num_nodes), roots, drafts, growth)


@pytest.mark.parametrize("topk", [1, 3])
def test_start_continues_the_root(topk: int) -> None:
    beams = DraftBeams.start(torch.arange(2 * topk).view(2, topk), torch.zeros(2, topk))
    assert beams.parent_branches.tolist() == [[0] * topk] * 2
    assert beams.ancestors.tolist() == [[[k] for k in range(topk)]] * 2
    assert beams.candidate_parents.tolist() == [[-1] * topk] * 2


NODES, PAIR = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
MISSHAPED: dict[str, Callable[[], object]] = {
    r"parents must be \[bs, num_nodes\] int64, got \[3\]": lambda: DraftTree.from_parents(NODES, NODES[0], 2),
    r"parents must be .* got \[2, 3\] torch.int32": lambda: DraftTree.from_parents(NODES, NODES.int(), 2),
    r"tokens must be \[2, 3\] int32 or int64, got \[2, 2\]": lambda: DraftTree.from_parents(PAIR, NODES, 2),
    r"tokens must be \[2, 3\] .* got \[1, 3\]": lambda: DraftTree.from_parents(NODES[:1], NODES, 2),
    r"tokens must be \[bs, topk\] int64, got \[2\]": lambda: DraftBeams.start(PAIR[0], torch.zeros(2)),
    r"log_probs must be \[2, 2\] float32 .* got \[2, 3\]": lambda: DraftBeams.start(PAIR, torch.zeros(2, 3)),
    r"log_probs must be \[2, 2\] .* got \[2, 1\]": lambda: DraftBeams.start(PAIR, torch.zeros(2, 1)),
    r"log_probs must be .* got \[2, 2\] torch.int64": lambda: DraftBeams.start(PAIR, PAIR),
    r"tokens must be \[2, 2, 2\] .* got \[2, 4\]": lambda: DraftBeams.start(PAIR, torch.zeros(2, 2)).advance(
        torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 2, 2)
    ),
    r"log_probs must be \[2, 2, 2\] .* got \[2, 2\]": lambda: DraftBeams.start(PAIR, torch.zeros(2, 2)).advance(
        torch.zeros(2, 2, 2, dtype=torch.int64), torch.zeros(2, 2)
    ),
    r"root_tokens must be \[2\] .* got \[1\]": lambda: DraftBeams.start(PAIR, torch.zeros(2, 2)).tree(PAIR[0, :1], 2),
}


@pytest.mark.parametrize("message", MISSHAPED)
def test_shapes_that_do_not_match_are_refused(message: str) -> None:
    """Torch would broadcast some, and gather from others what nobody meant."""
    with pytest.raises(InvalidStepError, match=message):
        MISSHAPED[message]()


@pytest.mark.parametrize("seed", range(5))
def test_tree_of_given_parents(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    num_nodes = 9
    parents = torch.stack([torch.rand(BS, generator=rng) * max(n, 1) for n in range(num_nodes)], dim=1).long()
    tree = DraftTree.from_parents(torch.zeros_like(parents), parents, max_depth=num_nodes - 1)
    for i in range(BS):
        for node in range(num_nodes):
            path = [node]
            while path[-1] != 0:
                path.append(int(parents[i, path[-1]]))
            assert tree.mask[i, node].nonzero().flatten().tolist() == sorted(path)
            assert int(tree.depths[i, node]) == len(path) - 1


@pytest.mark.parametrize("num_draft_tokens", [-1, 0, 1, 14])
def test_tree_holds_so_many_nodes(num_draft_tokens: int) -> None:
    beams = grow([Draft(3, None, 0)], 2).beams
    with pytest.raises(InvalidStepError, match=rf"12 candidates.*\[2, 13\], got {num_draft_tokens}"):
        beams.tree(torch.zeros(1, dtype=torch.int64), num_draft_tokens)
    assert beams.tree(torch.zeros(1, dtype=torch.int64), 13).tokens.shape == (1, 13)


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 4), (2, 3), (4, 3), (8, 1)])
def test_capacity_counts_the_nodes_that_a_draft_proposes(topk: int, num_steps: int) -> None:
    beams = grow([Draft(topk, None, 0)], num_steps).beams
    capacity = Capacity(1, 8, 1, topk, num_steps, num_draft_tokens=2)
    assert capacity.max_tree_nodes == beams.candidate_tokens.shape[1] + 1


def test_children_without_a_number_are_never_drafted_before_their_parent() -> None:
    """A draft that overflows drafts worse; it must not leave the tree, or tokens are accepted on no path."""
    beams = DraftBeams.start(torch.tensor([[1, 2]]), torch.tensor([[-0.1, -0.2]]))
    children = torch.tensor([[[-0.1, -0.2], [math.nan, math.nan]]])
    beams = beams.advance(torch.tensor([[[3, 4], [5, 6]]]), children)
    tree = beams.tree(torch.tensor([0]), 3)
    assert tree.tokens.tolist() == [[0, 1, 2]]
    assert tree.parents.tolist() == [[0, 0, 0]]
    whole = beams.tree(torch.tensor([0]), 7)
    assert whole.parents.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert whole.depths.tolist() == [[0, 1, 1, 2, 2, 2, 2]]
