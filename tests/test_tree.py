"""Draft trees against a brute-force EAGLE-2 on Python lists."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import RecordedGraph
from spec_metadata import Capacity, DraftBeams, DraftTree, InvalidStepError

Node = tuple[int, ...]  # the tokens from the root's child down to it
SHAPES = [(1, 1, 2), (1, 3, 4), (2, 1, 3), (2, 2, 4), (3, 3, 9), (4, 3, 16), (4, 4, 30), (3, 4, 31)]
BS, VOCAB = 3, 50


class Draft:
    """A draft that scores every path: children(node) -> its best topk tokens with log-probabilities, best first.

    levels: how many values a log-probability can take; None for a continuum. Few levels make exact ties.
    """

    def __init__(self, topk: int, levels: int | None, seed: int) -> None:
        self.topk, self.levels = topk, levels
        self.rng = torch.Generator().manual_seed(seed)
        self.known: dict[Node, list[tuple[int, float]]] = {}

    def children(self, node: Node) -> list[tuple[int, float]]:
        if node not in self.known:
            tokens = torch.randperm(VOCAB, generator=self.rng)[: self.topk].tolist()
            if self.levels is None:
                scores = -torch.rand(self.topk, generator=self.rng)
            else:
                scores = -0.25 * torch.randint(self.levels, (self.topk,), generator=self.rng)
            self.known[node] = list(zip(tokens, scores.sort(descending=True).values.tolist(), strict=True))
        return self.known[node]


def grow(drafts: list[Draft], num_steps: int) -> tuple[DraftBeams, list[list[list[Node]]]]:
    """Beams after num_steps levels, with the paths of the branches at every level, per request."""
    paths = [[[(token,) for token, _ in draft.children(())]] for draft in drafts]
    first = torch.tensor([draft.children(()) for draft in drafts], dtype=torch.float64)
    beams = DraftBeams.start(first[..., 0].long(), first[..., 1].float())
    for _ in range(num_steps - 1):
        asked = [[draft.children(node) for node in path[-1]] for draft, path in zip(drafts, paths, strict=True)]
        children = torch.tensor(asked, dtype=torch.float64)
        beams = beams.advance(children[..., 0].long(), children[..., 1].float())
        for path, parents, tokens in zip(paths, beams.parent_branches.tolist(), beams.tokens.tolist(), strict=True):
            path.append([(*path[-1][parent], token) for parent, token in zip(parents, tokens, strict=True)])
    return beams, paths


def score(draft: Draft, node: Node) -> Tensor:
    """Cumulative log-probability, added up in float32 as on the device."""
    total = torch.tensor(0.0)
    for i, token in enumerate(node):
        total = total + torch.tensor(dict(draft.children(node[:i]))[token])
    return total


def candidates(draft: Draft, levels: list[list[Node]]) -> list[Node]:
    """Every node proposed, in order: depth 1, then all children of every level's branches but the last's."""
    nodes = [(token,) for token, _ in draft.children(())]
    for branches in levels[:-1]:
        nodes += [(*node, token) for node in branches for token, _ in draft.children(node)]
    return nodes


@pytest.mark.parametrize("levels", [None, 1, 2, 3], ids=["no ties", "all tied", "two values", "three values"])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), SHAPES)
def test_tree_of_brute_force_eagle_2(topk: int, num_steps: int, num_nodes: int, levels: int | None) -> None:
    drafts = [Draft(topk, levels, seed) for seed in range(BS)]
    beams, paths = grow(drafts, num_steps)
    roots = torch.arange(BS) + VOCAB
    tree = beams.tree(roots, num_nodes)
    for i, (draft, levels_of) in enumerate(zip(drafts, paths, strict=True)):
        nodes = candidates(draft, levels_of)
        best = sorted(range(len(nodes)), key=lambda n, d=draft, ns=nodes: (-float(score(d, ns[n])), n))
        chosen = [(), *(nodes[n] for n in sorted(best[: num_nodes - 1]))]
        assert tree.tokens[i].tolist() == [int(roots[i]), *(node[-1] for node in chosen[1:])]
        assert tree.parents[i].tolist() == [0, *(chosen.index(node[:-1]) for node in chosen[1:])]
        assert tree.depths[i].tolist() == [len(node) for node in chosen]
        expected = [[node[: len(seen)] == seen for seen in chosen] for node in chosen]
        assert tree.mask[i].tolist() == expected


@pytest.mark.parametrize("levels", [None, 1, 2], ids=["no ties", "all tied", "two values"])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (2, 4), (4, 3)])
def test_branches_are_the_best_children(topk: int, num_steps: int, levels: int | None) -> None:
    drafts = [Draft(topk, levels, seed) for seed in range(BS)]
    for depth in range(1, num_steps + 1):
        beams, paths = grow(drafts, depth)
        for i, (draft, levels_of) in enumerate(zip(drafts, paths, strict=True)):
            parents = levels_of[-2] if depth > 1 else [()]
            children = [(*node, token) for node in parents for token, _ in draft.children(node)]
            best = sorted((float(score(draft, node)) for node in children), reverse=True)[:topk]
            assert len(set(levels_of[-1])) == topk
            assert set(levels_of[-1]) <= set(children)
            assert [float(score(draft, node)) for node in levels_of[-1]] == best == beams.scores[i].tolist()
            branch_of = [[levels_of[d].index(node[: d + 1]) for d in range(depth)] for node in levels_of[-1]]
            assert beams.ancestors[i].tolist() == branch_of


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
    r"tokens must be \[2, 3\] int64 or int32, got \[2, 2\]": lambda: DraftTree.from_parents(PAIR, NODES, 2),
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
    beams, _ = grow([Draft(3, None, 0)], 2)
    with pytest.raises(InvalidStepError, match=rf"12 candidates.*\[2, 13\], got {num_draft_tokens}"):
        beams.tree(torch.zeros(1, dtype=torch.int64), num_draft_tokens)
    assert beams.tree(torch.zeros(1, dtype=torch.int64), 13).tokens.shape == (1, 13)


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 4), (2, 3), (4, 3), (8, 1)])
def test_capacity_counts_the_nodes_that_a_draft_proposes(topk: int, num_steps: int) -> None:
    beams, _ = grow([Draft(topk, None, 0)], num_steps)
    capacity = Capacity(1, 8, 1, topk, num_steps, num_draft_tokens=2)
    assert capacity.max_tree_nodes == beams.candidate_tokens.shape[1] + 1


def test_whole_draft_is_capturable() -> None:
    topk, num_steps = 3, 3
    tokens = [torch.randint(VOCAB, (BS, topk if i == 0 else topk**2)) for i in range(num_steps)]
    scores = [-torch.rand(t.shape) for t in tokens]

    def region() -> DraftTree:
        beams = DraftBeams.start(tokens[0], scores[0])
        for t, s in zip(tokens[1:], scores[1:], strict=True):
            beams = beams.advance(t.view(BS, topk, topk), s.view(BS, topk, topk))
        return beams.tree(tokens[0][:, 0], 8)

    graph = RecordedGraph()
    tree = graph.capture(region)
    for t, s in zip(tokens, scores, strict=True):
        t.copy_(torch.randint(VOCAB, t.shape))
        s.copy_(-torch.rand(s.shape))
    graph.replay()
    expected = region()
    for name in ("tokens", "parents", "depths", "mask"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name


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
