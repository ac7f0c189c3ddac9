"""Acceptance against a walk over Python lists, and where the accepted KV goes."""

from __future__ import annotations

import random

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from spec_metadata import Acceptance, DraftTree, InvalidStepError, accept, compaction_moves

BS = 16


def random_tree(rng: random.Random, num_nodes: int, max_depth: int) -> DraftTree:
    """A batch of trees in which siblings hold different tokens of a tiny vocabulary."""
    parents, tokens = [], []
    for _ in range(BS):
        parent, token, depth = [0], [rng.randrange(4)], [0]
        while len(parent) < num_nodes:
            p = rng.choice([n for n, d in enumerate(depth) if d < max_depth])
            taken = {token[n] for n in range(1, len(parent)) if parent[n] == p}
            parent.append(p)
            depth.append(depth[p] + 1)
            token.append(rng.choice([t for t in range(num_nodes + 4) if t not in taken][:3]))
        parents.append(parent)
        tokens.append(token)
    return DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents), max_depth)


def target_of(tree: DraftTree, rng: random.Random) -> list[list[int]]:
    """The target's choice at each node: often one of the children's tokens, else a token of nobody."""
    chosen = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        row = []
        for node in range(len(tokens)):
            children = [tokens[n] for n in range(1, len(tokens)) if parents[n] == node]
            row.append(rng.choice(children) if children and rng.random() < 0.8 else 99)
        chosen.append(row)
    return chosen


def walk(tokens: list[int], parents: list[int], target: list[int]) -> list[int]:
    """The accepted nodes, root first."""
    path = [0]
    while True:
        children = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == target[path[-1]]]
        if not children:
            return path
        path.append(children[0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(2, 1), (4, 3), (9, 3), (16, 4), (16, 15)])
def test_accepts_what_a_walk_accepts(num_nodes: int, max_depth: int, seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, num_nodes, max_depth)
    target = target_of(tree, rng)
    max_accepted = max_depth + 1
    got = accept(tree, torch.tensor(target), max_accepted)
    assert got.num_accepted.dtype is torch.int32
    lengths = set()
    for i in range(BS):
        tokens, parents = tree.tokens[i].tolist(), tree.parents[i].tolist()
        path = walk(tokens, parents, target[i])
        bonus = target[i][path[-1]]
        n = len(path)
        lengths.add(n)
        assert int(got.num_accepted[i]) == n
        assert got.path[i].tolist() == path + list(range(n, max_accepted))
        assert got.tokens[i].tolist() == [tokens[node] for node in path[1:]] + [bonus] * (max_accepted - n + 1)
        assert int(got.bonus[i]) == bonus
    assert len(lengths) > 1  # the batch mixes accept lengths


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_chain(accepted: int) -> None:
    parents = torch.tensor([[0, 0, 1, 2]])
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7, 8]]), parents, 3)
    target = [6, 7, 8, 9]
    target[accepted - 1] = 42
    got = accept(tree, torch.tensor([target]), 4)
    assert int(got.num_accepted) == accepted
    assert int(got.bonus) == 42
    assert got.tokens[0].tolist() == [*target[: accepted - 1], *[42] * (5 - accepted)]


def test_a_right_token_below_a_rejected_node_is_rejected() -> None:
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7, 7]]), torch.tensor([[0, 0, 1, 2]]), 3)
    got = accept(tree, torch.tensor([[1, 7, 7, 7]]), 4)
    assert int(got.num_accepted) == 1
    assert got.tokens[0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("shape", [(1, 5), (2, 3), (3,)], ids=str)
def test_choices_of_other_nodes_are_refused(shape: tuple[int, ...]) -> None:
    """More than there are nodes or requests would be read as if the rest were meant."""
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 1]]), 2)
    with pytest.raises(InvalidStepError, match=r"target_tokens must be \[1, 3\]"):
        accept(tree, torch.zeros(shape, dtype=torch.int64), 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_compaction_brings_accepted_kv_behind_the_committed(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 9, 4)
    got = accept(tree, torch.tensor(target_of(tree, rng)), 5)
    slots = torch.randperm(500)[: BS * 9].to(dtype)
    sources, destinations = compaction_moves(got, torch.stack((slots, slots), 1)[:, 0])
    memory = {int(slot): (i // 9, i % 9) for i, slot in enumerate(slots)}
    written = [memory[int(source)] for source in sources]
    moved = dict(zip(destinations.tolist(), written, strict=True))
    assert len(moved) == len(destinations)
    for i in range(BS):
        mine, n = slots.tolist()[i * 9 : i * 9 + 9], int(got.num_accepted[i])
        assert [moved[slot] for slot in mine[:n]] == [(i, node) for node in got.path[i, :n].tolist()]
        assert all(moved.get(slot, memory[slot]) == memory[slot] for slot in mine[n:])


def test_acceptance_is_capturable() -> None:
    rng = random.Random(0)
    trees = [random_tree(rng, 9, 4) for _ in range(2)]
    targets = [torch.tensor(target_of(tree, rng)) for tree in trees]
    fields = ("tokens", "parents", "depths", "mask")
    static = DraftTree(*(getattr(trees[0], name).clone() for name in fields))
    chosen = targets[0].clone()

    def region() -> Acceptance:
        return accept(static, chosen, 5)

    graph = RecordedGraph()
    got = graph.capture(region)
    for name in fields:
        getattr(static, name).copy_(getattr(trees[1], name))
    chosen.copy_(targets[1])
    graph.replay()
    expected = accept(trees[1], targets[1], 5)
    for name in ("num_accepted", "path", "tokens"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
