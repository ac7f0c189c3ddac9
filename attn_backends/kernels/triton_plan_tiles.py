"""The plan of a step, and FlashAttention-3's scheduler metadata with it, as one Triton launch.

One program more for each forward than the plan has (`triton_plan`) writes the words, by rows and lengths that it finds
itself, as the requests' programs do: none waits for another. The integers are those of the vendor's own
`prepare_varlen_num_blocks` (hopper/flash_prepare_scheduler.cu), whose cost for a tile and whose rounding they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels import triton_plan
from attn_backends.kernels.plan_operators import StepInputs
from attn_backends.kernels.tile_sizes import TileSizes
from attn_backends.kernels.triton_launch import Launch, Prepared, opaque, unspecialized
from attn_backends.kernels.triton_plan import plan_request
from attn_backends.kernels.triton_requests import cut_of, number, requests_at, visible_keys
from attn_backends.kernels.triton_step import arguments_of

_REQUESTS = 256  # of a block


@triton.jit
def _rows_and_blocks(
    seq_lens, num_real, given_starts, rows, widths, cut, step, bound, tiles, request, forward, num_longer
):
    """Query rows of requests, as many as tiles count, and blocks of keys; 0 from `bs` on. The last result, and
    num_longer: as of `requests_at`.
    """
    source = (seq_lens, num_real, given_starts, rows, widths, cut, step, bound)
    real, committed, num_rows, num_longer = requests_at(*source, request, num_longer)
    keys = visible_keys(committed, real, num_rows, step, request, forward)
    return num_rows * number(tiles.pack), tl.cdiv(keys, number(tiles.keys)), num_longer


@triton.jit
def _heads_at_once(blocks, tiles):
    """Heads whose keys the L2 cache holds beside each other."""
    most = number(tiles.cached_blocks)
    heads = tl.where(blocks * 2 <= most, 2, 1)
    heads = tl.where(blocks * 4 <= most, 4, heads)
    heads = tl.where(blocks * 8 <= most, 8, heads)
    heads = tl.where(blocks * 16 <= most, 16, heads)
    return tl.minimum(heads * number(tiles.heads_a_key), number(tiles.heads))


@triton.jit
def _write_words(
    seq_lens,
    num_real,
    given_starts,
    rows,
    widths,
    bound,
    words,
    step,
    tiles,
    forward,
    REQUESTS: tl.constexpr,
):
    """The words of a forward: kinds of them one after the other, a run of `stride` each, then the counter of tiles."""
    n, stride, total = number(step.bs), number(tiles.stride), tl.zeros((REQUESTS,), dtype=tl.int32)
    cut = cut_of(seq_lens, num_real, rows, widths, step, bound, 0, REQUESTS)
    of_step, longer = (seq_lens, num_real, given_starts, rows, widths, cut, step, bound, tiles), tl.zeros((), tl.int32)
    for begin in range(0, n, REQUESTS):
        num_rows, blocks, longer = _rows_and_blocks(*of_step, begin + tl.arange(0, REQUESTS), forward, longer)
        total += tl.cdiv(num_rows, number(tiles.rows)) * blocks
    cost = tl.sum(total, axis=0).to(tl.float32) * 1.1 * number(tiles.heads).to(tl.float32)
    share = tl.maximum(tl.ceil(tl.div_rn(cost, number(tiles.processors).to(tl.float32))).to(tl.int32), 1)
    longer = tl.zeros((), tl.int32)
    for begin in range(0, n, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        num_rows, blocks, longer = _rows_and_blocks(*of_step, request, forward, longer)
        splits = tl.maximum(tl.minimum(tl.cdiv(blocks, share), number(tiles.most_splits)), 1)
        into = words + request
        tl.store(into, num_rows, mask=request < n)
        if number(tiles.has_splits):
            into += stride
            tl.store(into, splits, mask=request < n)
        if number(tiles.has_heads):
            into += stride
            tl.store(into, _heads_at_once(tl.maximum(tl.cdiv(blocks, splits), 1), tiles), mask=request < n)
    tl.store(words + (1 + number(tiles.has_splits) + number(tiles.has_heads)) * stride, 0)


@unspecialized
def _plan_and_split(
    seq_lens,
    num_real,
    given_starts,
    out_cache_loc,
    table,
    rows,
    tree_mask,
    widths,
    captured,
    bound,
    starts,
    page_starts,
    lens,
    pages,
    write_slots,
    words,
    words_stride,
    step,
    sizes,
    tiles,
    PAGES: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """A request, or the ends; after these, the words of a forward each."""
    forward = tl.program_id(0) - number(step.bs) - 1
    if forward < 0:
        given = (seq_lens, num_real, given_starts, out_cache_loc, table, rows, tree_mask, widths, captured, bound)
        plan_request(*given, starts, page_starts, lens, pages, write_slots, step, sizes, PAGES, REQUESTS)
    elif tl.program_id(1) == 0:
        of_step, into = (seq_lens, num_real, given_starts, rows, widths, bound), words + forward * words_stride
        _write_words(*of_step, into, step, tiles, forward, REQUESTS)


def plan_and_split(
    inputs: StepInputs, outputs: Sequence[Tensor], words: Tensor, tiles: TileSizes, *counts: int
) -> Prepared:
    """The launch. outputs: starts, page_starts, lens, pages and write_slots, as of `triton_plan.plan_pages`, as counts
    are. words: of all forwards, as of `plan_operators.PagePlanner.split_tiles`.
    """
    _, _, lens, pages, write_slots = outputs
    (given, variant), n = arguments_of(inputs), lens.shape[1]
    sizes = triton_plan.sizes_of(inputs, lens, pages, write_slots, (), *counts)
    launch = _launch(lens.device, (n + 1 + lens.shape[0], triton_plan.num_parts(n + 1, counts[-1]), 1))
    constants = (triton_plan.BLOCK_PAGES, _REQUESTS)
    written = (*outputs, words, words.stride(0), *sizes, opaque(tiles))
    return Prepared(launch, (*variant, *constants), (*given, *written, *constants))


@cache
def _launch(device: torch.device, grid: tuple[int, int, int]) -> Launch:
    return Launch(_plan_and_split, device, grid)
