"""SGLang's trees of first children and next siblings, as masks: in launches that do not grow with the nodes."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attn_backends.adapters.sglang import tree_mask
from spec_metadata import DraftTree
from tests.launches import CountsLaunches

MAX_DEPTH = 5


def random_parents(rng: random.Random, num_nodes: int, topk: int) -> list[int]:
    """A parent of each node but the first, before it; at most topk children of a node, at most MAX_DEPTH levels."""
    parents, depths = [0], [0]
    for node in range(1, num_nodes):
        able = [p for p in range(node) if depths[p] < MAX_DEPTH and parents[1:].count(p) < topk]
        parents.append(rng.choice(able))
        depths.append(depths[parents[-1]] + 1)
    return parents


def verify_input(parents: list[list[int]], topk: int) -> SimpleNamespace:
    """What SGLang makes of trees: the first child and the next sibling of each node, -1 if there is none."""
    bs, num_nodes = len(parents), len(parents[0])
    child, sibling = (torch.full((bs, num_nodes), -1) for _ in range(2))
    for row, of_tree in enumerate(parents):
        for parent in range(num_nodes):
            children = [node for node in range(1, num_nodes) if of_tree[node] == parent]
            if children:
                child[row, parent] = children[0]
            for one, following in pairwise(children):
                sibling[row, one] = following
    return SimpleNamespace(
        draft_token=torch.zeros(bs * num_nodes, dtype=torch.int64),
        draft_token_num=num_nodes,
        topk=topk,
        spec_steps=MAX_DEPTH,
        retrieve_next_token=child,
        retrieve_next_sibling=sibling,
    )


def by_definition(parents: list[list[int]]) -> Tensor:
    """A node sees itself and, one after the other, its parents."""
    num_nodes = len(parents[0])
    mask = torch.zeros(len(parents), num_nodes, num_nodes, dtype=torch.bool)
    for row, of_tree in enumerate(parents):
        for node in range(num_nodes):
            seen = node
            while not mask[row, node, seen]:
                mask[row, node, seen] = True
                seen = of_tree[seen]
    return mask


@pytest.mark.parametrize("topk", [1, 3, 4, 64])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 6, 16, 33, 64])
def test_masks_of_random_trees(num_nodes: int, topk: int) -> None:
    """Of topk 1 as many nodes as a chain may have levels."""
    rng, num_nodes = random.Random(num_nodes * 100 + topk), min(num_nodes, MAX_DEPTH + 1) if topk == 1 else num_nodes
    parents = [random_parents(rng, num_nodes, topk) for _ in range(20)]
    assert torch.equal(tree_mask(verify_input(parents, topk)), by_definition(parents))
    tokens = torch.zeros(20, num_nodes, dtype=torch.int64)
    assert DraftTree.from_parents(tokens, torch.tensor(parents), MAX_DEPTH).mask.equal(by_definition(parents))


def test_launches_do_not_grow_with_the_nodes() -> None:
    """One more for twice as many: the siblings before a node are jumped over in powers of two."""
    counts = []
    for num_nodes in (16, 32, 64):
        given = verify_input([random_parents(random.Random(1), num_nodes, 4)] * 2, 4)
        with CountsLaunches() as launches:
            tree_mask(given)
        counts.append(launches.num)
    assert counts[0] <= 32
    assert (counts[1] - counts[0], counts[2] - counts[0]) == (1, 2)
