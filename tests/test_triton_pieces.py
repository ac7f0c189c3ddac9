"""Which request, and which part of it, the programs of attention take: every part once, whatever the lengths are."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_pieces import LEAST_BLOCKS, most_pieces, share_of
from tests.triton_interpreter import interpreted

KEYS = 16  # of a block


@triton.jit
def _shares(kv_lens, pieces, out, bs, num_whole, num_splits, most, OF_PIECES: tl.constexpr, KEYS: tl.constexpr):
    unit, batch = tl.program_id(0), (bs, num_whole, num_splits, most)
    request, split, num_parts = share_of(unit, kv_lens, batch, pieces, OF_PIECES, KEYS)
    tl.store(out + unit * 3, request)
    tl.store(out + unit * 3 + 1, split)
    tl.store(out + unit * 3 + 2, num_parts)


def shares(kv_lens: Tensor, num_whole: int, num_splits: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """What each unit takes, [units, 3], first of pieces and then of the others, and the pieces of each request."""
    bs = len(kv_lens)
    pieces = torch.full((bs,), -9, dtype=torch.int32)
    interpreted("triton_pieces", "share_of")
    found = []
    for is_piece, num in ((True, most), (False, num_whole + (bs - num_whole) * num_splits)):
        found.append(torch.full((num, 3), -9, dtype=torch.int32))
        if num:
            _shares[(num,)](kv_lens, pieces, found[-1], bs, num_whole, num_splits, most, is_piece, KEYS)
    return *found, pieces


def expected(kv_lens: list[int], num_whole: int, num_splits: int, most: int) -> list[int]:
    """The pieces of each request, by the rule as it is written down."""
    blocks = [-(-length // KEYS) for length in kv_lens]
    size = max(-(-sum(blocks) // most), LEAST_BLOCKS) if most else 0
    parts = [1 if request < num_whole else num_splits for request in range(len(blocks))]
    largest = [-(-each // num) for each, num in zip(blocks, parts, strict=True)]
    return [each // size if most and part >= 2 * size else 0 for each, part in zip(blocks, largest, strict=True)]


BATCHES = {
    "one long request": ([2000, 40, 0, 64], 4, 1, 6),
    "long where it is divided anyway": ([100, 40, 3000, 64], 2, 3, 8),
    "several": ([1500, 30, 1500, 30, 0, 700], 6, 1, 9),
    "alike": ([800] * 5, 3, 4, 9),
    "no pieces": ([2000, 40, 64], 1, 2, 0),
    "more than are looked at together": ([20 * (i % 7) for i in range(255)] + [9000, 1, 9000] + [50] * 60, 318, 1, 11),
}


@pytest.mark.parametrize(("lens", "num_whole", "num_splits", "most"), BATCHES.values(), ids=BATCHES)
def test_units_take_every_part_once(lens, num_whole, num_splits, most):
    """As many pieces as the rule says, and no more than there is room for; whole requests, then parts."""
    found, others, pieces = shares(torch.tensor(lens, dtype=torch.int32), num_whole, num_splits, most)
    right = expected(lens, num_whole, num_splits, most)
    assert sum(right) <= most
    units = [(request, split, num) for request, num in enumerate(right) for split in range(num)]
    assert [tuple(unit) for unit in found.tolist()] == units + [(0, 0, 0)] * (most - len(units))
    units = [(request, 0, 1) for request in range(num_whole) if not right[request]]
    divided = range(num_whole, len(lens))
    units += [(each, split, num_splits) for split in range(num_splits) for each in divided if not right[each]]
    assert [tuple(unit) for unit in others.tolist() if unit[2]] == units
    if most:
        assert pieces.tolist() == right


def test_a_batch_has_pieces_where_a_request_can_be_long():
    assert most_pieces(bs=128, blocks=1024, at_once=66, rows=128, room=16384) == 66
    assert most_pieces(bs=128, blocks=1024, at_once=66, rows=512, room=16384) == 32
    assert most_pieces(bs=1, blocks=1024, at_once=66, rows=128, room=16384) == 0
    assert most_pieces(bs=128, blocks=4 * LEAST_BLOCKS - 1, at_once=66, rows=128, room=16384) == 0
    assert most_pieces(bs=128, blocks=1024, at_once=1, rows=128, room=16384) == 0
    assert most_pieces(bs=128, blocks=1024, at_once=66, rows=128, room=128) == 0
    assert most_pieces(bs=0, blocks=0, at_once=132, rows=0, room=0) == 0
