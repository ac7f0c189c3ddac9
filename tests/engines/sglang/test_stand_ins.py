"""The stand-ins for SGLang's CPU operators against SGLang's own: all integers.

Its Triton kernels run in Triton's interpreter. On a GPU they are compiled, and its CUDA operators run beside them
(`python -m tests.engines.sglang.gpu stand_ins`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, multi_layer_eagle, spec_tree, tree
from sglang.srt.mem_cache import allocation
from torch import Tensor

NUM_STEPS, POOL_LEN = 3, 40
SEEDS = range(6)
HAS_GPU = torch.cuda.is_available()


def stand_in(name: str) -> ModuleType:
    """A module of the stand-in, also where `sgl_kernel` is SGLang's."""
    spec = spec_from_file_location(name, Path(__file__).with_name("stand_ins") / "sgl_kernel" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slots, trees = stand_in("slots"), stand_in("trees")


def on_device(kernel: Callable[..., object]) -> Callable[..., None]:
    """A kernel of SGLang's for tensors of the CPU: it runs on the GPU if there is one, and its results are copied."""

    def run(*arguments: Any, **named: Any) -> None:
        there = [each.cuda() if HAS_GPU and isinstance(each, Tensor) else each for each in arguments]
        kernel(*there, **named)
        for given, used in zip(arguments, there, strict=True):
            if isinstance(given, Tensor):
                given.copy_(used)

    return run


KERNELS = {
    "triton": (on_device(spec_tree.sgl_build_tree_kernel_triton), on_device(spec_tree.verify_tree_greedy_triton))
}
if HAS_GPU:
    KERNELS["cuda"] = (on_device(tree.build_tree_kernel_efficient), on_device(tree.verify_tree_greedy))


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
    on_device(cache_locs.assign_extend_cache_locs[(3,)])(rows, table, start, end, theirs, POOL_LEN, 4)
    slots.assign_extend_cache_locs_cpu(rows, table, start, end, ours, POOL_LEN)
    assert torch.equal(ours, theirs)
    theirs, ours = (torch.full((3 * topk * NUM_STEPS,), -7) for _ in range(2))
    on_device(cache_locs.assign_draft_cache_locs_contiguous[(3,)])(
        rows, table, start, theirs, POOL_LEN, topk, NUM_STEPS
    )
    slots.assign_draft_cache_locs_contiguous_cpu(rows, table, start, ours, POOL_LEN, topk, NUM_STEPS)
    assert torch.equal(ours, theirs)
    theirs, ours, given = table.clone(), table.clone(), torch.randint(1, 999, (max(num, 1),))
    on_device(allocation.assign_req_to_token_pool[(3,)])(rows, theirs, start, end, given, POOL_LEN, 4)
    slots.assign_req_to_token_pool_cpu(rows, ours, start, end, given, POOL_LEN)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_accepted_rows(seed):
    torch.manual_seed(seed)
    lens, width = torch.randint(1, 5, (3,)), 4
    index = torch.where(torch.arange(width) < lens.unsqueeze(1), torch.randperm(12).view(3, 4), -1)
    given, tokens = torch.randint(1, 999, (12,)), torch.randint(0, 99, (12,))
    theirs, ours = (torch.full((12,), -7) for _ in range(2))
    on_device(eagle.fill_accept_out_cache_loc[(12,)])(index, given, theirs, 16)
    slots.fill_accept_out_cache_loc_cpu(index, given, ours)
    assert torch.equal(ours, theirs)
    theirs, ours = (torch.full((3,), -7) for _ in range(2))
    on_device(eagle.fill_bonus_tokens[(3,)])(tokens, lens, theirs, width)
    slots.fill_bonus_tokens_cpu(tokens, lens, ours, width)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("selects", [False, True])
def test_tokens_rotated_by_one(selects):
    ids, lens, starts, new = torch.arange(100, 112), ints(5, 0, 7), ints(0, 5, 5), ints(1, 2, 3)
    select = ints(2, 0, 9) if selects else None
    theirs, ours = ids.clone(), ids.clone()
    on_device(multi_layer_eagle.rotate_input_ids_kernel[(3,)])(theirs, starts, lens, new, select, BLOCK_SIZE=4096)
    slots.rotate_input_ids_cpu(ours, starts, lens, new, select)
    assert torch.equal(ours, theirs)


def test_entries_moved_in_every_layer():
    layers = [torch.randn(9, 2, 3), torch.randn(9, 5)]
    expected, target, source = [layer.clone() for layer in layers], ints(1, 2, 3), ints(2, 3, 8)
    for layer in expected:
        layer[target] = layer[source].clone()
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    strides = torch.tensor([layer[0].nbytes for layer in layers])
    slots.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
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
@pytest.mark.parametrize("kernels", KERNELS)
def test_trees_are_linked_and_verified(kernels, seed, topk, num_nodes, mode):
    build, their_verify = KERNELS[kernels]
    theirs = linked(seed, topk, num_nodes, mode, build)
    ours = linked(seed, topk, num_nodes, mode, trees.build_tree_kernel_efficient_cpu)
    theirs[2][:, 0], ours[2][:, 0] = (
        ints(0, num_nodes) for _ in range(2)
    )  # the kernel leaves the root's to its caller
    for name, one, other in zip(("mask", "positions", "index", "child", "sibling"), ours, theirs, strict=True):
        assert torch.equal(one, other), name
    generator = torch.Generator().manual_seed(seed)
    tokens, target = (torch.randint(0, 3, (2, num_nodes), generator=generator) for _ in range(2))
    results = []
    for verify in (their_verify, trees.verify_tree_greedy_cpu):
        out = [torch.full(shape, -1, dtype=torch.int32) for shape in ((2 * num_nodes,), (2, NUM_STEPS + 1), (2,))]
        verify(*out, tokens, *ours[2:], target)
        results.append(out)
    assert all(map(torch.equal, *results))


def test_any_other_name_imports_and_raises_when_it_is_called():
    from sgl_kernel import rmsnorm

    with pytest.raises(NotImplementedError, match="rmsnorm has no stand-in on the CPU"):
        rmsnorm()
