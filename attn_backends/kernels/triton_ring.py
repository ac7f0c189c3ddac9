"""Keeping the last positions of requests in rings: one Triton launch, hidden states and tokens together.

A program takes one of a request's last positions and a block of its hidden state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 1024


@triton.jit
def _store_ring(
    hidden_rings,
    token_rings,
    hidden,
    tokens,
    rows,
    starts,
    ends,
    offsets,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tensors are (pointer, strides)."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(starts[0] + request * starts[1][0]).to(tl.int64)
    position = tl.load(ends[0] + request * ends[1][0]).to(tl.int64) - 1 - tl.program_id(1)
    if position < first:
        return
    row = tl.load(rows[0] + request * rows[1][0])
    source = tl.load(offsets[0] + request * offsets[1][0]).to(tl.int64) + position - first
    entry = position % SIZE
    dim = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(hidden[0] + source * hidden[1][0] + dim * hidden[1][1], mask=dim < DIM)
    ring = hidden_rings[0] + row * hidden_rings[1][0] + entry * hidden_rings[1][1]
    tl.store(ring + dim * hidden_rings[1][2], value, mask=dim < DIM)
    if tl.program_id(2) == 0:
        token = tl.load(tokens[0] + source * tokens[1][0])
        tl.store(token_rings[0] + row * token_rings[1][0] + entry * token_rings[1][1], token)


def store_ring(
    hidden_rings: Tensor,
    token_rings: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    offsets: Tensor,
) -> None:
    """`operators.store_ring` for every type."""
    _, size, dim = hidden_rings.shape
    if size == 0:  # no remainder to compile
        return
    block = min(MAX_BLOCK, triton.next_power_of_2(dim))
    _store_ring[(rows.shape[0], size, triton.cdiv(dim, block))](
        *_views(hidden_rings, token_rings, hidden, tokens, rows, starts, ends, offsets),
        SIZE=size,
        DIM=dim,
        BLOCK=block,
    )


def _views(*tensors: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    return [(tensor, tensor.stride()) for tensor in tensors]
