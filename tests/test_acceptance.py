"""Acceptance against a walk over Python lists, and where the accepted KV goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from spec_metadata import (
    Acceptance,
    BlockTable,
    CacheGeometry,
    DraftTree,
    InvalidStepError,
    RequestTable,
    Step,
    accept,
    compaction_moves,
)

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


@pytest.mark.parametrize("max_accepted", [0, 4, None, 1.5])
def test_a_path_is_as_long_as_its_tree_at_most(max_accepted: Any) -> None:
    """A longer one would index nodes that aren't there, on a GPU by an assertion of the device."""
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 1]]), 2)
    with pytest.raises(InvalidStepError, match=rf"max_accepted must be in \[1, 3\].* got {max_accepted}"):
        accept(tree, torch.zeros((1, 3), dtype=torch.int64), max_accepted)


GEOMETRY = CacheGeometry(600, 4)


def pagings(rng: random.Random) -> list[RequestTable | BlockTable]:
    """Tables of `BS` requests with pages of their own, 10 each; no request in the order of the rows."""
    pages = torch.tensor(rng.sample(range(1, 600), 10 * (BS + 1))).view(BS + 1, 10)
    rows = torch.tensor(rng.sample(range(BS + 1), BS))
    slots = (pages.unsqueeze(2) * 4 + torch.arange(4)).flatten(1)
    return [RequestTable(slots.int(), rows, GEOMETRY), BlockTable(pages[rows].int(), GEOMETRY)]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["slots of the table", "slots anywhere"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_compaction_brings_accepted_kv_to_the_table_s_slots(seed: int, dtype: torch.dtype, elsewhere: bool) -> None:
    """Wherever drafts lie, what a later step reads behind the committed tokens is the accepted path."""
    rng = random.Random(seed)
    tree = random_tree(rng, 9, 4)
    got = accept(tree, torch.tensor(target_of(tree, rng)), 5)
    lens = torch.tensor([rng.randrange(30) for _ in range(BS)], dtype=dtype)
    for paging in pagings(rng):
        own = paging.slots(lens.long().unsqueeze(1) + torch.arange(9))
        owned = set(paging.slots(torch.arange(40).expand(BS, -1)).flatten().tolist())
        free = sorted(set(range(GEOMETRY.num_slots)) - owned)
        drafted = torch.tensor(rng.sample(free, BS * 9)) if elsewhere else own.flatten()
        slots = torch.stack((drafted, drafted), 1)[:, 0].to(dtype)
        step = Step.target_verify(9, lens, paging, slots, tree_mask=tree.mask)
        memory = torch.full((GEOMETRY.num_slots,), -1)
        memory[drafted] = torch.arange(BS * 9)
        before = memory.clone()
        sources, destinations = compaction_moves(got, step)
        memory[destinations] = memory[sources]
        touched = set()
        for i in range(BS):
            n = int(got.num_accepted[i])
            assert memory[own[i, :n]].tolist() == [i * 9 + node for node in got.path[i, :n].tolist()]
            touched |= set(own[i, :n].tolist())
        others = [slot for slot in range(GEOMETRY.num_slots) if slot not in touched]
        assert torch.equal(memory[others], before[others]), "nothing else is moved to"


def test_compaction_of_a_permuted_row_keeps_the_path() -> None:
    """A drafted slot that is no longer needed may be where an accepted token belongs."""
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 0, 2]]), 2)
    got = accept(tree, torch.tensor([[7, 0, 8, 9]]), 3)
    table = torch.tensor([[0, 0, 0, 0], [10, 11, 12, 13]], dtype=torch.int32)
    paging = RequestTable(table, torch.tensor([1]), CacheGeometry(20, 1))
    step = Step.target_verify(4, torch.tensor([0]), paging, torch.tensor([13, 10, 11, 12]), tree_mask=tree.mask)
    memory = torch.zeros(20, dtype=torch.int64)
    memory[step.flat_slots()] = torch.tensor([5, 6, 7, 8])
    sources, destinations = compaction_moves(got, step)
    memory[destinations] = memory[sources]
    assert memory[10:13].tolist() == [5, 7, 8]


def test_moves_are_of_the_verify() -> None:
    paging = RequestTable(torch.zeros(2, 9, dtype=torch.int32), torch.tensor([1]), GEOMETRY)
    got = Acceptance(torch.ones(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))
    for step in (Step.decode(torch.tensor([1]), paging), Step.target_verify(4, torch.tensor([1]), paging)):
        with pytest.raises(InvalidStepError, match=f"2 requests were verified; the step is a {step.kind} of 1"):
            compaction_moves(got, step)
    narrow = Step.target_verify(2, torch.tensor([1, 1]), paging.on_static(torch.tensor([1, 1])))
    with pytest.raises(InvalidStepError, match="paths of up to 3 nodes; the verify has 2"):
        compaction_moves(got, narrow)


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
