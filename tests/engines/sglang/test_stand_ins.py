"""The stand-ins for SGLang's CPU operators against SGLang's Triton kernels, on Triton's interpreter: all integers."""

from __future__ import annotations

import random

import pytest
import sgl_kernel
import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, multi_layer_eagle, spec_tree
from sglang.srt.mem_cache import allocation
from torch import Tensor

NUM_STEPS, POOL_LEN = 3, 40
SEEDS = range(6)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_of_positions_in_the_table(seed):
    torch.manual_seed(seed)
    table = torch.randint(1, 999, (6, POOL_LEN), dtype=torch.int32)
    rows, start, topk = ints(4, 1, 3), torch.randint(0, 20, (3,)), 1 + seed % 4
    end = start + torch.randint(0, 9, (3,))
    num = int((end - start).sum())
    theirs, ours = (torch.full((max(num, 36),), -7) for _ in range(2))
    cache_locs.assign_extend_cache_locs[(3,)](rows, table, start, end, theirs, POOL_LEN, 4)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, ours, POOL_LEN)
    assert torch.equal(ours, theirs)
    theirs, ours = (torch.full((3 * topk * NUM_STEPS,), -7) for _ in range(2))
    cache_locs.assign_draft_cache_locs_contiguous[(3,)](rows, table, start, theirs, POOL_LEN, topk, NUM_STEPS)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, start, ours, POOL_LEN, topk, NUM_STEPS)
    assert torch.equal(ours, theirs)
    theirs, ours, slots = table.clone(), table.clone(), torch.randint(1, 999, (max(num, 1),))
    allocation.assign_req_to_token_pool[(3,)](rows, theirs, start, end, slots, POOL_LEN, 4)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, ours, start, end, slots, POOL_LEN)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_accepted_rows(seed):
    torch.manual_seed(seed)
    lens, width = torch.randint(1, 5, (3,)), 4
    index = torch.where(torch.arange(width) < lens.unsqueeze(1), torch.randperm(12).view(3, 4), -1)
    slots, tokens = torch.randint(1, 999, (12,)), torch.randint(0, 99, (12,))
    theirs, ours = (torch.full((12,), -7) for _ in range(2))
    eagle.fill_accept_out_cache_loc[(12,)](index, slots, theirs, 16)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, slots, ours)
    assert torch.equal(ours, theirs)
    theirs, ours = (torch.full((3,), -7) for _ in range(2))
    eagle.fill_bonus_tokens[(3,)](tokens, lens, theirs, width)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, lens, ours, width)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("selects", [False, True])
def test_tokens_rotated_by_one(selects):
    ids, lens, starts, new = torch.arange(100, 112), ints(5, 0, 7), ints(0, 5, 5), ints(1, 2, 3)
    select = ints(2, 0, 9) if selects else None
    theirs, ours = ids.clone(), ids.clone()
    multi_layer_eagle.rotate_input_ids_kernel[(3,)](theirs, starts, lens, new, select, BLOCK_SIZE=4096)
    sgl_kernel.rotate_input_ids_cpu(ours, starts, lens, new, select)
    assert torch.equal(ours, theirs)


def test_entries_moved_in_every_layer():
    layers = [torch.randn(9, 2, 3), torch.randn(9, 5)]
    expected, target, source = [layer.clone() for layer in layers], ints(1, 2, 3), ints(2, 3, 8)
    for layer in expected:
        layer[target] = layer[source].clone()
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    strides = torch.tensor([layer[0].nbytes for layer in layers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(map(torch.equal, layers, expected))


def candidates(rng: random.Random, topk: int, num_nodes: int) -> tuple[list[int], list[int]]:
    """What SGLang drafts: for each level, the candidates that were kept; and the chosen, parents before children."""
    parents, chosen, offset = [-1, *range(topk)], set[int](), topk
    for _ in range(NUM_STEPS - 2):
        parents += sorted(offset + index for index in rng.sample(range(topk**2), topk))
        offset += topk**2
    able = list(range(topk))
    while len(chosen) < num_nodes - 1:
        candidate = rng.choice([each for each in able if each not in chosen])
        chosen.add(candidate)
        levels = [level for level in range(1, len(parents)) if parents[level] == candidate]
        able += [level * topk + child for level in levels for child in range(topk)]
    return parents, sorted(chosen)


def linked(seed: int, topk: int, num_nodes: int, mode: int, build) -> list[Tensor]:
    """The mask, positions and links of two trees."""
    rng = random.Random(seed)
    trees = [candidates(rng, topk, num_nodes) for _ in range(2)]
    lens, shape = ints(3, 7), (2, num_nodes)
    mask = torch.ones(num_nodes * int(lens.sum() + 2 * num_nodes) if mode == 0 else 2 * num_nodes**2).bool()
    out = [mask, torch.zeros(2 * num_nodes, dtype=torch.int64), *(torch.full(shape, -1) for _ in range(3))]
    parents, chosen = (torch.tensor([tree[i] for tree in trees]) for i in range(2))
    build(parents, chosen, lens, *out, topk, NUM_STEPS, num_nodes, mode)
    return out


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("topk", "num_nodes"), [(1, 4), (3, 7), (4, 16)])
@pytest.mark.parametrize("seed", SEEDS)
def test_trees_are_linked_and_verified(seed, topk, num_nodes, mode):
    theirs = linked(seed, topk, num_nodes, mode, spec_tree.sgl_build_tree_kernel_triton)
    ours = linked(seed, topk, num_nodes, mode, sgl_kernel.build_tree_kernel_efficient_cpu)
    theirs[2][:, 0], ours[2][:, 0] = (
        ints(0, num_nodes) for _ in range(2)
    )  # the kernel leaves the root's to its caller
    for name, one, other in zip(("mask", "positions", "index", "child", "sibling"), ours, theirs, strict=True):
        assert torch.equal(one, other), name
    generator = torch.Generator().manual_seed(seed)
    tokens, target = (torch.randint(0, 3, (2, num_nodes), generator=generator) for _ in range(2))
    results = []
    for verify in (spec_tree.verify_tree_greedy_triton, sgl_kernel.verify_tree_greedy_cpu):
        out = [torch.full((2 * num_nodes,), -1), torch.full((2, NUM_STEPS + 1), -1), torch.zeros(2, dtype=torch.int64)]
        verify(*out, tokens, *ours[2:], target)
        results.append(out)
    assert all(map(torch.equal, *results))


def test_any_other_name_imports_and_raises_when_it_is_called():
    from sgl_kernel import rmsnorm

    with pytest.raises(NotImplementedError, match="rmsnorm has no stand-in on the CPU"):
        rmsnorm()
