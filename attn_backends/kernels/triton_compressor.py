"""Writing the pools of compressed layers in Triton: rows, entries that close, and states.

A program takes one row, or a block of one's channels. An entry is made by two launches: the tokens of each channel are
pooled by blocks of channels, with a softmax of each, and then a program for an entry norms, rotates and writes it. An
entry without a slot is neither pooled nor written. States are written by a launch of their own, after the entries': a
row's state may take the place of one that an entry of the same forward is made of.

Arithmetic is float32.

128 rows of a decode on an H200: 2.1 us for rows in 8-bit pages, 2.4 for states of 1024 channels. It takes 7.6 and 5.7
us for the 32 entries of ratio 4 that close in them, of 512 and 128 elements. The entry of ratio 128 that closes reads
512 KiB, through 32 programs: 8.4 us (docs/results/h200/compressed.json). Each moves less than 2 MB, half a microsecond
of a copy. It stops at its launches: one of about two microseconds, two for an entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels import triton_pages

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# 2 * pi in parts, of which all but the last have so few bits that some hundred thousand turns of them are exact
_TURN_HIGH, _TURN_MIDDLE = tl.constexpr(6.25), tl.constexpr(33 / 2**10)
_TURN_LOW, _TURN_LOWEST = tl.constexpr(31 / 2**15), tl.constexpr(1.2699757711476925e-05)
_TURNS = tl.constexpr(0.15915494309189535)
_POOLED = 2048  # values of tokens and channels that a program holds at once


@triton.jit
def _load(base, strides, row, channel, mask):
    """Elements [row, channel] in float32, 0 where masked off."""
    place = base + row[:, None].to(tl.int64) * strides[0] + channel * strides[1]
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _cos_sin(angle):
    """Of angles up to some millions, taken back to one turn first."""
    turns = tl.floor(angle * _TURNS + 0.5)
    angle = angle - turns * _TURN_HIGH - turns * _TURN_MIDDLE - turns * _TURN_LOW - turns * _TURN_LOWEST
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _rotated(x, position, inv_freq, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_PAIRS: tl.constexpr):
    """x [BLOCK_DIM] with its last pairs of real channels turned by the position's angles."""
    even, odd = tl.split(x.reshape(BLOCK_DIM // 2, 2))
    pair = tl.arange(0, BLOCK_DIM // 2) - (DIM // 2 - NUM_PAIRS)
    frequency = tl.load(inv_freq + pair, mask=(pair >= 0) & (pair < NUM_PAIRS), other=0.0).to(tl.float32)
    cos, sin = _cos_sin(position.to(tl.float32) * frequency)
    return tl.join(even * cos - odd * sin, odd * cos + even * sin).reshape(BLOCK_DIM)


@triton.jit(do_not_specialize=["slots", "input_rows", "state_reads"])
def _pool_tokens(
    means,
    slots,
    values,
    gates,
    states,
    input_rows,
    state_reads,
    position_bias,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A block of channels of an entry. means: dense, [entries, DIM] float32. values, gates, position_bias: (pointer,
    strides). states: as a pool.
    """
    entry = tl.program_id(0).to(tl.int64)
    if tl.load(slots + entry) < 0:
        return
    state_pages, ring, ring_stride, state_stride, channel_stride = states
    token, dim = tl.arange(0, BLOCK_TOKENS), tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    real = (dim < DIM)[None, :]
    row = tl.load(input_rows + entry * WINDOW + token, mask=token < WINDOW, other=-1)
    read = tl.load(state_reads + entry * WINDOW + token, mask=token < WINDOW, other=-1)
    half = tl.where(token < WINDOW - RATIO, 0, CHANNELS - DIM)  # of the block before, or of its own
    channel = half[:, None] + dim[None, :]
    given, kept = (row >= 0)[:, None] & real, ((row < 0) & (read >= 0))[:, None] & real
    kept_row = triton_pages.row_pointers(state_pages, ring, ring_stride, state_stride, tl.maximum(read, 0))[0]
    state = kept_row[:, None] + channel * channel_stride
    value = _load(values[0], values[1], row, channel, given) + tl.load(state, mask=kept, other=0.0)
    gate = _load(gates[0], gates[1], row, channel, given)
    gate += tl.load(state + CHANNELS * channel_stride, mask=kept, other=0.0)
    gate += _load(position_bias[0], position_bias[1], token % RATIO, channel, given | kept)
    gate = tl.where(given | kept, gate, float("-inf"))
    peak = tl.maximum(tl.max(gate, axis=0), _LOWEST)
    weight = tl.exp(gate - peak[None, :])
    total = tl.sum(weight, axis=0)
    mean = tl.sum(weight * value, axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(means + entry * DIM + dim, mean, mask=dim < DIM)


@triton.jit(do_not_specialize=["slots", "first_positions"])
def _write_entries(
    pool,
    slots,
    means,
    first_positions,
    norm_weight,
    norm_eps,
    inv_freq,
    DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """means: dense, [entries, DIM] float32. The rest is dense."""
    entry = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + entry)
    if slot < 0:
        return
    dim = tl.arange(0, BLOCK_DIM)
    mean = tl.load(means + entry * DIM + dim, mask=dim < DIM, other=0.0)
    scale = tl.rsqrt(tl.sum(mean * mean) / DIM + norm_eps)
    normed = tl.load(norm_weight + dim, mask=dim < DIM, other=0.0).to(tl.float32) * (mean * scale)
    rotated = _rotated(normed, tl.load(first_positions + entry), inv_freq, DIM, BLOCK_DIM, NUM_PAIRS)
    pages, num_rows, page_stride, row_stride, stride = pool
    triton_pages.write_row(pages, num_rows, page_stride, row_stride, stride, slot, rotated, DIM, BLOCK_DIM)


@triton.jit(do_not_specialize=["slots"])
def _write_rows(pool, slots, rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """rows: (pointer, strides)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    dim = tl.arange(0, BLOCK_DIM)
    place = rows[0] + token * rows[1][0] + dim * rows[1][1]
    values = tl.load(place, mask=dim < DIM, other=0.0).to(tl.float32)
    pages, num_rows, page_stride, row_stride, stride = pool
    triton_pages.write_row(pages, num_rows, page_stride, row_stride, stride, slot, values, DIM, BLOCK_DIM)


@triton.jit(do_not_specialize=["slots"])
def _write_states(states, slots, values, gates, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """states: as a pool. values, gates: (pointer, strides)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if slot >= 0:
        inside = channel < CHANNELS
        pages, ring, page_stride, row_stride, stride = states
        into = triton_pages.row_pointers(pages, ring, page_stride, row_stride, slot)[0] + channel * stride
        value = tl.load(values[0] + token * values[1][0] + channel * values[1][1], mask=inside)
        gate = tl.load(gates[0] + token * gates[1][0] + channel * gates[1][1], mask=inside)
        tl.store(into, value.to(pages.dtype.element_ty), mask=inside)
        tl.store(into + CHANNELS * stride, gate.to(pages.dtype.element_ty), mask=inside)


def write_rows(pages: Tensor, num_rows: int, slots: Tensor, rows: Tensor) -> None:
    """`compressor_operators.write_rows` for types up to 32 bits."""
    dim = rows.shape[1]
    _write_rows[(rows.shape[0],)](
        triton_pages.pool(pages, num_rows),
        slots.contiguous(),
        (rows, rows.stride()),
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
    )


def write_entries(
    pages: Tensor,
    num_rows: int,
    slots: Tensor,
    values: Tensor,
    gates: Tensor,
    states: Tensor,
    input_rows: Tensor,
    state_reads: Tensor,
    first_positions: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    inv_freq: Tensor,
    overlap: bool,
) -> None:
    """`compressor_operators.write_entries` for types up to 32 bits."""
    (ratio, channels), dim, (num_entries, window) = position_bias.shape, norm_weight.shape[0], input_rows.shape
    means, slots = torch.empty(num_entries, dim, dtype=torch.float32, device=slots.device), slots.contiguous()
    tokens, whole_row = triton.next_power_of_2(window), triton.next_power_of_2(dim)
    block = min(whole_row, max(16, _POOLED // tokens))
    _pool_tokens[(num_entries, triton.cdiv(dim, block))](
        means,
        slots,
        *((tensor, tensor.stride()) for tensor in (values, gates)),
        triton_pages.pool(states, states.shape[1]),
        *(tensor.contiguous() for tensor in (input_rows, state_reads)),
        (position_bias, position_bias.stride()),
        RATIO=ratio,
        WINDOW=window,
        DIM=dim,
        CHANNELS=channels,
        BLOCK_TOKENS=tokens,
        BLOCK_DIM=block,
        num_warps=2,
    )
    _write_entries[(num_entries,)](
        triton_pages.pool(pages, num_rows),
        slots,
        means,
        *(tensor.contiguous() for tensor in (first_positions, norm_weight)),
        norm_eps,
        inv_freq.contiguous(),
        DIM=dim,
        NUM_PAIRS=inv_freq.shape[0],
        BLOCK_DIM=whole_row,
    )


def write_states(states: Tensor, slots: Tensor, values: Tensor, gates: Tensor) -> None:
    """`compressor_operators.write_states` for types up to 32 bits."""
    channels = values.shape[1]
    block = min(1024, triton.next_power_of_2(channels))
    _write_states[(values.shape[0], triton.cdiv(channels, block))](
        triton_pages.pool(states, states.shape[1]),
        slots.contiguous(),
        *((tensor, tensor.stride()) for tensor in (values, gates)),
        CHANNELS=channels,
        BLOCK=block,
    )
