"""Keeping the last positions of requests in rings: one Triton launch, hidden states and tokens together.

A program takes one of a request's last positions and a block of its hidden state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import strided

MAX_BLOCK = 1024
# What differs from batch to batch.
_LISTS = ["token_rings", "tokens", "rows", "starts", "ends", "offsets", "ring_stride", "entry_stride"]
_LISTS += [f"{name}_stride" for name in ("token", "row", "start", "end", "offset")]


@triton.jit(do_not_specialize=_LISTS)
def _store_ring(
    hidden_rings,
    hidden,
    token_rings,
    tokens,
    rows,
    starts,
    ends,
    offsets,
    ring_stride,
    entry_stride,
    token_stride,
    row_stride,
    start_stride,
    end_stride,
    offset_stride,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Hidden states are (pointer, strides). ring_stride: between two rings of tokens, entry_stride within one."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + request * start_stride).to(tl.int64)
    position = tl.load(ends + request * end_stride).to(tl.int64) - 1 - tl.program_id(1)
    if position < first:
        return
    row = tl.load(rows + request * row_stride)
    source = tl.load(offsets + request * offset_stride).to(tl.int64) + position - first
    entry = position % SIZE
    dim = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(hidden[0] + source * hidden[1][0] + dim * hidden[1][1], mask=dim < DIM)
    ring = hidden_rings[0] + row * hidden_rings[1][0] + entry * hidden_rings[1][1]
    tl.store(ring + dim * hidden_rings[1][2], value, mask=dim < DIM)
    if tl.program_id(2) == 0:
        token = tl.load(tokens + source * token_stride)
        tl.store(token_rings + row * ring_stride + entry * entry_stride, token)


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
    others = (token_rings, tokens, rows, starts, ends, offsets)
    block = min(MAX_BLOCK, triton.next_power_of_2(dim))
    _store_ring[(rows.shape[0], size, triton.cdiv(dim, block))](
        *strided((hidden_rings, hidden)),
        *others,
        *(stride for each in others for stride in each.stride()),
        SIZE=size,
        DIM=dim,
        BLOCK=block,
    )
