"""`attn_backends::store_ring`: the last positions of each request, in torch and in the Triton kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_backends.kernels import operators
from tests.triton_interpreter import BOTH, interpreted

NAN = float("nan")


@pytest.fixture(params=BOTH)
def store_ring(request):
    """The torch definition as a registered operator, and the Triton kernel."""
    return operators.store_ring if request.param == "operator" else interpreted("triton_ring", "_store_ring").store_ring


RANGES = {
    "one request": [(5, 8)],
    "fewer than the ring holds, more, and none": [(0, 2), (7, 9), (3, 12), (4, 4), (0, 5)],
    "around the ring": [(2, 3), (3, 4), (0, 1)],
    "none at all": [(6, 6)],
    "no request": [],
}


def ring_arguments(ranges: list[tuple[int, int]], size: int = 3, dim: int = 5, dtype: torch.dtype = torch.float32):
    """The arguments of `store_ring`, all of them strided views. ranges: the positions that each request brings."""
    widths, num_rows = [end - start for start, end in ranges], len(ranges) + 2
    num_tokens = sum(widths) + 2
    hidden_rings = torch.randn(size, num_rows, dim + 1).to(dtype).transpose(0, 1)[:, :, 1:]
    token_rings = torch.randint(100, (size, num_rows)).T
    hidden, tokens = torch.randn(dim, num_tokens).to(dtype).T, torch.randint(100, (2 * num_tokens,))[::2]
    rows = torch.randperm(num_rows).repeat_interleave(2)[: 2 * len(ranges) : 2]
    starts, ends = torch.tensor(ranges, dtype=torch.int32).view(-1, 2).unbind(1)
    offsets = 1 + torch.tensor([sum(widths[:i]) for i in range(len(ranges))], dtype=torch.int64)
    return [hidden_rings, token_rings, hidden, tokens, rows, starts, ends, offsets]


def kept_rings(arguments: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What rings must be after `store_ring`: position after position is written over what was there."""
    hidden_rings, token_rings, hidden, tokens, *of_requests = (tensor.clone() for tensor in arguments)
    size = token_rings.shape[1]
    for row, start, end, offset in zip(*(tensor.tolist() for tensor in of_requests), strict=True):
        for position in range(start, end) if size else ():
            hidden_rings[row, position % size] = hidden[offset + position - start]
            token_rings[row, position % size] = tokens[offset + position - start]
    return hidden_rings, token_rings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_a_ring_keeps_the_last_positions(store_ring, ranges, size, dtype):
    arguments = ring_arguments(ranges, size, dtype=dtype)
    expected = kept_rings(arguments)
    store_ring(*arguments)
    assert torch.equal(arguments[0], expected[0])
    assert torch.equal(arguments[1], expected[1])


def test_a_ring_of_wide_rows(store_ring):
    arguments = ring_arguments([(0, 4), (9, 11)], size=2, dim=1500)
    expected = kept_rings(arguments)
    store_ring(*arguments)
    assert torch.equal(arguments[0], expected[0])


def test_requests_that_bring_nothing_need_no_tokens(store_ring):
    rings, token_rings, hidden, tokens, *of_requests = ring_arguments([(3, 3), (0, 0)])
    expected = rings.clone()
    store_ring(rings, token_rings, hidden[:0], tokens[:0], *of_requests)
    assert torch.equal(rings, expected)


def test_a_ring_takes_what_is_not_a_number(store_ring):
    arguments = ring_arguments([(0, 2)])
    arguments[2][:] = NAN
    store_ring(*arguments)
    row = arguments[0][arguments[4][0]]
    assert row[:2].isnan().all()
    assert not row[2].isnan().any()


@pytest.mark.parametrize("position", range(8))
def test_a_ring_that_does_not_fit_is_refused(position):
    arguments = ring_arguments([(0, 2), (4, 9)])
    before = [tensor.clone() for tensor in arguments[:2]]
    wrong = arguments[position][:-1], arguments[position].half()
    for given in wrong:
        with pytest.raises(ValueError, match=r"store_ring: .* needed are hidden_rings \[num_rows, size, H\]"):
            operators.store_ring(*arguments[:position], given, *arguments[position + 1 :])
    assert all(torch.equal(*both) for both in zip(arguments, before, strict=False))
