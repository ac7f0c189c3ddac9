"""FlashMLA's share-out as one Triton launch of one program: `schedule_operators.share_out`.

Where a request begins depends on all before it, so one loop goes over requests; a step of it is a few additions, and
what it needs is loaded a step ahead. What requests and parts get follows from that for all of them at once. FlashMLA's
own scheduler goes over requests and parts on one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.schedule_operators import BLOCK_KEYS, OVERHEAD
from attn_backends.kernels.triton_launch import Launch, unspecialized

_REQUESTS, _PIECES = 32, 32  # of a block
_WARPS = 4


@triton.jit
def _blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS: tl.constexpr):
    """Blocks of keys of requests, 0 from n on."""
    live = request < n
    blocks = tl.cdiv(tl.load(lens + request * lens_stride, mask=live, other=0).to(tl.int32), KEYS)
    if more_lens is not None:
        more = tl.load(more_lens + request * more_stride, mask=live, other=0).to(tl.int32)
        blocks += tl.cdiv(tl.minimum(more, most), KEYS)
    return blocks


@triton.jit
def _total(lens, more_lens, lens_stride, more_stride, n, most, KEYS: tl.constexpr, REQUESTS: tl.constexpr):
    """Blocks of keys of all requests, at least one of each."""
    total = tl.zeros((REQUESTS,), dtype=tl.int32)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        blocks = _blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS)
        total += tl.where(request < n, tl.maximum(blocks, 1), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _mark(lens, more_lens, marks, lens_stride, more_stride, n, most, size, KEYS: tl.constexpr, COST: tl.constexpr):
    """Write where each request begins: the part, and its blocks in there, 0 if it begins the next one. Returns the last
    part in use.
    """
    part, room, reciprocal = 0, size + COST, 1.0 / size
    coming = tl.maximum(_blocks(lens, more_lens, lens_stride, more_stride, n, most, 0, KEYS), 1)
    for request in range(0, n):
        blocks = coming
        coming = tl.maximum(_blocks(lens, more_lens, lens_stride, more_stride, n, most, request + 1, KEYS), 1)
        fits = room >= blocks + COST
        taken = tl.where(fits, blocks, tl.maximum(room - COST, 0))
        rest = blocks - taken
        further = ((rest - 1).to(tl.float32) * reciprocal).to(tl.int32) + 1  # then made exact
        further = tl.where((further - 1) * size >= rest, further - 1, further)
        further = tl.where(further * size < rest, further + 1, further)
        tl.store(marks + 2 * request, part)
        tl.store(marks + 2 * request + 1, taken)
        room = tl.where(fits, room - blocks - COST, size - (rest - (further - 1) * size))
        part += further
    return part


@triton.jit
def _store_parts(parts, request, begun, taken, taken_next, blocks, end, pieces, n, size, PIECES: tl.constexpr):
    """Write the ends of parts that lie in a block of requests."""
    is_begun = tl.where(taken > 0, taken, size)[:, None]
    is_split = (pieces > 1).to(tl.int32)[:, None]
    is_alone, is_next_alone = (taken == 0) | (request == 0), (taken_next == 0) | (request == n - 1)
    for begin in range(0, tl.max(pieces, axis=0), PIECES):
        piece = begin + tl.arange(0, PIECES)[None, :]
        live = piece < pieces[:, None]
        row = parts + ((begun + (taken == 0).to(tl.int32))[:, None] + piece) * 8
        first = live & ((piece > 0) | is_alone[:, None])
        last = live & ((piece < pieces[:, None] - 1) | is_next_alone[:, None])
        number, shape = request[:, None] + piece * 0, piece * 0
        tl.store(row, number, mask=first)
        tl.store(row + 2, tl.where(piece > 0, is_begun + (piece - 1) * size, 0), mask=first)
        tl.store(row + 4, piece + number * 0, mask=first)
        tl.store(row + 5, is_split + shape, mask=first)
        tl.store(row + 1, number, mask=last)
        tl.store(row + 3, tl.minimum(is_begun + piece * size, end[:, None]), mask=last)
        tl.store(row + 6, is_split + shape, mask=last)
        tl.store(row + 7, number * 0, mask=last)


@unspecialized
def _share_out(
    lens,
    more_lens,
    parts,
    splits,
    marks,
    read_lens,
    lens_stride,
    more_stride,
    n,
    num_parts,
    most,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    PARTS: tl.constexpr,
    REQUESTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    num_blocks = _total(lens, more_lens, lens_stride, more_stride, n, most, KEYS, REQUESTS)
    size = tl.cdiv(num_blocks + n * COST, num_parts)
    last_part = _mark(lens, more_lens, marks, lens_stride, more_stride, n, most, size, KEYS, COST)
    tl.debug_barrier()  # the marks are there for all threads
    piece = 0
    tl.store(splits, 0)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        live = request < n
        end = _blocks(lens, more_lens, lens_stride, more_stride, n, most, request, KEYS)
        blocks = tl.maximum(end, 1)
        begun = tl.load(marks + 2 * request, mask=live, other=0)
        taken = tl.load(marks + 2 * request + 1, mask=live, other=0)
        taken_next = tl.load(marks + 2 * request + 3, mask=request < n - 1, other=0)
        pieces = tl.where(live, tl.cdiv(blocks - taken, size) + (taken > 0).to(tl.int32), 0)
        tl.store(splits + 1 + request, piece + tl.cumsum(pieces, axis=0), mask=live)
        piece += tl.sum(pieces, axis=0)
        if read_lens is not None:
            more = tl.load(more_lens + request * more_stride, mask=live, other=0).to(tl.int32)
            tl.store(read_lens + request, tl.minimum(more, most), mask=live)
        _store_parts(parts, request, begun, taken, taken_next, blocks, end, pieces, n, size, PIECES)
    part = tl.arange(0, PARTS)
    unused = (part > last_part) & (part < num_parts)
    for column in tl.static_range(8):
        value = n if column == 0 else (n - 1 if column == 1 else 0)
        tl.store(parts + part * 8 + column, tl.zeros_like(part) + value, mask=unused)


def share_out(
    lens: Tensor,
    more_lens: Tensor | None,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    read_lens: Tensor | None,
    most: int,
) -> None:
    """`schedule_operators.share_out`."""
    num_parts = parts.shape[0]
    strides = (lens.stride(0), 0 if more_lens is None else more_lens.stride(0))
    constants = (BLOCK_KEYS, OVERHEAD, triton.next_power_of_2(num_parts), _REQUESTS, _PIECES)
    launch = Launch(_share_out, lens.device, (1, 1, 1), _WARPS)
    variant = (lens.dtype, more_lens is None, read_lens is None, constants)
    outputs = (parts, splits, marks, read_lens)
    launch(variant, lens, more_lens, *outputs, *strides, lens.shape[0], num_parts, most, *constants)
