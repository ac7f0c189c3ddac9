"""Sampling of target tokens as one Triton launch without a sort: `sampling_operators.choose`.

A program takes a row, and returns at once if it is greedy. Logits become integers of the same order, their keys. What a
filter keeps is every token whose key is above a bound, and the first few, in the order of tokens, whose key is equal to
it. The bound is searched: each pass over the row takes the mass (tokens, or weight) at and above several keys, until
one token is left between two of them, or one key. A last pass draws.

Masses are sums of integers, exact in any order, and the winner of a race depends on no order. So a choice depends
neither on the launch nor on the other rows.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import Launch, unspecialized
from spec_metadata import SamplingParams

_WARPS = 32
_DRAWN = 4096  # tokens of a step of the last pass
_VECTORS = 1024  # of 16 bytes, of a step of the other passes

_UNIT = tl.constexpr(2.0**40)
_WEIGHTLESS = tl.constexpr(28.0)  # exp(-28) is less than a unit
_NEVER = tl.constexpr(-(2**31))  # the key of what is behind the row's end, below every logit's
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _keys(logits, SHIFT: tl.constexpr):
    """int32 that are ordered as float32, equal for both zeros. SHIFT: low bits that are 0 in all logits of a type."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _logit(key, SHIFT: tl.constexpr):
    """The float32 of a key."""
    ordered = (key.to(tl.int32) << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(logits, top, temperature, WEIGHED: tl.constexpr):
    """Probabilities over the most likely token's, in units of 2**-40, int64; or 1, int32, to count tokens."""
    if WEIGHED:
        return (tl.exp(tl.div_rn(logits - top, temperature + tl.zeros_like(logits))) * _UNIT).to(tl.int64)
    else:
        return tl.zeros_like(logits).to(tl.int32) + 1


@triton.jit
def _mass_from(pivot, keys, weights):
    """Along the rows of a tile, the weights of keys that are at least a pivot."""
    return tl.sum(tl.where(keys >= pivot, weights, 0), axis=1)


@triton.jit
def _masses(
    row, vocab, top, temperature, first, step, WEIGHED: tl.constexpr, SHIFT: tl.constexpr, VECTORS: tl.constexpr
):
    """[4] int64, what the tokens have whose keys are at least `first`, `first` + `step`, and so on."""
    WIDTH: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    p0, gap = first.to(tl.int32), step.to(tl.int32)
    p1, p2, p3 = p0 + gap, p0 + 2 * gap, p0 + 3 * gap
    m0 = tl.zeros((VECTORS,), dtype=tl.int64 if WEIGHED else tl.int32)
    m1, m2, m3 = m0, m0, m0
    for begin in range(0, vocab, VECTORS * WIDTH):
        token = begin + tl.arange(0, VECTORS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = token < vocab
        logits = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
        keys = tl.where(inside, _keys(logits, SHIFT), _NEVER)
        weights = _weights(logits, top, temperature, WEIGHED)
        m0 += _mass_from(p0, keys, weights)
        m1 += _mass_from(p1, keys, weights)
        m2 += _mass_from(p2, keys, weights)
        m3 += _mass_from(p3, keys, weights)
    m0, m1, m2, m3 = tl.sum(m0, axis=0), tl.sum(m1, axis=0), tl.sum(m2, axis=0), tl.sum(m3, axis=0)
    place = tl.arange(0, 4)
    return tl.where(place < 2, tl.where(place == 0, m0, m1), tl.where(place == 2, m2, m3)).to(tl.int64)


@triton.jit
def _search(
    row,
    vocab,
    top,
    temperature,
    low,
    mass,
    need,
    WEIGHED: tl.constexpr,
    SHIFT: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """The bound of the fewest most likely tokens whose mass is `need`: its key, and how many of that key are kept.

    low: a key at or below the bound. mass: what those at and above it have, at least `need`.
    """
    high = _keys(top, SHIFT).to(tl.int64) + 1
    unit = _weights(_logit(low, SHIFT), top, temperature, WEIGHED)
    mass_above = mass * 0  # of what is at and above `high`, less than `need`
    # Weights fall with keys: less than one and a half of the lowest is one token.
    while (high - low > 1) & (2 * (mass - mass_above) >= 3 * unit):
        step = (high - low + 4) // 5
        masses = _masses(row, vocab, top, temperature, low + step, step, WEIGHED, SHIFT, VECTORS)
        is_enough = masses.to(tl.float64) >= need
        mass = tl.min(tl.where(is_enough, masses, mass), axis=0)
        mass_above = tl.maximum(mass_above, tl.max(tl.where(is_enough, 0, masses), axis=0))
        low += step * tl.sum(is_enough.to(tl.int64), axis=0)
        high = tl.minimum(low + step, high)
        unit = _weights(_logit(low, SHIFT), top, temperature, WEIGHED)
    ties = tl.ceil((need - mass_above.to(tl.float64)) / tl.maximum(unit, 1).to(tl.float64)).to(tl.int64)
    is_cut = (high - low == 1) & (ties * unit < mass - mass_above)
    return tl.where(is_cut, low, low - 1), tl.where(is_cut, ties, 0)


@triton.jit
def _bound(
    row,
    vocab,
    top,
    temperature,
    top_p,
    top_k,
    SHIFT: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """What both filters keep: keys above the first result, and as many equal to it as the second says."""
    key = _keys(tl.full((), float("-inf"), tl.float32), SHIFT).to(tl.int64) - 1
    ties = key * 0
    if (top_k > 0) & (top_k < vocab):
        count, need = ties + vocab, top_k.to(tl.float64)
        key, ties = _search(row, vocab, top, temperature, key + 1, count, need, False, SHIFT, VECTORS)
    if top_p < 1:
        low = tl.where(ties > 0, key, key + 1)
        total = tl.max(_masses(row, vocab, top, temperature, key + 1, ties * 0, True, SHIFT, VECTORS), axis=0)
        total += ties * _weights(_logit(low, SHIFT), top, temperature, True)
        need = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)  # the most likely token at least
        low = tl.maximum(low, _keys(top - _WEIGHTLESS * temperature, SHIFT))  # tokens below it weigh nothing
        p_key, p_ties = _search(row, vocab, top, temperature, low, total, need, True, SHIFT, VECTORS)
        key, ties = tl.maximum(p_key, key), tl.where(p_key >= key, p_ties, ties)
    return key, ties


@triton.jit
def _random(state, index):
    """Number `index` of a SplitMix64 stream, uint64: `spec_metadata.sampling._draw`."""
    mixed = state + (index.to(tl.uint64) + 1) * _GAMMA
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return mixed ^ (mixed >> 31)


@triton.jit
def _log_race_time(bits):
    """log(-log(1 - u)) of u = (bits // 2**11 + 0.5) / 2**53, as exact for the shortest times as for the longest."""
    number = (bits >> 11).to(tl.int64)
    is_late = number >= 2**52
    near = (tl.where(is_late, 2**53 - 1 - number, number).to(tl.float32) + 0.5) * 2.0**-53  # u or 1 - u, up to 1/2
    w = near / (2 - near)  # -log(1 - u) = 2 artanh(w)
    square = w * w
    series = 1 / 9 + square * (1 / 11 + square * (1 / 13))
    series = 1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * series)))
    return tl.log(tl.where(is_late, -tl.log(near), 2 * w * series))


@triton.jit
def _race(row, vocab, top, temperature, key, ties, state, SHIFT: tl.constexpr, DRAWN: tl.constexpr):
    """The token that wins among those that are kept; of equal ones the lowest."""
    best, winner = tl.full((DRAWN,), float("-inf"), tl.float32), tl.zeros((DRAWN,), dtype=tl.int32)
    seen = ties * 0
    for begin in range(0, vocab, DRAWN):
        token = begin + tl.arange(0, DRAWN)
        inside = token < vocab
        logits = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
        keys = tl.where(inside, _keys(logits, SHIFT), _NEVER)
        is_kept = keys > key
        if ties > 0:
            is_equal = keys == key
            rank = seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
            is_kept = is_kept | (is_equal & (rank <= ties))
            seen += tl.sum(is_equal.to(tl.int32), axis=0)
        scores = tl.div_rn(logits - top, temperature + tl.zeros_like(logits))
        noisy = scores - _log_race_time(_random(state, token))
        is_better = is_kept & (noisy > best)
        best, winner = tl.where(is_better, noisy, best), tl.where(is_better, token, winner)
    is_best = best == tl.max(best, axis=0)
    return tl.min(tl.where(is_best, winner, vocab), axis=0)


@unspecialized
def _choose(
    logits,
    positions,
    temperature,
    top_p,
    top_k,
    seed,
    tokens,
    request_stride,
    row_stride,
    width,
    vocab,
    ALIGNED: tl.constexpr,
    SHIFT: tl.constexpr,
    DRAWN: tl.constexpr,
    VECTORS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    request = place // width
    divisor = tl.load(temperature + request)
    if divisor > 0:
        row = logits + request * request_stride + place % width * row_stride
        if ALIGNED:
            row, vocab = tl.multiple_of(row, 16), vocab // 16 * 16
        top = tl.load(row + tl.load(tokens + place)).to(tl.float32)
        if tl.abs(top) < float("inf"):
            p, k = tl.load(top_p + request), tl.load(top_k + request)
            key, ties = _bound(row, vocab, top, divisor, p, k, SHIFT, VECTORS)
            state = _random(tl.load(seed + request).to(tl.uint64), tl.load(positions + place))
            tl.store(tokens + place, _race(row, vocab, top, divisor, key, ties, state, SHIFT, DRAWN))


_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def sample(logits: Tensor, params: SamplingParams, positions: Tensor, tokens: Tensor) -> None:
    """Replace the tokens of rows that sample. tokens: [bs, width] int64, contiguous, each row's most likely token."""
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    (bs, width, vocab), strides = logits.shape, logits.stride()[:2]
    is_aligned = not any(each % 16 for each in (*strides, vocab, logits.data_ptr()))
    constants = (is_aligned, _SHIFTS[logits.dtype], _DRAWN, _VECTORS)
    given = (positions, params.temperature, params.top_p, params.top_k, params.seed)
    _launch(logits.device, bs * width)(
        (logits.dtype, *(each.dtype for each in given), constants),
        logits,
        *(each.contiguous() for each in given),
        tokens,
        *strides,
        width,
        vocab,
        *constants,
    )


@cache
def _launch(device: torch.device, num_rows: int) -> Launch:
    return Launch(_choose, device, (num_rows, 1, 1), _WARPS)
