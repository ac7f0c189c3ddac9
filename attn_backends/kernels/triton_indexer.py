"""Selecting entries in Triton: scores of an indexer, and the best `topk` of each row.

Two launches for a chunk of query rows. The first writes the scores of all visible entries, a program for a block of
entries and a few rows of a request, which share the entries' keys. The second, a program for a row, finds the score of
rank `topk` bit by bit, by counting the scores that are at least as large. Then it writes, in the order of entries, the
slots of the larger scores and as many of the equal ones as are missing. So of equal scores the lower entry wins, and
the result does not depend on the run.

32 requests of one row over 8192 entries, 64 heads of 128 in bfloat16, are 67 MB of keys, 16 us of an H200's copy
bandwidth, and 4.3 GFLOP. Both launches take 56 us, with four rows per request 78 (docs/results/h200/compressed.json).
Of these the scores are 33 and 56 (timed separately, not committed). It stops at the cut, which counts a row's scores 32
times in one program: rows of more than a block read them again for each bit, and 32768 entries take 256 us (timed
apart).

Scores are float32, of products in the queries' type where the keys have it, else in float32 without TF32. A chunk has
as many rows as SCRATCH_BYTES of scores hold, and at least one of each request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.triton_launch import strided

SCRATCH_BYTES = 128 * 2**20
MAX_BLOCK = 8192  # entries that a program of the second launch holds at once
MAX_DIM = 256

_LISTS = [
    "page_table",
    "table_stride",
    "qo_indptr",
    "num_visible",
    "first_place",
    "num_places",
    "num_pages",
]  # what differs from batch to batch
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=_LISTS)
def _index_scores(
    q,
    weights,
    keys,
    page_table,
    table_stride,
    qo_indptr,
    num_visible,
    scores,
    first_place,
    num_places,
    per_page,
    num_pages,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """q, weights and keys are (pointer, strides); scores dense, [bs, places, max_entries]. first_place, num_places: of
    the chunk. per_page, num_pages: entries of a page, and pages of a request.
    """
    max_entries = num_pages * per_page
    request, place = tl.program_id(1).to(tl.int64), tl.program_id(2) * ROWS
    start, end = tl.load(qo_indptr + request), tl.load(qo_indptr + request + 1)
    first, last = (
        start + first_place + place,
        tl.minimum(start + first_place + tl.minimum(place + ROWS, num_places), end),
    )
    begin = tl.program_id(0) * BLOCK_ENTRIES
    most = 0
    if first < last:
        most = tl.load(num_visible + last - 1)  # later rows see more
    if begin < most:
        entry = begin + tl.arange(0, BLOCK_ENTRIES)
        page = tl.load(page_table + request * table_stride + entry // per_page, mask=entry < most, other=0)
        dim = tl.arange(0, BLOCK_DIM)
        key = keys[0] + page.to(tl.int64) * keys[1][0] + (entry % per_page) * keys[1][1]
        inside = (entry < most)[:, None] & (dim < DIM)[None, :]
        held = tl.load(key[:, None] + dim[None, :] * keys[1][2], mask=inside, other=0.0).to(DOT)
        for step in range(0, last - first):
            row = (first + step).to(tl.int64)
            total = tl.zeros((BLOCK_ENTRIES,), dtype=tl.float32)
            for block in tl.static_range(0, HEADS, BLOCK_HEADS):
                head = block + tl.arange(0, BLOCK_HEADS)
                q_row = q[0] + row * q[1][0] + head[None, :] * q[1][1] + dim[:, None] * q[1][2]
                queries = tl.load(q_row, mask=(head < HEADS)[None, :] & (dim < DIM)[:, None], other=0.0).to(DOT)
                weight = tl.load(weights[0] + row * weights[1][0] + head * weights[1][1], mask=head < HEADS, other=0.0)
                dots = tl.dot(held, queries, input_precision="ieee")
                total += tl.sum(tl.maximum(dots, 0.0) * weight.to(tl.float32)[None, :], axis=1)
            into = scores + (request * num_places + (row - start - first_place)) * max_entries + entry
            tl.store(into, total, mask=entry < tl.load(num_visible + row))


@triton.jit
def _ordered(scores, entry, num):
    """Bits of scores, ordered as they are; none is -0.0, for they are sums that began with 0.0."""
    bits = tl.load(scores + entry, mask=entry < num, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | (-(2**31))).to(tl.uint32, bitcast=True)


@triton.jit
def _count(first, scores, num, least, BLOCK: tl.constexpr):
    """How many scores have bits of at least so much. first: the bits of the first block."""
    count = tl.sum(((first >= least) & (tl.arange(0, BLOCK) < num)).to(tl.int32))
    for start in range(BLOCK, num, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        count += tl.sum(((_ordered(scores, entry, num) >= least) & (entry < num)).to(tl.int32))
    return count


@triton.jit
def _cut(scores, num, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the score of rank TOPK, found one after the other, and how many of the best TOPK are above it. The
    first block is loaded once; most rows have no other.
    """
    first = _ordered(scores, tl.arange(0, BLOCK), num)
    cut, bit, above = tl.full((), 0, tl.uint32), tl.full((), 2**31, tl.uint32), tl.full((), 0, tl.int32)
    for _ in range(32):
        count = _count(first, scores, num, cut | bit, BLOCK)
        cut, above = tl.where(count >= TOPK, cut | bit, cut), tl.where(count >= TOPK, above, count)
        bit = bit >> 1
    return cut, above


@triton.jit
def _slots(page_table, entry, per_page, live):
    page = tl.load(page_table + entry // per_page, mask=live, other=0)
    return page * per_page + entry % per_page


@triton.jit(do_not_specialize=_LISTS)
def _select_top(
    scores,
    page_table,
    table_stride,
    qo_indptr,
    num_visible,
    slots,
    first_place,
    num_places,
    per_page,
    num_pages,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """slots: dense, [tokens, TOPK]; the rest as `_index_scores`."""
    max_entries = num_pages * per_page
    request, place = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row = (tl.load(qo_indptr + request) + first_place + place).to(tl.int64)
    if row < tl.load(qo_indptr + request + 1):
        num = tl.load(num_visible + row)
        table = page_table + request * table_stride
        into = slots + row * TOPK
        if num <= TOPK:
            entry = tl.arange(0, BLOCK_TOPK)
            all_slots = _slots(table, entry, per_page, entry < num)
            tl.store(into + entry, tl.where(entry < num, all_slots, -1), mask=entry < TOPK)
        else:
            of_row = scores + (request * num_places + place) * max_entries
            cut, above = _cut(of_row, num, TOPK, BLOCK)
            taken, equal_before = 0, 0
            for start in range(0, num, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                bits = _ordered(of_row, entry, num)
                equal = ((bits == cut) & (entry < num)).to(tl.int32)
                rank = equal_before + tl.cumsum(equal, axis=0)
                chosen = (entry < num) & ((bits > cut) | ((equal > 0) & (rank <= TOPK - above)))
                position = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
                tl.store(into + position, _slots(table, entry, per_page, chosen), mask=chosen)
                taken += tl.sum(chosen.to(tl.int32))
                equal_before += tl.sum(equal)


def select_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    request: Tensor,
    num_visible: Tensor,
    max_query: int,
    topk: int,
) -> Tensor:
    """`sparse_operators.select_entries` for types up to 32 bits and keys of at most MAX_DIM elements. Rows of a request
    see more the later they are.
    """
    if q.shape[2] > MAX_DIM:
        raise ValueError(f"index keys of {q.shape[2]} elements, the kernel takes at most {MAX_DIM}")
    bs, max_entries = page_table.shape[0], page_table.shape[1] * keys.shape[1]
    slots = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
    places = max(1, min(max_query, SCRATCH_BYTES // (4 * max(bs * max_entries, 1))))
    scores = torch.empty(bs, places, max_entries, dtype=torch.float32, device=q.device)
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    rows = (qo_indptr.contiguous(), num_visible.contiguous())
    for first in range(0, max_query, places):
        shape = (first, places, keys.shape[1], page_table.shape[1])
        _score(q, weights, keys, table, *rows, scores, shape)
        block = min(MAX_BLOCK, max(16, triton.next_power_of_2(max_entries)))
        _select_top[(places, bs)](
            scores,
            table,
            table.stride(0),
            *rows,
            slots,
            *shape,
            TOPK=topk,
            BLOCK_TOPK=triton.next_power_of_2(topk),
            BLOCK=block,
            num_warps=16,
        )
    return slots


def _score(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    qo_indptr: Tensor,
    num_visible: Tensor,
    scores: Tensor,
    shape: tuple[int, ...],
) -> None:
    """Write the scores of a chunk of query rows."""
    dot = q.dtype if keys.dtype is q.dtype else torch.float32
    small = gpu_of(q.device).shared < 120 * 2**10
    entries, rows = 32 if dot.itemsize > 2 else 128 if small else 256, 8
    _, places, per_page, num_pages = shape
    grid = (triton.cdiv(num_pages * per_page, entries), table.shape[0], triton.cdiv(places, rows))
    _index_scores[grid](
        *strided((q, weights, keys)),
        table,
        table.stride(0),
        qo_indptr,
        num_visible,
        scores,
        *shape,
        HEADS=q.shape[1],
        DIM=q.shape[2],
        BLOCK_HEADS=min(64, max(16, triton.next_power_of_2(q.shape[1]))),
        BLOCK_DIM=max(16, triton.next_power_of_2(q.shape[2])),
        BLOCK_ENTRIES=entries,
        ROWS=rows,
        DOT=_DOT_TYPES[dot],
        num_warps=8,
    )
