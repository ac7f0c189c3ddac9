"""`triton_pieces.share_of` in Gluon: the shares of a batch, where a request is much longer than the others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_backends.kernels.triton_pieces import LEAST_BLOCKS

_KEYS = gl.constexpr(128)  # of a block
_LEAST = gl.constexpr(LEAST_BLOCKS)
_REQUESTS = gl.constexpr(256)  # that are looked at together
_LAYOUT = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _blocks(kv_lens, first, batch):
    """Some requests, their blocks of keys, and those of each one's largest part."""
    bs, num_whole, num_splits, _ = batch
    request = first + gl.arange(0, _REQUESTS, layout=_LAYOUT)
    blocks = gl.cdiv(gl.load(kv_lens + request, mask=request < bs, other=0), _KEYS)
    return request, blocks, gl.cdiv(blocks, gl.where(request < num_whole, 1, num_splits))


@gluon.jit
def _size(kv_lens, batch):
    """Blocks of a piece at least, and of the largest part of all requests."""
    total, largest = batch[0] * 0, batch[0] * 0
    for first in range(0, batch[0], _REQUESTS):
        _, blocks, part = _blocks(kv_lens, first, batch)
        total, largest = total + gl.sum(blocks, 0), gl.maximum(largest, gl.max(part, 0))
    return gl.maximum(gl.cdiv(total, batch[3]), _LEAST), largest


@gluon.jit
def _num_pieces(blocks, part, size):
    """Pieces of requests, 0 of those that are not long."""
    return gl.where(part >= 2 * size, blocks // size, 0)


@gluon.jit
def share_of(unit, kv_lens, batch, pieces, is_first):
    """As of `triton_pieces`, of blocks of 128 keys."""
    bs, num_whole, num_splits, most = batch
    request, split, num_parts, num = unit * 0, unit * 0, unit * 0, unit * 0
    piece = num - 1
    size = num
    if most > 0:
        size, largest = _size(kv_lens, batch)
        if largest >= 2 * size:
            for first in range(0, bs, _REQUESTS):
                requests, blocks, part = _blocks(kv_lens, first, batch)
                own = _num_pieces(blocks, part, size)
                begin = num + gl.associative_scan(own, 0, _sum) - own
                here = (unit >= begin) & (unit < begin + own)
                request += gl.sum(gl.where(here, requests, 0), 0)
                split += gl.sum(gl.where(here, unit - begin, 0), 0)
                num_parts += gl.sum(gl.where(here, own, 0), 0)
                num += gl.sum(own, 0)
    if unit < num:
        piece = unit
    else:
        unit -= num
        if unit < num_whole + (bs - num_whole) * num_splits:
            divided = gl.maximum(bs - num_whole, 1)
            split = gl.maximum(unit - num_whole, 0) // divided
            request = unit - split * divided
            num_parts = gl.where(request < num_whole, 1, num_splits)
            if most > 0:
                blocks = gl.cdiv(gl.load(kv_lens + request), _KEYS)
                own = _num_pieces(blocks, gl.cdiv(blocks, num_parts), size)
                if is_first & (split == 0):
                    gl.store(pieces + request, own)
                num_parts = gl.where(own > 0, 0, num_parts)
    return request, split, num_parts, piece
