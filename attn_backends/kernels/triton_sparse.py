"""Attention over a window of rows and over compressed entries in Triton, one softmax and one sink over both.

A program takes one query row, a block of its heads and a share of its keys: the window's blocks of keys first, then the
entries'. A key is read once and used twice, for scores and as value, in chunks of channels, for a block of whole keys
would not fit into registers beside the sums. Where rows and heads give too few programs for the GPU, a row's blocks are
divided into splits, by host bounds, and a second launch merges them in a fixed order. A split without blocks has no
weight. So what a row gets depends on the number of rows in the step, and not on the run.

Products are done in the queries' type where the pools are of it or of 8 bits under bfloat16, else in float32 without
TF32. Softmax and sums are float32.

128 rows over a window of 128 keys and 512 entries each, in 8-bit pages, with queries and outputs are 65 MB and 10.7
GFLOP for 64 heads, 52 MB and 2.7 GFLOP for 16. An H200 copies 4.3 TB/s and multiplies 801 TFLOP/s: at least 15 us for
64 heads and 12 for 16. Measured at a context of 4096: 78 us for 64 heads, where FlashMLA takes 56, and 69 us for 16,
where FlashMLA takes 62 and computes 64 (docs/results/h200/kernels_dsv4.json, summed up in docs/kernels.md).

With four rows and more of 32 requests it stops at 151 to 173 TFLOP/s for 64 heads, 0.64 to 0.73 of FlashMLA's speed,
and at 0.8 to 1.0 TB/s for 16. Each block of keys is converted from bytes before its products, by the same warps. The
next block is not prefetched, because 128 keys of 512 elements and 64 heads' queries fill the shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels import triton_pages
from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.fp8_pages import GROUP
from attn_backends.kernels.torch_compressed import Keys

MAX_DIM = 1024
MAX_SPLITS = 16
_SPLITS = tl.constexpr(MAX_SPLITS)

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_TINIEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_SLOTS = [f"{kind}_{name}" for kind in ("row", "entry") for name in ("slots", "lens", "stride", "width")]
_VARIED = [*_SLOTS, "lse", "num_tokens", "num_splits"]  # what differs from batch to batch


class Blocks(NamedTuple):
    """Tile sizes of a program, and its compile options."""

    heads: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _row_of_slots(slots, lens, stride, width, token):
    """Where the slots of a row begin, and how many there are."""
    return slots + token * stride, tl.minimum(tl.load(lens + token), width).to(tl.int32)


@triton.jit
def _slots(first, num, start, BLOCK_KEYS: tl.constexpr):
    """A block of slots, -1 after the last and before the first."""
    key = start + tl.arange(0, BLOCK_KEYS)
    return tl.load(first + key, mask=(key >= 0) & (key < num), other=-1)


@triton.jit
def _queries(q, token, head, num_heads, DIM: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr):
    """A row's queries [heads, CHUNK] by chunks, and as many sums that are 0."""
    row = q[0] + token * q[1][0] + head[:, None].to(tl.int64) * q[1][1]
    queries, sums = (), ()
    for start in tl.static_range(0, DIM, CHUNK):
        dim = start + tl.arange(0, CHUNK)
        real = (head < num_heads)[:, None] & (dim < DIM)[None, :]
        loaded = tl.load(row + dim[None, :] * q[1][2], mask=real, other=0.0)
        queries += (loaded.to(DOT),)  # type: ignore[assignment]
        sums += (tl.zeros(loaded.shape, dtype=tl.float32),)  # type: ignore[assignment]
    return queries, sums


@triton.jit
def _scores(queries, keys, live, score_scale):
    """Of queries and keys by chunks [heads, keys], -inf where a key is not live."""
    scores = tl.zeros((queries[0].shape[0], keys[0].shape[0]), dtype=tl.float32)
    for chunk in tl.static_range(len(queries)):
        scores = tl.dot(queries[chunk], tl.trans(keys[chunk]), scores, input_precision="ieee")
    return tl.where(live[None, :], scores * score_scale, float("-inf"))


@triton.jit
def _joined(sums, kept, weights, keys):
    """Sums by chunks [heads, elements], times what is kept of them, with the weighted keys added."""
    joined = ()
    for chunk in tl.static_range(len(sums)):
        joined += (tl.dot(weights, keys[chunk], sums[chunk] * kept[:, None], input_precision="ieee"),)  # type: ignore[assignment]
    return joined


@triton.jit
def _store(sums, peak, total, sinks, out, lse, row, head, num_heads, DIM: tl.constexpr, CHUNK: tl.constexpr):
    """Write what a program found. row: of head 0 in `out` and `lse`. sinks: None where they are not due yet."""
    real = head < num_heads
    tl.store(lse + row + head, (peak + tl.log2(total)) * _LN_2, mask=real)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        total += tl.exp2(sink / _LN_2 - peak)
    norm = 1.0 / tl.maximum(total, _TINIEST)
    for chunk in tl.static_range(len(sums)):
        dim = chunk * CHUNK + tl.arange(0, CHUNK)
        place = out + (row + head)[:, None] * DIM + dim[None, :]
        given = (sums[chunk] * norm[:, None]).to(out.dtype.element_ty)
        tl.store(place, given, mask=real[:, None] & (dim < DIM)[None, :])


@triton.jit(do_not_specialize=_VARIED)
def _sparse_attention(
    q,
    row_pool,
    row_slots,
    row_lens,
    row_stride,
    row_width,
    entry_pool,
    entry_slots,
    entry_lens,
    entry_stride,
    entry_width,
    sinks,
    out,
    lse,
    num_tokens,
    num_splits,
    num_heads,
    score_scale,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):
    """q: (pointer, strides). row_pool to row_width: a `_source`; those of entries: another or None. out, lse: dense."""
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    queries, sums = _queries(q, token, head, num_heads, DIM, CHUNK, DOT)
    pages, per_page, page_stride, pool_stride, stride = row_pool
    row_slots, num_rows = _row_of_slots(row_slots, row_lens, row_stride, row_width, token)
    row_blocks = tl.cdiv(num_rows, BLOCK_KEYS)
    num_blocks = row_blocks
    has_entries: tl.constexpr = entry_slots is not None
    if has_entries:
        entry_pages, entries_per_page, entry_page_stride, entry_pool_stride, _ = entry_pool
        entry_slots, num_entries = _row_of_slots(entry_slots, entry_lens, entry_stride, entry_width, token)
        num_blocks += tl.cdiv(num_entries, BLOCK_KEYS)
    share = tl.cdiv(num_blocks, num_splits)
    peak, total = tl.full((BLOCK_HEADS,), _LOWEST, tl.float32), tl.zeros((BLOCK_HEADS,), dtype=tl.float32)
    for block in range(split * share, tl.minimum((split + 1) * share, num_blocks)):
        slot = _slots(row_slots, num_rows, block * BLOCK_KEYS, BLOCK_KEYS)
        begin, scales = triton_pages.row_pointers(pages, per_page, page_stride, pool_stride, tl.maximum(slot, 0))
        if has_entries:
            entry = _slots(entry_slots, num_entries, (block - row_blocks) * BLOCK_KEYS, BLOCK_KEYS)
            of_entry = triton_pages.row_pointers(
                entry_pages, entries_per_page, entry_page_stride, entry_pool_stride, tl.maximum(entry, 0)
            )
            is_row, slot = block < row_blocks, tl.maximum(slot, entry)
            begin, scales = tl.where(is_row, begin, of_entry[0]), tl.where(is_row, scales, of_entry[1])
        keys = ()  # all before the first product, so that they wait for shared memory once
        for chunk in tl.static_range(len(queries)):
            keys += (triton_pages.read_chunk(begin, scales, stride, slot >= 0, chunk, CHUNK, DIM, DOT, HAS_E4M3),)  # type: ignore[assignment]
        scores = _scores(queries, keys, slot >= 0, score_scale)
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights, kept = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        total, peak = total * kept + tl.sum(weights, axis=1), higher
        sums = _joined(sums, kept, weights.to(DOT), keys)
    _store(sums, peak, total, sinks, out, lse, (split * num_tokens + token) * num_heads, head, num_heads, DIM, CHUNK)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge(
    parts,
    part_lse,
    sinks,
    out,
    lse,
    num_rows,
    num_splits,
    num_heads,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Join the splits of one row's head, in a fixed order. parts: [splits, rows * heads, dim], part_lse: likewise."""
    row = tl.program_id(0).to(tl.int64)
    dim, split = tl.arange(0, BLOCK_DIM), tl.arange(0, _SPLITS)
    place, live = split * num_rows + row, split < num_splits
    given = tl.load(part_lse + place, mask=live, other=float("-inf"))
    peak = tl.maximum(tl.max(given, axis=0), _LOWEST)
    weights = tl.exp(given - peak)
    total = tl.sum(weights, axis=0)
    real = live[:, None] & (dim < DIM)[None, :]
    values = tl.load(parts + place[:, None] * DIM + dim[None, :], mask=real, other=0.0)
    sums = tl.sum(weights[:, None] * values, axis=0)
    tl.store(lse + row, peak + tl.log(total))
    if sinks is not None:
        total += tl.exp(tl.load(sinks + row % num_heads).to(tl.float32) - peak)
    sums = sums / tl.maximum(total, _TINIEST)
    tl.store(out + row * DIM + dim, sums.to(out.dtype.element_ty), mask=dim < DIM)


def sparse_attention(q: Tensor, sources: Sequence[Keys], scale: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """`sparse_operators.sparse_attention` for types up to 32 bits and rows of at most MAX_DIM elements."""
    num_tokens, num_heads, dim = q.shape
    if dim > MAX_DIM:
        raise ValueError(f"rows of {dim} elements, the kernel takes at most {MAX_DIM}")
    dot = _dot_type(q.dtype, {source.pages.dtype for source in sources})
    gpu = gpu_of(q.device)
    blocks = choose_blocks(num_heads, dot, gpu.shared)
    num_keys = sum(source.slots.shape[1] for source in sources)
    splits = num_splits(num_tokens * triton.cdiv(num_heads, blocks.heads), blocks, num_keys, gpu.num_processors)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    into = (
        (out, lse)
        if splits == 1
        else (q.new_empty(splits, *q.shape, dtype=torch.float32), lse.new_empty(splits, *lse.shape))
    )
    sinks = None if sinks is None else sinks.contiguous()
    entries = _source(sources[1]) if len(sources) > 1 else (None,) * 5
    _sparse_attention[(num_tokens, triton.cdiv(num_heads, blocks.heads), splits)](
        (q, q.stride()),
        *_source(sources[0]),
        *entries,
        sinks if splits == 1 else None,
        *into,
        num_tokens,
        splits,
        num_heads,
        scale * _LOG2_E,
        DIM=dim,
        CHUNK=min(2 * GROUP, max(16, triton.next_power_of_2(dim))),
        BLOCK_HEADS=blocks.heads,
        BLOCK_KEYS=blocks.keys,
        DOT=_DOT_TYPES[dot],
        HAS_E4M3=gpu.has_e4m3,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    if splits > 1:
        merge(into, sinks, (out, lse))
    return out, lse


def merge(parts: tuple[Tensor, Tensor], sinks: Tensor | None, into: tuple[Tensor, Tensor]) -> None:
    """Join up to MAX_SPLITS splits in a fixed order. parts: outputs [splits, num_tokens, num_heads, dim] and their
    log-sum-exps. sinks: [num_heads], dense. into: out and lse, dense, as of `sparse_attention`.
    """
    splits, num_tokens, num_heads, dim = parts[0].shape
    num_rows = num_tokens * num_heads
    _merge[(num_rows,)](
        *parts, sinks, *into, num_rows, splits, num_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim)
    )


def _source(keys: Keys) -> tuple[Any, ...]:
    """A source as kernels take it: pool, slots, lens, stride and width of slots."""
    slots = keys.slots if keys.slots.stride(1) == 1 else keys.slots.contiguous()
    return triton_pages.pool(keys.pages, keys.num_rows), slots, keys.lens.contiguous(), slots.stride(0), slots.shape[1]


def _dot_type(q: torch.dtype, pools: set[torch.dtype]) -> torch.dtype:
    """The type of matrix products: one that holds every element of the queries and of the pools."""
    exact = pools <= {q} or (q is torch.bfloat16 and pools <= {q, torch.uint8})
    return q if exact else torch.float32


def choose_blocks(num_heads: int, dot: torch.dtype, shared_memory: int) -> Blocks:
    """Blocks that suit the GPU's matrix units and fit into its shared memory, in bytes of a program."""
    if dot.itemsize > 2:
        return Blocks(16, 16, 4, 1)
    if shared_memory < 120 * 2**10:
        return Blocks(16, 16, 4, 2)
    if num_heads <= 16:
        return Blocks(16, 32, 4, 3)
    return Blocks(64, 128, 8, 1) if shared_memory >= 200 * 2**10 else Blocks(64, 32, 8, 2)


def num_splits(num_programs: int, blocks: Blocks, num_keys: int, num_processors: int) -> int:
    """Into how many a row's blocks of keys are divided: so many that each multiprocessor has a program of 64 heads, or
    two of 16, and no more than have blocks.
    """
    num_blocks = max(triton.cdiv(num_keys, blocks.keys), 1)
    wanted = num_processors * (1 if blocks.heads > 16 else 2) // max(num_programs, 1)
    share = triton.cdiv(num_blocks, max(1, min(wanted, num_blocks, MAX_SPLITS)))
    return triton.cdiv(num_blocks, share)
