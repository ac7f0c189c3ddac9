"""The plan of a step in CSR, and FlashInfer's work lists with it, as one Triton launch.

One program more than the plan has (`triton_plan`) writes the lists (`triton_work`), by rows and lengths that it finds
itself, as the requests' programs do: none waits for another.
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
from attn_backends.kernels.triton_launch import Launch, Prepared, opaque, unspecialized
from attn_backends.kernels.triton_plan import plan_request
from attn_backends.kernels.triton_requests import cut_of, number, requests_at, visible_keys
from attn_backends.kernels.triton_step import arguments_of
from attn_backends.kernels.triton_work import constants_of, num_warps, sizes_of, write_lists
from attn_backends.kernels.work_operators import WorkLists


@triton.jit
def _write_rows(
    seq_lens,
    num_real,
    given_starts,
    rows,
    widths,
    bound,
    starts,
    page_starts,
    lens,
    step,
    sizes,
    BLOCK: tl.constexpr,
):
    """Rows and lengths of all requests, by one program."""
    n, row, longer = number(step.bs), tl.zeros((), dtype=tl.int32), tl.zeros((), dtype=tl.int32)
    cut = cut_of(seq_lens, num_real, rows, widths, step, bound, 0, BLOCK)
    source = (seq_lens, num_real, given_starts, rows, widths, cut, step, bound)
    for begin in range(0, n + 1, BLOCK):
        request = begin + tl.arange(0, BLOCK)
        real, committed, num_rows, longer = requests_at(*source, request, longer)
        tl.store(lens + request, visible_keys(committed, real, num_rows, step, request, 0), mask=request < n)
        tl.store(starts + request, row + tl.cumsum(num_rows, axis=0) - num_rows, mask=request <= n)
        row += tl.sum(num_rows, axis=0)
        tl.store(page_starts + request, request * number(sizes.pages_stride), mask=request <= n)


@unspecialized
def _plan_and_list(
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
    items,
    merges,
    work_indptr,
    step,
    sizes,
    lists,
    PAGES: tl.constexpr,
    SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    COST: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A request, or the ends; in the last program, the lists."""
    if tl.program_id(0) <= number(step.bs):
        given = (seq_lens, num_real, given_starts, out_cache_loc, table, rows, tree_mask, widths, captured, bound)
        plan_request(*given, starts, page_starts, lens, pages, write_slots, step, sizes, PAGES, SLOTS)
    elif tl.program_id(1) == 0:
        of_step = (seq_lens, num_real, given_starts, rows, widths, bound)
        _write_rows(*of_step, starts, page_starts, lens, step, sizes, SLOTS)
        tl.debug_barrier()  # they are there for all threads
        n, slots, steps = number(lists.n), number(lists.slots), number(lists.steps)
        batch = (starts, page_starts, lens, n, slots, steps, number(lists.heads), number(lists.spare_rows))
        into = (items, merges, work_indptr)
        strides = (number(lists.item_stride), number(lists.merge_stride), number(lists.num_clusters))
        write_lists(batch, *into, *strides, SIZE, CAUSAL, KEYS, COST, SLOTS, IS_BLOCK, BLOCKS)


def plan_and_list(
    inputs: StepInputs, outputs: Sequence[Tensor], lists: WorkLists, listed: Sequence[int], *counts: int
) -> Prepared:
    """The launch. outputs: starts, page_starts, lens of one forward, pages and write_slots, as of
    `triton_plan.plan_pages`, as counts are. listed: num_tokens, num_heads and causal of `work_operators.list_work`.
    """
    (_, _, lens, pages, write_slots), (num_tokens, num_heads, causal) = outputs, listed
    (given, variant), n = arguments_of(inputs), lens.shape[1]
    list_sizes = sizes_of(lists, n, num_tokens, num_heads)
    constants = (triton_plan.BLOCK_PAGES, *constants_of(lists, list_sizes, bool(causal)))
    sizes = triton_plan.sizes_of(inputs, lens, pages, write_slots, (), *counts)
    written = (*outputs, *lists, *sizes, opaque(list_sizes))
    grid = (n + 2, triton_plan.num_parts(n + 1, counts[-1]), 1)
    launch = _launch(lens.device, grid, num_warps(list_sizes))
    return Prepared(launch, (*variant, *constants), (*given, *written, *constants))


@cache
def _launch(device: torch.device, grid: tuple[int, int, int], num_warps: int) -> Launch:
    return Launch(_plan_and_list, device, grid, num_warps)
