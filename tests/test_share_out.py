"""FlashMLA's share-out, planned by us: a partition of every request's blocks, and the same by Triton as by torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attn_backends.kernels.schedule_operators import OVERHEAD, share_out
from tests import share_outs
from tests.share_outs import DRAWN, NUM_PARTS, Lens, check_partition, planned, random_lens, rows
from tests.triton_interpreter import interpreted


def loads(parts: Tensor, blocks: list[int]) -> list[int]:
    """Blocks that each part works on, and an overhead for each request of it. blocks: of each request."""
    found = []
    for first, last, first_block, end_block, *_ in parts.tolist():
        requests = range(first, last + 1) if first < len(blocks) else range(0)
        ends = [end_block if request == last else max(blocks[request], 1) for request in requests]
        begins = [first_block if request == first else 0 for request in requests]
        found.append(sum(max(end - begin, 1) + OVERHEAD for end, begin in zip(ends, begins, strict=True)))
    return found


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("seed", range(2))
def test_every_block_of_keys_belongs_to_one_part(draw, seed):
    """`python -m tests.share_outs` checks ten thousand sets of each kernel."""
    rng = random.Random(seed)
    for _ in range(60):
        check_partition(draw(rng), rng.choice(NUM_PARTS))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a block that no part reads", lambda parts, splits, read: parts[0, 3].sub_(1)),
        ("another number of pieces", lambda parts, splits, read: splits[1].add_(1)),
        ("other entries", lambda parts, splits, read: read[0].add_(1)),
    ],
)
def test_what_is_no_partition_is_a_row_that_fails(name, change, monkeypatch):
    def changed(*given):
        found = planned(*given)
        change(*found)
        return found

    monkeypatch.setattr(share_outs, "planned", changed)
    found = list(rows(7))
    assert [row["kernel"] for row in found] == [*DRAWN, "flashinfer"]
    assert found[1]["wrong"] > 0
    assert found[1]["status"] == "fail"
    assert found[1]["first_wrong"][0]["reason"]


@pytest.mark.parametrize("seed", range(2))
def test_no_part_does_more_than_an_even_share_and_two_overheads(seed):
    rng = random.Random(seed)
    for _ in range(100):
        given, num_parts = random_lens(rng), rng.choice(NUM_PARTS)
        parts, _, _ = planned(given, num_parts)
        total = sum(max(blocks, 1) + OVERHEAD for blocks in given.blocks)
        assert max(loads(parts, given.blocks)) <= max(-(-total // num_parts), 1) + 2 * OVERHEAD


def test_one_request_is_shared_out_to_all_parts():
    parts, splits, _ = planned(Lens([4096]), 132)
    assert splits.tolist() == [0, 64]
    assert parts[64:, 0].tolist() == [1] * 68, "unused"
    assert (parts[:64, 3] - parts[:64, 2]).tolist() == [1] * 64


def test_triton_writes_the_same():
    triton_share_out = interpreted("triton_share_out", "_share_out")
    rng = random.Random(7)
    for _ in range(12):
        given, num_parts = rng.choice([*DRAWN.values()])(rng), rng.choice(NUM_PARTS)
        expected = planned(given, num_parts)
        parts, splits, read = (torch.zeros_like(each) for each in expected)
        lens, marks = torch.tensor(given.lens, dtype=torch.int32), torch.zeros(len(given.lens), 2, dtype=torch.int32)
        entries = None if given.more is None else torch.tensor(given.more, dtype=torch.int32)
        read_lens = expected[2] if given.more is None else read
        triton_share_out.share_out(lens, entries, parts, splits, marks, None if entries is None else read, given.most)
        assert [torch.equal(*pair) for pair in zip(expected, (parts, splits, read_lens), strict=True)] == [True] * 3


def test_a_strided_list_of_lengths_is_read_as_it_lies():
    lens = torch.arange(12, dtype=torch.int32).view(6, 2)[:, 0] * 100
    parts, splits = torch.zeros(16, 8, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    share_out(lens, parts, splits, torch.zeros(6, 2, dtype=torch.int32))
    expected = planned(Lens(lens.tolist()), 16)
    assert torch.equal(parts, expected[0])
    assert torch.equal(splits, expected[1])
