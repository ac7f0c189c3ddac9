"""The raw inputs of a captured step as one Triton launch: copies into its static tensors, and padding behind.

The definition is `spec_metadata.copy_step`. The inputs are read as they come, of either integer type and any stride.
Of a block table only those pages are copied that a request's tokens lie in, committed or written by this step: no form
reads what lies behind them, and at a long context that would take longer than all else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import Launch, opaque, unspecialized
from attn_backends.kernels.triton_plan import number
from spec_metadata import BlockTable, Step, StepKind

_BLOCK = 256
_MOST_PROGRAMS = 2048


class StaticSizes(NamedTuple):
    """Of a static step. num_writes: slots of a request. num_columns, paging_stride: of a block table."""

    width: int
    num_writes: int
    page_size: int
    num_columns: int
    paging_stride: int
    reserved_page: int
    reserved_row: int


@triton.jit
def _copy_mask(given, row_stride, column_stride, into, real, width, BLOCK: tl.constexpr):
    """What the nodes of a request see; a padded one's see themselves."""
    for start in range(0, width * width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        row, column, live = place // width, place % width, place < width * width
        sees = tl.load(given + row * row_stride + column * column_stride, mask=live & real, other=0) != 0
        tl.store(into + place, tl.where(real, sees, row == column).to(tl.uint8), mask=live)


@triton.jit
def _copy_pages(row, stride, num_given, into, end, reserved_page, BLOCK: tl.constexpr):
    """The first pages of a request up to an end; reserved where its row is shorter, as a padded one's is."""
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    for start in range(part * BLOCK, end, num_parts * BLOCK):
        page = start + tl.arange(0, BLOCK)
        is_given = page < tl.minimum(end, num_given)
        ids = tl.load(row + page * stride, mask=is_given, other=0).to(tl.int32)
        tl.store(into + page, tl.where(is_given, ids, reserved_page), mask=page < end)


@unspecialized
def _copy_inputs(
    seq_lens,
    num_real,
    out_cache_loc,
    paging,
    tree_mask,
    seq_stride,
    loc_stride,
    paging_stride,
    column_stride,
    mask_stride,
    mask_row_stride,
    mask_column_stride,
    bs,
    num_given,
    static_lens,
    static_num_real,
    static_loc,
    static_paging,
    static_mask,
    sizes,
    HAS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All inputs of a request; a padded one commits nothing and writes to the reserved page, walked round and round.

    paging: rows of a table of slots, or a block table if it has columns, num_given of them. tree_mask, static_mask:
    None where a step has none.
    """
    request, part = tl.program_id(0), tl.program_id(1)
    real, num_writes, page_size = request < bs, number(sizes.num_writes), number(sizes.page_size)
    committed = tl.load(seq_lens + request * seq_stride, mask=real, other=0).to(tl.int32)
    if part == 0:
        if request == 0:
            tl.store(static_num_real, tl.load(num_real).to(tl.int32))
        tl.store(static_lens + request, committed)
        for start in range(0, num_writes, BLOCK):
            place = start + tl.arange(0, BLOCK)
            write, live = request * num_writes + place, place < num_writes
            padding = number(sizes.reserved_page).to(tl.int64) * page_size + (write - bs * num_writes) % page_size
            given = out_cache_loc + write.to(tl.int64) * loc_stride
            slots = tl.load(given, mask=live & real, other=0).to(tl.int64)
            tl.store(static_loc + write, tl.where(real, slots, padding), mask=live)
        if tree_mask is not None:
            node = tree_mask + request.to(tl.int64) * mask_stride
            mask = static_mask + request * number(sizes.width) * number(sizes.width)
            _copy_mask(node, mask_row_stride, mask_column_stride, mask, real, number(sizes.width), BLOCK)
    if not HAS_COLUMNS:
        if part == 0:
            row = tl.load(paging + request * paging_stride, mask=real, other=0).to(tl.int64)
            tl.store(static_paging + request, tl.where(real, row, number(sizes.reserved_row)))
    else:
        end = tl.minimum(tl.cdiv(committed + num_writes, page_size), number(sizes.num_columns))
        into = static_paging + request.to(tl.int64) * number(sizes.paging_stride)
        row, num_given = paging + request.to(tl.int64) * paging_stride, tl.where(real, num_given, 0)
        _copy_pages(row, column_stride, num_given, into, end, number(sizes.reserved_page), BLOCK)


def bind_inputs(static: Step) -> Callable[[Step], Callable[[Step], None]]:
    """What fills a static step as `copy_step` does: a step that fits it (`spec_metadata.misfit`), or an idle one, ->
    what fills it from steps of that one's types, shapes and strides. A step's tensors lie on one device, so an address
    will do.
    """
    table, geometry, mask = static.paging.static_input(), static.paging.geometry, static.tree_mask
    has_columns = isinstance(static.paging, BlockTable)
    num_columns = table.shape[1] if has_columns else 1
    num_parts = max(1, min(triton.cdiv(num_columns, _BLOCK), _MOST_PROGRAMS // static.bs))
    launch = Launch(_copy_inputs, static.device, (static.bs, num_parts, 1))
    num_writes, reserved = static.num_writes // static.bs, (geometry.reserved_page, geometry.reserved_row)
    sizes = StaticSizes(static.width, num_writes, geometry.page_size, num_columns, table.stride(0), *reserved)
    constants = (opaque(sizes), has_columns, _BLOCK)

    into = (static.seq_lens, static.num_real, static.out_cache_loc, table, None if mask is None else _as_bytes(mask))
    outputs = (*into, *constants)

    def bind(like: Step) -> Callable[[Step], None]:
        is_idle = like.kind is StepKind.IDLE
        given = static if is_idle else like
        lens, loc, paging = given.seq_lens, given.out_cache_loc, given.paging.static_input()
        (lens_stride,), (loc_stride,), strides = lens.stride(), loc.stride(), paging.stride()
        mask_strides = (0, 0, 0) if given.tree_mask is None else given.tree_mask.stride()
        bs, num_given = like.seq_lens.shape[0], paging.shape[-1]
        layout = (lens_stride, loc_stride, strides[0], strides[-1], *mask_strides, bs, num_given)
        variant = lens.dtype, loc.dtype, paging.dtype
        fixed = (*layout, *outputs) if mask is not None else (None, *layout, *outputs)
        direct = launch.bind(variant, fixed)

        def fill(step: Step) -> None:
            nonlocal direct
            source = static if is_idle else step
            lens, real, loc, nodes = source.seq_lens, step.num_real, source.out_cache_loc, source.tree_mask
            paging = source.paging.static_input()
            if direct is None:
                inputs = (lens, real, loc, paging, None if nodes is None else _as_bytes(nodes))
                launch.compile(variant, *inputs, *layout, *outputs)
                direct = launch.bind(variant, fixed)
            elif nodes is None:
                direct(lens.data_ptr(), real.data_ptr(), loc.data_ptr(), paging.data_ptr())
            else:
                direct(lens.data_ptr(), real.data_ptr(), loc.data_ptr(), paging.data_ptr(), nodes.data_ptr())

        return fill

    return bind


def _as_bytes(tensor: Tensor) -> Tensor:
    """A tensor that Triton can address: of truth values their bytes."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
