"""FlashMLA's share-out, planned by us: a partition of every request's blocks, and the same by Triton as by torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attn_backends.kernels.schedule_operators import OVERHEAD, share_out
from tests.share_outs import shared_out
from tests.triton_interpreter import interpreted

NUM_PARTS = (1, 2, 16, 33, 66, 132, 144)


def planned(lens: list[int], num_parts: int, more: list[int] | None = None, most: int = 2**30) -> tuple[Tensor, ...]:
    """parts, splits, and the entries that are read."""
    parts = torch.full((num_parts, 8), -7, dtype=torch.int32)
    splits, read = torch.full((len(lens) + 1,), -7, dtype=torch.int32), torch.zeros(len(lens), dtype=torch.int32)
    given = torch.tensor(lens, dtype=torch.int32)
    entries = {} if more is None else {"more_lens": torch.tensor(more, dtype=torch.int32), "read_lens": read}
    share_out(given, parts, splits, marks_of(lens), most=most, **entries)
    return parts, splits, read


def marks_of(lens: list[int]) -> Tensor:
    """Scratch."""
    return torch.zeros(len(lens), 2, dtype=torch.int32)


def blocks(length: int) -> int:
    """Blocks of keys of a request."""
    return -(-length // 64)


def random_lens(rng: random.Random) -> list[int]:
    """Lengths of some requests, some of them of none or of whole blocks."""
    most = rng.choice((1, 64, 65, 300, 4100, 131072))
    edges = (0, 1, 64, most)
    n = rng.choice((1, 1, 2, 3, 5, 8, 31, 32, 33, 100, 128, 257))
    return [rng.randint(0, most) if rng.random() < 0.8 else rng.choice(edges) for _ in range(n)]


def loads(parts: Tensor, splits: Tensor, lens: list[int]) -> list[int]:
    """Blocks that each part works on, and an overhead for each request of it."""
    found = []
    for first, last, first_block, end_block, *_ in parts.tolist():
        requests = range(first, last + 1) if first < len(lens) else range(0)
        ends = [end_block if request == last else max(blocks(lens[request]), 1) for request in requests]
        begins = [first_block if request == first else 0 for request in requests]
        found.append(sum(max(end - begin, 1) + OVERHEAD for end, begin in zip(ends, begins, strict=True)))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_every_block_of_keys_belongs_to_one_part(seed):
    rng = random.Random(seed)
    for _ in range(60):
        lens, num_parts = random_lens(rng), rng.choice(NUM_PARTS)
        parts, splits, _ = planned(lens, num_parts)
        ends = shared_out(parts, splits)
        assert [blocks(length) if end < 0 else end for end, length in zip(ends, lens, strict=True)] == [
            *map(blocks, lens)
        ]


def test_a_second_list_begins_at_a_whole_block_and_is_cut_to_what_is_read():
    rng = random.Random(5)
    for most in (10, 512, 2**30):
        lens = random_lens(rng)
        more = [rng.randint(0, 900) for _ in lens]
        parts, splits, read = planned(lens, 66, more, most)
        assert read.tolist() == [min(each, most) for each in more]
        expected = [blocks(a) + blocks(min(b, most)) for a, b in zip(lens, more, strict=True)]
        ends = shared_out(parts, splits)
        assert [total if end < 0 else end for end, total in zip(ends, expected, strict=True)] == expected


@pytest.mark.parametrize("seed", range(2))
def test_no_part_does_more_than_an_even_share_and_two_overheads(seed):
    rng = random.Random(seed)
    for _ in range(100):
        lens, num_parts = random_lens(rng), rng.choice(NUM_PARTS)
        parts, splits, _ = planned(lens, num_parts)
        total = sum(max(blocks(length), 1) + OVERHEAD for length in lens)
        assert max(loads(parts, splits, lens)) <= max(-(-total // num_parts), 1) + 2 * OVERHEAD


def test_one_request_is_shared_out_to_all_parts():
    parts, splits, _ = planned([4096], 132)
    assert splits.tolist() == [0, 64]
    assert parts[64:, 0].tolist() == [1] * 68, "unused"
    assert (parts[:64, 3] - parts[:64, 2]).tolist() == [1] * 64


def test_triton_writes_the_same():
    triton_share_out = interpreted("triton_share_out", "_share_out")
    rng = random.Random(7)
    for _ in range(12):
        lens, num_parts, most = random_lens(rng), rng.choice(NUM_PARTS), rng.choice((10, 512, 2**30))
        more = [rng.randint(0, 900) for _ in lens] if rng.random() < 0.5 else None
        expected = planned(lens, num_parts, more, most)
        parts, splits, read = (torch.zeros_like(each) for each in expected)
        given = torch.tensor(lens, dtype=torch.int32)
        entries = None if more is None else torch.tensor(more, dtype=torch.int32)
        marks, read_lens = marks_of(lens), None if more is None else read
        triton_share_out.share_out(given, entries, parts, splits, marks, read_lens, most)
        assert [torch.equal(*pair) for pair in zip(expected, (parts, splits, read), strict=True)] == [True] * 3


def test_a_strided_list_of_lengths_is_read_as_it_lies():
    lens = torch.arange(12, dtype=torch.int32).view(6, 2)[:, 0] * 100
    parts, splits = torch.zeros(16, 8, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    share_out(lens, parts, splits, torch.zeros(6, 2, dtype=torch.int32))
    expected = planned(lens.tolist(), 16)
    assert torch.equal(parts, expected[0])
    assert torch.equal(splits, expected[1])
