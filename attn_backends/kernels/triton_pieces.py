"""Pieces: the parts of a request that is much longer than the others of its batch.

The sizes of a batch say into how many parts the keys of all its requests are divided, alike, because nothing is read on
the host. Where one request is much longer than the others, its programs would run long after theirs. So programs look
at all lengths, and of what they find follows who takes what:

    size      blocks of keys of a piece at least: all blocks of the batch, divided by the pieces that run at once
    long      a request whose parts would be of two sizes or more; it has as many pieces as sizes, instead of parts
    order     pieces first, as programs are begun in their order. In `triton_decode` they are a launch of their own: a
              program that could be either keeps more in registers over its keys

Pieces have sizes that add up to no more than all blocks, so `most` of them suffice, and a grid may be fixed. The number
of pieces of each request is kept for the merge. A batch's lengths decide on the order of sums, as they do in the
vendors' schedules: the same batch gives the same bits.

One request of 131,072 tokens among 127 of 1024, in microseconds on an H100 (docs/results/h100/skewed.json):

                                     this    without    vendor
    MLA, 128 heads, width 1          197     3567       166       (gluon_mla, FlashMLA)
    the same, width 4                545     3487       463
    32 heads of 128 over 8, width 1  429     3594       361       (triton_decode, FlashAttention-3)
    the same, width 4                434     3573       370

Where no request is long, programs look at the lengths in vain, and the merge is a launch more. MLA of 16 heads in
microseconds on an H200 (docs/results/h200/pieces.json); the last is one request of 131,072 among 127 of 1024:

                                8 x 4096   128 x 4096   32 x 32,768   128 x 32,768   skewed
    pieces in one launch           26          170          311           1205         120
    a launch of their own          27          160          290           1097         160
    the same form, no pieces       24          160          295           1140        3333
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def _blocks(kv_lens, first, batch, BLOCK_KEYS: tl.constexpr):
    """Some requests, their blocks of keys, and those of each one's largest part."""
    bs, num_whole, num_splits, _ = batch
    request = first + tl.arange(0, _REQUESTS)
    blocks = tl.cdiv(tl.load(kv_lens + request, mask=request < bs, other=0), BLOCK_KEYS)
    return request, blocks, tl.cdiv(blocks, tl.where(request < num_whole, 1, num_splits))


@triton.jit
def _size(kv_lens, batch, BLOCK_KEYS: tl.constexpr):
    """Blocks of a piece at least, and of the largest part of all requests."""
    total, largest = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, batch[0], _REQUESTS):
        _, blocks, part = _blocks(kv_lens, first, batch, BLOCK_KEYS)
        total, largest = total + tl.sum(blocks, axis=0), tl.maximum(largest, tl.max(part, axis=0))
    return tl.maximum(tl.cdiv(total, batch[3]), _LEAST), largest


@triton.jit
def _num_pieces(blocks, part, size):
    """Pieces of requests, 0 of those that are not long."""
    return tl.where(part >= 2 * size, blocks // size, 0)


@triton.jit
def _piece(unit, kv_lens, batch, pieces, BLOCK_KEYS: tl.constexpr):
    """The request of a piece, which of its pieces that is, and how many it has; 0 if there are not so many in all. The
    first programs write how many pieces each request has.
    """
    request, split, num_parts, num = unit * 0, unit * 0, unit * 0, unit * 0
    size, largest = _size(kv_lens, batch, BLOCK_KEYS)
    if (largest >= 2 * size) | (unit == 0):
        for first in range(0, batch[0], _REQUESTS):
            requests, blocks, part = _blocks(kv_lens, first, batch, BLOCK_KEYS)
            own = _num_pieces(blocks, part, size)
            begin = num + tl.cumsum(own, axis=0) - own
            here = (unit >= begin) & (unit < begin + own)
            request += tl.sum(tl.where(here, requests, 0), axis=0)
            split += tl.sum(tl.where(here, unit - begin, 0), axis=0)
            num_parts += tl.sum(tl.where(here, own, 0), axis=0)
            num += tl.sum(own, axis=0)
            tl.store(pieces + requests, own, mask=requests < tl.where(unit == 0, batch[0], 0))
    return request, split, num_parts


@triton.jit
def share_of(unit, kv_lens, batch, pieces, OF_PIECES: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The share of a unit's programs: a request, and which of how many parts of it; nothing, of no parts. OF_PIECES:
    whether units are pieces, or what is not divided and parts, without the requests that have pieces. batch: requests,
    those that are not divided, the first ones, parts of the others, and most pieces. pieces: how many each request has,
    written by the launch of pieces, which is first.
    """
    bs, num_whole, num_splits, most = batch
    divided = tl.maximum(bs - num_whole, 1)
    split = tl.maximum(unit - num_whole, 0) // divided
    request = unit - split * divided
    num_parts = tl.where(request < num_whole, 1, num_splits)
    if OF_PIECES:
        request, split, num_parts = _piece(unit, kv_lens, batch, pieces, BLOCK_KEYS)
    elif most > 0:
        num_parts = tl.where(tl.load(pieces + request) > 0, 0, num_parts)
    return request, split, num_parts


@triton.jit
def rows_before(unit, split, num_splits, split_stride, rows, OF_PIECES: tl.constexpr):
    """Rows times heads from the beginning of all parts to those of one, less its request's first. split_stride: from a
    split to the next; 0 if there is one. rows: the request's first, its rows at most, heads. Pieces follow the splits.
    """
    first, width, num_heads = rows
    before = split.to(tl.int64) * split_stride
    if OF_PIECES:
        before = num_splits.to(tl.int64) * split_stride + (unit.to(tl.int64) * width - first) * num_heads
    return before


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
