"""Which request, and which part of it, the programs of attention take: every part once, whatever the lengths are."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_pieces import LEAST_BLOCKS, deal_out, most_pieces, share_of
from tests.triton_interpreter import interpreted

KEYS = 16  # of a block


@triton.jit
def _shares(out, bs, num_splits, dealt):
    unit = tl.program_id(0)
    request, split, num_parts, piece = share_of(unit, bs, num_splits, dealt)
    tl.store(out + unit * 4, request)
    tl.store(out + unit * 4 + 1, split)
    tl.store(out + unit * 4 + 2, num_parts)
    tl.store(out + unit * 4 + 3, piece)


def shares(kv_lens: Tensor, num_splits: int, most: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """What each unit takes, and the pieces of each request."""
    interpreted("triton_pieces", "_deal_out")
    bs, dealt = len(kv_lens), deal_out(kv_lens, num_splits, most, KEYS) if most else None
    found = torch.full((most + bs * num_splits, 4), -9, dtype=torch.int32)
    _shares[(len(found),)](found, bs, num_splits, dealt)
    return [tuple(unit) for unit in found.tolist()], [0] * bs if dealt is None else dealt[:bs].tolist()


def expected(kv_lens: list[int], num_splits: int, most: int) -> list[int]:
    """The pieces of each request, by the rule as it is written down."""
    blocks = [-(-length // KEYS) for length in kv_lens]
    size = max(-(-sum(blocks) // most), LEAST_BLOCKS) if most else 0
    return [each // size if most and -(-each // num_splits) >= 2 * size else 0 for each in blocks]


BATCHES = {
    "one long request": ([2000, 40, 0, 64], 1, 6),
    "long where it is divided anyway": ([100, 40, 3000, 64], 3, 8),
    "several": ([1500, 30, 1500, 30, 0, 700], 1, 9),
    "alike": ([800] * 5, 4, 9),
    "no pieces": ([2000, 40, 64], 2, 0),
    "more than are looked at together": ([20 * (i % 7) for i in range(255)] + [9000, 1, 9000] + [50] * 60, 1, 11),
    "more pieces than are looked at together": ([60000, 16], 1, 300),
    "more splits than are looked at together": ([64, 60000], 260, 2),
}


@pytest.mark.parametrize(("lens", "num_splits", "most"), BATCHES.values(), ids=BATCHES)
def test_units_take_every_part_once(lens, num_splits, most):
    """As many pieces as the rule says, then parts of the other requests; units that are left over take nothing."""
    found, pieces = shares(torch.tensor(lens, dtype=torch.int32), num_splits, most)
    right = expected(lens, num_splits, most)
    assert pieces == right
    assert sum(right) <= most
    split = [(request, number, num) for request, num in enumerate(right) for number in range(num)]
    units = [(*each, number) for number, each in enumerate(split)]
    of_all = [(each, number) for number in range(num_splits) for each in range(len(lens))]
    units += [(each, number, 0 if right[each] else num_splits, -1) for each, number in of_all]
    assert found[: len(units)] == units
    assert all(num_parts == 0 and 0 <= request < len(lens) for request, _, num_parts, _ in found[len(units) :])


def test_a_batch_has_pieces_where_a_request_can_be_long():
    assert most_pieces(bs=128, blocks=1024, at_once=66, rows=128, room=16384) == 66
    assert most_pieces(bs=128, blocks=1024, at_once=66, rows=512, room=16384) == 32
    assert most_pieces(bs=1, blocks=1024, at_once=66, rows=128, room=16384) == 0
    assert most_pieces(bs=128, blocks=4 * LEAST_BLOCKS - 1, at_once=66, rows=128, room=16384) == 0
    assert most_pieces(bs=128, blocks=1024, at_once=1, rows=128, room=16384) == 0
    assert most_pieces(bs=128, blocks=1024, at_once=66, rows=128, room=128) == 0
    assert most_pieces(bs=0, blocks=0, at_once=132, rows=0, room=0) == 0
