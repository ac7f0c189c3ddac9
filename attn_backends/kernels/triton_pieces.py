"""Pieces: the parts of a request that is much longer than the others of its batch.

The sizes of a batch say into how many parts the keys of all its requests are divided, alike, because nothing is read on
the host. Where one request is much longer than the others, its programs would run long after theirs. So programs look
at all lengths, and of what they find follows who takes what:

    size      blocks of keys of a piece at least: all blocks of the batch, divided by the pieces that run at once
    long      a request whose parts would be of two sizes or more; it has as many pieces as sizes, instead of parts
    order     pieces first, as programs are begun in their order. A launch of its own, `deal_out`, writes down who takes
              what: a program that finds it out keeps more in registers over its keys

Pieces have sizes that add up to no more than all blocks, so `most` of them suffice, and a grid may be fixed. The number
of pieces of each request is kept for the merge. A batch's lengths decide on the order of sums, as they do in the
vendors' schedules: the same batch gives the same bits.

One request of 131,072 tokens among 127 of 1024, in microseconds on an H200 (docs/results/h200/skewed.json):

                                     this    vendor
    MLA, 128 heads, width 1          182     148       (gluon_mla, FlashMLA)
    the same, width 4                547     458
    MLA in triton_decode, width 1    327     148
    the same, width 4                1171    458
    32 heads of 128 over 8, width 1  348     256       (triton_decode, FlashAttention-3)
    the same, width 4                353     264

Undivided, these took 7.6 to 22 times as long as the vendors' on an H100. While pieces of `triton_decode` were a launch
before that of the parts, which waited for them, they took 479, 1838, 428 and 430 us. These runs are not kept.

Where no request is long, the lengths are looked at in vain. Calls of MLA, 16 heads, 4096 tokens, in microseconds of
replays on an H200 (docs/results/h200/profiles_latents.json), under trtllm_mla and under fa3:

    requests             8       32      128     128, fa3
    with pieces          26.9    55.4    164     161
    without              24.5    52.4    160     163
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import Call, DirectLaunch

LEAST_BLOCKS = 4
"""Blocks of a piece at least."""

MERGERS = 8
"""Programs for each multiprocessor that merge pieces; one where all requests are divided too."""

_REQUESTS = tl.constexpr(256)  # that are looked at together
_LEAST = tl.constexpr(LEAST_BLOCKS)


def most_pieces(bs: int, blocks: int, at_once: int, rows: int, room: int) -> int:
    """Pieces that a batch may have; 0 if none would gain by them. blocks: of keys of a request, at most. at_once:
    requests' programs that run together. rows: of outputs of a piece. room: for such rows.
    """
    most = min(at_once, room // max(rows, 1), bs * blocks // LEAST_BLOCKS)
    return most if bs > 1 and most > 1 and blocks >= 4 * LEAST_BLOCKS else 0


@triton.jit
def _blocks(kv_lens, first, bs, num_splits, BLOCK_KEYS: tl.constexpr):
    """Some requests, their blocks of keys, and those of each one's largest part."""
    request = first + tl.arange(0, _REQUESTS)
    blocks = tl.cdiv(tl.load(kv_lens + request, mask=request < bs, other=0), BLOCK_KEYS)
    return request, blocks, tl.cdiv(blocks, num_splits)


@triton.jit
def _size(kv_lens, bs, num_splits, most, BLOCK_KEYS: tl.constexpr):
    """Blocks of a piece at least, and of the largest part of all requests."""
    total, largest = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, bs, _REQUESTS):
        _, blocks, part = _blocks(kv_lens, first, bs, num_splits, BLOCK_KEYS)
        total, largest = total + tl.sum(blocks, axis=0), tl.maximum(largest, tl.max(part, axis=0))
    return tl.maximum(tl.cdiv(total, most), _LEAST), largest


@triton.jit
def _write(shares, unit, live, request, split, num_parts, piece):
    """Shares of units: four numbers each."""
    tl.store(shares + 4 * unit, request, mask=live)
    tl.store(shares + 4 * unit + 1, split, mask=live)
    tl.store(shares + 4 * unit + 2, num_parts, mask=live)
    tl.store(shares + 4 * unit + 3, piece, mask=live)


@triton.jit(do_not_specialize=["kv_lens", "shares", "bs", "num_splits", "most"])
def _deal_out(kv_lens, shares, bs, num_splits, most, BLOCK_KEYS: tl.constexpr):
    """A program writes the shares of one request, its pieces or its parts, and some of those that nobody has."""
    nothing = tl.full((), 0, tl.int32)
    own, before, num, here = nothing, nothing, nothing, tl.program_id(0)
    size, largest = _size(kv_lens, bs, num_splits, most, BLOCK_KEYS)
    if largest >= 2 * size:
        for first in range(0, bs, _REQUESTS):
            request, blocks, part = _blocks(kv_lens, first, bs, num_splits, BLOCK_KEYS)
            pieces = tl.where(part >= 2 * size, blocks // size, 0)
            own += tl.sum(tl.where(request == here, pieces, 0), axis=0)
            before += tl.sum(tl.where(request < here, pieces, 0), axis=0)
            num += tl.sum(pieces, axis=0)
    tl.store(shares + here, own)
    shares += bs
    for first in range(0, own, _REQUESTS):
        split = first + tl.arange(0, _REQUESTS)
        _write(shares, before + split, split < own, here, split, own, before + split)
    for first in range(0, num_splits, _REQUESTS):
        split = first + tl.arange(0, _REQUESTS)
        num_parts = tl.where(own > 0, 0, num_splits)
        _write(shares, num + split * bs + here, split < num_splits, here, split, num_parts, -1)
    for first in range(num + here, most, bs * _REQUESTS):
        unit = first + bs * tl.arange(0, _REQUESTS)
        _write(shares, unit + num_splits * bs, unit < most, here, 0, 0, -1)


@triton.jit
def share_of(unit, bs, num_splits, shares):
    """The share of a unit's programs: a request, which of how many parts of it, none where there is nothing to do, and
    which of all pieces that is, or -1. shares: as of `deal_out`; None where no request may have pieces.
    """
    if shares is None:
        return unit % bs, unit // bs, num_splits, tl.full((), -1, tl.int32)
    else:
        own = shares + bs + 4 * unit
        return tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)


@triton.jit
def rows_before(split, piece, num_splits, split_stride, first, width, num_heads):
    """Rows times heads from the beginning of all parts to those of one, less its request's first. split_stride: from a
    split to the next; 0 if there is one. first, width: the request's first row, and its rows at most. Pieces follow the
    splits.
    """
    of_piece = num_splits.to(tl.int64) * split_stride + (piece.to(tl.int64) * width - first) * num_heads
    return tl.where(piece < 0, split.to(tl.int64) * split_stride, of_piece)


@triton.jit
def num_long(pieces, bs):
    """The number of requests that have pieces."""
    num = tl.full((), 0, tl.int32)
    for first in range(0, bs, _REQUESTS):
        request = first + tl.arange(0, _REQUESTS)
        num += tl.sum((tl.load(pieces + request, mask=request < bs, other=0) > 0).to(tl.int32), axis=0)
    return num


@triton.jit
def long_request(pieces, bs, nth):
    """The nth request that has pieces, how many, and the number of its first."""
    request, num, piece, before = nth * 0, nth * 0, nth * 0, nth * 0
    for first in range(0, bs, _REQUESTS):
        requests = first + tl.arange(0, _REQUESTS)
        own = tl.load(pieces + requests, mask=requests < bs, other=0)
        is_long = (own > 0).to(tl.int32)
        place = before + tl.cumsum(is_long, axis=0) - is_long
        here = (is_long > 0) & (place == nth)
        request += tl.sum(tl.where(here, requests, 0), axis=0)
        num += tl.sum(tl.where(here, own, 0), axis=0)
        piece += tl.sum(tl.where(place < nth, own, 0), axis=0)
        before += tl.sum(is_long, axis=0)
    return request, num, piece


def deal_out(kv_lens: Tensor, num_splits: int, most: int, block_keys: int) -> Tensor:
    """The shares of all units: [bs + 4 * units] int32, the pieces of each request, then the share of each unit. Of
    units there are `most`, and `num_splits` for each request. kv_lens: [bs] int32. num_splits: parts of a request
    without pieces.
    """
    bs = kv_lens.shape[0]
    shares = kv_lens.new_empty(bs + 4 * (most + bs * num_splits))
    _launch((kv_lens, shares), bs, num_splits, most, block_keys)
    return shares


def _call(tensors: Sequence[Tensor], bs: int, num_splits: int, most: int, block_keys: int) -> Call:
    return Call((bs,), (*tensors, bs, num_splits, most), {"BLOCK_KEYS": block_keys})


_launch = DirectLaunch(_deal_out, _call)
