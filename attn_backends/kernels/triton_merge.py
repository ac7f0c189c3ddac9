"""Merging the parts that the keys of a request were divided into, by their log-sum-exps, as one Triton launch.

A program takes a block of values of one row of one head, and of pieces one such block after the other. Parts are added
in their order, so the same sizes give the same bits; a part without keys was not written and is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.triton_launch import LISTS, Call, DirectLaunch
from attn_backends.kernels.triton_pieces import MERGERS, long_request, num_long
from attn_backends.kernels.triton_windows import sink_weights, window_start

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_TINIEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_BLOCK = 4096  # elements that a program holds at once, at most
_MERGED = (2, 8, 32)  # of so many parts: a variant for two, one for few, and one for more
_SLICE = 64  # elements of a row of pieces that a program takes


@triton.jit
def query_rows(indptr, request, width):
    """First query row of a request, and how many it has. indptr: None where every request has `width`."""
    if indptr is None:
        first, num = request * width, width
    else:
        first = tl.load(indptr + request).to(tl.int64)
        num = (tl.load(indptr + request + 1) - first).to(tl.int32)
    return first, num


@triton.jit
def part_of(split, first, num_keys, num_splits, BLOCK_KEYS: tl.constexpr):
    """First key of a part and the one past its last, whole blocks of them, and how many parts have keys. first: of all
    parts.
    """
    size = tl.maximum(tl.cdiv(tl.cdiv(num_keys - first, num_splits), BLOCK_KEYS), 1) * BLOCK_KEYS
    start = first + split * size
    return start, tl.minimum(start + size, num_keys), tl.cdiv(num_keys - first, size)


@triton.jit
def _join(
    parts,
    into,
    sinks,
    own,
    stride,
    num_parts,
    flat,
    head,
    block,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Join the parts of a block of a row of a head. parts, into: outputs and log-sum-exps. own: the row in the first
    part. stride: rows from a part to the next. flat: the row that is written. MERGED: parts that are read at once.
    """
    partial_out, partial_lse = parts
    out, lse = into
    peak, total = tl.full((), _LOWEST, tl.float32), tl.full((), 0.0, tl.float32)
    dim = block * BLOCK + tl.arange(0, BLOCK)
    joined = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, num_parts, MERGED):
        part = begin + tl.arange(0, MERGED)
        row, live = own + part.to(tl.int64) * stride, part < num_parts
        found = tl.load(partial_lse + row, mask=live, other=float("-inf"))
        values = tl.load(
            partial_out + row[:, None] * V_DIM + dim[None, :], mask=live[:, None] & (dim < V_DIM)[None, :], other=0.0
        )
        higher = tl.maximum(tl.max(found, axis=0), peak)
        fading, weight = tl.exp(peak - higher), tl.exp(found - higher)
        total = total * fading + tl.sum(weight, axis=0)
        joined = joined * fading + tl.sum(weight[:, None] * values, axis=0)
        peak = higher
    tl.store(lse + flat, peak + tl.log(total), mask=block == 0)
    if sinks is not None:
        total += sink_weights(sinks, head, True, peak)
    result = joined / tl.maximum(total, _TINIEST)
    tl.store(out + flat * V_DIM + dim, result.to(out.dtype.element_ty), mask=dim < V_DIM)


_SHARES = ("bs", "num_whole", "num_splits", "split_stride", "most", "num_mergers")


@triton.jit(do_not_specialize=[*LISTS, "partial_lse", "lse", "pieces", "width", *_SHARES])
def _merge(
    partial_out,
    partial_lse,
    query_indptr,
    kv_lens,
    out,
    lse,
    pieces,
    width,
    num_heads,
    bs,
    num_whole,
    num_splits,
    split_stride,
    most,
    num_mergers,
    window,
    drafted,
    sinks,
    CAUSAL: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    MERGED: tl.constexpr,
    SLICE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Programs that join pieces come first, each a slice of a row, because pieces are many. Then come those of the rows
    of divided requests. What does not follow from each other is loaded at once: rows are too few for waits to overlap.
    """
    program, rows = tl.program_id(0), width * num_heads
    parts, into = (partial_out, partial_lse), (out, lse)
    if program < num_mergers:
        SLICES: tl.constexpr = (V_DIM + SLICE - 1) // SLICE
        for work in range(program, num_long(pieces, bs) * rows * SLICES, num_mergers):
            request, num, piece = long_request(pieces, bs, work // SLICES // rows)
            first, num_rows = query_rows(query_indptr, request.to(tl.int64), width)
            place = work // SLICES % rows
            if place < num_rows * num_heads:
                _, _, num_parts = part_of(0, 0, tl.load(kv_lens + request), num, BLOCK_KEYS)
                own = num_splits * split_stride + piece.to(tl.int64) * rows + place
                given = (rows, num_parts, first * num_heads + place, place % num_heads, work % SLICES)
                _join(parts, into, sinks, own, *given, V_DIM, SLICE, PIECES)
    else:
        BLOCKS: tl.constexpr = (V_DIM + BLOCK_V_DIM - 1) // BLOCK_V_DIM
        block, row = (program - num_mergers) % BLOCKS, (program - num_mergers) // BLOCKS
        node, request = row // num_heads % width, (num_whole + row // num_heads // width).to(tl.int64)
        first, num_rows = query_rows(query_indptr, request, width)
        flat = (first + node) * num_heads + row % num_heads
        own = flat - query_rows(query_indptr, num_whole, width)[0] * num_heads
        num, num_keys = tl.load(pieces + request) * (most > 0), tl.load(kv_lens + request)
        if (node < num_rows) & (num == 0):
            start = window_start(num_keys, num_rows, window, drafted, CAUSAL, BLOCK_KEYS)
            _, _, num_parts = part_of(0, start, num_keys, num_splits, BLOCK_KEYS)
            given = (split_stride.to(tl.int64), num_parts, flat, row % num_heads, block)
            _join(parts, into, sinks, own, *given, V_DIM, BLOCK_V_DIM, MERGED)


class Parts(NamedTuple):
    """Attention's results in parts. out, lse: float32 scratch. num_whole: requests that are not divided, the
    first ones. num_splits: parts of the others. split_stride: rows times heads from a split to the next, 0 if there is
    one. most: pieces that there may be. pieces: [bs] int32, or more, their numbers as written by `deal_out`.
    """

    out: Tensor
    lse: Tensor
    num_whole: int
    num_splits: int
    split_stride: int
    most: int
    pieces: Tensor


def merge(
    parts: Parts,
    query_indptr: Tensor | None,
    kv_lens: Tensor,
    merged: tuple[Tensor, Tensor],
    max_query: int,
    block_keys: int,
    causal: bool,
    extras: tuple[int | None, Tensor | None, Tensor | None],
) -> None:
    """Write out [num_tokens, num_heads, v_dim] and natural lse [num_tokens, num_heads] of what parts hold of them, none
    with a sink. query_indptr, max_query, causal: as of `triton_decode`. block_keys: keys of a block, which the parts
    are made of. extras: window, drafted and dense sinks, as of `triton_decode`.
    """
    out, lse = merged
    bs, num_heads, v_dim = kv_lens.shape[0], lse.shape[1], out.shape[2]
    window, drafted, sinks = extras
    num_divided = (bs - parts.num_whole) * max_query * num_heads if parts.num_splits > 1 else 0
    by_row = parts.num_splits > 1 and parts.num_whole == 0
    num_mergers = (1 if by_row else MERGERS) * gpu_of(out.device).num_processors if parts.most else 0
    tensors = (parts.out, parts.lse, query_indptr, kv_lens, out, lse, parts.pieces, drafted, sinks)
    shares = (bs, parts.num_whole, parts.num_splits, parts.split_stride, parts.most, num_mergers)
    _launch(tensors, (max_query, num_heads, *shares), num_divided, v_dim, block_keys, causal, window)


def _call(
    tensors: Sequence[Tensor | None],
    shape: tuple[int, ...],
    num_divided: int,
    v_dim: int,
    block_keys: int,
    causal: bool,
    window: int | None,
) -> Call:
    """shape: the numbers that the kernel takes. num_divided: rows of divided requests, of all heads.

    Of two parts a multiprocessor holds 16 programs: all rows of 128 requests of 16 heads are on an H200 at once.
    """
    num_splits, num_mergers = shape[4], shape[-1]
    merged_at_once = next(parts for parts in _MERGED if parts >= num_splits or parts == _MERGED[-1])
    block_dim = min(triton.next_power_of_2(v_dim), _BLOCK // merged_at_once)
    constants = {"V_DIM": v_dim, "BLOCK_V_DIM": block_dim, "MERGED": merged_at_once}
    options = {"num_warps": 2, "maxnreg": 64} if merged_at_once == 2 else {"num_warps": 4}
    constants |= {"SLICE": min(_SLICE, block_dim), "PIECES": 4 * options["num_warps"]}
    constants |= {"BLOCK_KEYS": block_keys, "CAUSAL": causal}
    *given, drafted, sinks = tensors
    arguments = (*given, *shape, window, drafted, sinks)
    grid = (num_mergers + num_divided * triton.cdiv(v_dim, block_dim),)
    return Call(grid, arguments, constants | options)


_launch = DirectLaunch(_merge, _call)
