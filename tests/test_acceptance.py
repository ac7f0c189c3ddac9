"""Acceptance against a walk over Python lists, and where the accepted KV goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from attn_backends.conformance.worker_laws import check_acceptance, draw_choices, draw_tree
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(2, 1), (4, 3), (9, 3), (16, 4), (16, 15)])
def test_accepts_what_a_walk_accepts(num_nodes: int, max_depth: int, seed: int) -> None:
    rng = random.Random(seed)
    tree = draw_tree(rng, BS, num_nodes, max_depth, topk=3)
    chosen = draw_choices(rng, tree)
    got = accept(tree, chosen, max_depth + 1)
    check_acceptance(got, tree, chosen)
    assert len(set(got.num_accepted.tolist())) > 1  # the batch mixes accept lengths


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
    tree = draw_tree(rng, BS, 9, 4, topk=3)
    got = accept(tree, draw_choices(rng, tree), 5)
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
