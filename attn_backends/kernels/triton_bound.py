"""A captured ragged step from an engine's own buffers as one Triton launch, which a graph holds: `BoundStep.read`.

Where a request's rows begin depends on the widths of all, so this launch goes before the planner's; a uniform step is
read by the launch that plans it (`triton_step`). Every program counts the real requests itself, which are few. Of a
block table only those pages are copied that a request's tokens lie in, committed or written by this step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn_backends.kernels.triton_inputs import num_parts, padded_rows
from attn_backends.kernels.triton_launch import Launch, opaque, unspecialized
from attn_backends.kernels.triton_step import number
from spec_metadata import BlockTable, BoundStep, RequestTable
from spec_metadata.query import packed_starts

_BLOCK = 256


class RaggedSizes(NamedTuple):
    """Sizes of a captured step and its table. bs: of the engine. num_tokens: query rows of all. included: 1 where
    lengths count the step's rows, else 0. num_given: columns of the engine's table. num_columns, paging_stride: of the
    static block table.
    """

    bs: int
    width: int
    num_tokens: int
    included: int
    most: int
    page_size: int
    num_pages: int
    num_rows: int
    num_given: int
    num_columns: int
    paging_stride: int
    reserved_page: int
    reserved_row: int


@triton.jit
def _count(seq_lens, seq_stride, num_real, rows, rows_stride, sizes, BLOCK: tl.constexpr):
    """Real requests, by a count or by what the others are filled with."""
    bs = number(sizes.bs)
    if num_real is not None:
        return tl.minimum(tl.maximum(tl.load(num_real).to(tl.int32), 0), bs)
    else:
        found = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, bs, BLOCK):
            request = start + tl.arange(0, BLOCK)
            if rows is not None:
                row = tl.load(rows + request * rows_stride, mask=request < bs, other=0)
                is_real = row != number(sizes.reserved_row)
            else:
                is_real = tl.load(seq_lens + request * seq_stride, mask=request < bs, other=0) > 0
            found += (is_real & (request < bs)).to(tl.int32)
        return tl.sum(found, axis=0)


@triton.jit
def _pages_of(table, request, table_stride, column_stride, page, mask, sizes):
    """Pages of a request in a block table; reserved where the table has none, or one outside the pool."""
    mask = mask & (page < number(sizes.num_given))
    ids = tl.load(table + request.to(tl.int64) * table_stride + page.to(tl.int64) * column_stride, mask=mask, other=-1)
    inside = (ids >= 0) & (ids < number(sizes.num_pages))
    return tl.where(inside, ids.to(tl.int32), number(sizes.reserved_page))


@triton.jit
def _own_slots(table, rows, request, row, table_stride, column_stride, position, mask, sizes):
    """Slots of positions, from a table of slots, or of pages without rows."""
    page_size = number(sizes.page_size)
    if rows is not None:
        return tl.load(table + row * table_stride + position.to(tl.int64) * column_stride, mask=mask, other=0).to(
            tl.int64
        )
    else:
        page = _pages_of(table, request, table_stride, column_stride, position // page_size, mask, sizes)
        return page.to(tl.int64) * page_size + position % page_size


@triton.jit
def _store_slots(into, write, slots, real, mask, sizes):
    """Write slots of a request; those of padding, or outside the pool, walk round the reserved page."""
    page_size = number(sizes.page_size)
    inside = real & (slots >= 0) & (slots < number(sizes.num_pages).to(tl.int64) * page_size)
    padding = number(sizes.reserved_page).to(tl.int64) * page_size + write % page_size
    tl.store(into + write, tl.where(inside, slots, padding), mask=mask)


@triton.jit
def _copy_slots(given, stride, into, first, begin, end, real, sizes, BLOCK: tl.constexpr):
    """The slots that an engine gives a request, from the place `first` on."""
    for start in range(begin + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        write = start + tl.arange(0, BLOCK)
        mask, place = write < end, (first + write - begin).to(tl.int64)
        slots = tl.load(given + place * stride, mask=write < tl.where(real, end, 0), other=-1).to(tl.int64)
        _store_slots(into, write, slots, real, mask, sizes)


@triton.jit
def _find_slots(
    table,
    rows,
    request,
    row,
    table_stride,
    column_stride,
    committed,
    into,
    begin,
    end,
    real,
    sizes,
    BLOCK: tl.constexpr,
):
    """The slots of a request's table right after its committed tokens."""
    for start in range(begin + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        write = start + tl.arange(0, BLOCK)
        live = write < tl.where(real, end, 0)
        position = committed + write - begin
        slots = _own_slots(table, rows, request, row, table_stride, column_stride, position, live, sizes)
        _store_slots(into, write, slots, real, write < end, sizes)


@triton.jit
def _copy_pages(
    table, request, table_stride, column_stride, static_paging, num_tokens, real, sizes, BLOCK: tl.constexpr
):
    """The pages of a request's tokens in a block table; reserved ones of padding."""
    into = static_paging + request.to(tl.int64) * number(sizes.paging_stride)
    end = tl.minimum(tl.cdiv(num_tokens, number(sizes.page_size)), number(sizes.num_columns))
    for start in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        page = start + tl.arange(0, BLOCK)
        live = page < tl.where(real, end, 0)
        ids = _pages_of(table, request, table_stride, column_stride, page, live, sizes)
        tl.store(into + page, ids, mask=page < end)


@triton.jit
def _rows_of(widths, stride, count, static_starts, sizes, BLOCK: tl.constexpr):
    """Where the rows of a request begin and end, which it stores, and how many it asked for."""
    request, width, num_tokens = tl.program_id(0), number(sizes.width), number(sizes.num_tokens)
    padding = (number(sizes.bs), width, num_tokens)
    begin, end, _ = padded_rows(widths, stride, count, request, width, num_tokens, *padding, BLOCK)
    if tl.program_id(1) == 0:
        tl.store(static_starts + request, begin)
        tl.store(static_starts + request + 1, end)
    asked = tl.load(widths + request * stride, mask=request < count, other=0)
    return begin, end, asked.to(tl.int64)


@unspecialized
def _read_ragged(
    seq_lens,
    num_real,
    out_cache_loc,
    table,
    rows,
    widths,
    seq_stride,
    loc_stride,
    table_stride,
    column_stride,
    rows_stride,
    widths_stride,
    static_lens,
    static_num_real,
    static_loc,
    static_paging,
    static_starts,
    sizes,
    BLOCK: tl.constexpr,
):
    """All inputs of a request. num_real, out_cache_loc, rows: None where the engine has none."""
    request, part = tl.program_id(0), tl.program_id(1)
    count = _count(seq_lens, seq_stride, num_real, rows, rows_stride, sizes, BLOCK)
    real = request < count
    begin, end, asked = _rows_of(widths, widths_stride, count, static_starts, sizes, BLOCK)
    committed = tl.load(seq_lens + request * seq_stride, mask=request < number(sizes.bs), other=0).to(tl.int64)
    committed = tl.maximum(committed - asked * number(sizes.included), 0)
    committed = tl.where(real, tl.minimum(committed, number(sizes.most)).to(tl.int32), 0)
    row = number(sizes.reserved_row).to(tl.int64)
    if rows is not None:
        given = tl.load(rows + request * rows_stride, mask=real, other=-1).to(tl.int64)
        row = tl.where(real & (given >= 0) & (given < number(sizes.num_rows)), given, row)
    if part == 0:
        tl.store(static_num_real, count, mask=request == 0)
        tl.store(static_lens + request, committed)
        if rows is not None:
            tl.store(static_paging + request, row)
    writes = (begin, end, real, sizes)
    if out_cache_loc is not None:
        _copy_slots(out_cache_loc, loc_stride, static_loc, request * number(sizes.width), *writes, BLOCK)
    else:
        _find_slots(table, rows, request, row, table_stride, column_stride, committed, static_loc, *writes, BLOCK)
    if rows is None:
        from_table = (table, request, table_stride, column_stride)
        _copy_pages(*from_table, static_paging, committed + end - begin, real, sizes, BLOCK)


def bind_ragged_read(bound: BoundStep) -> Callable[[], None]:
    """A function that reads a captured ragged step from the engine's buffers, as `BoundStep.read` does."""
    static, inputs, paging = bound.static, bound.inputs, bound.paging
    table, slots, widths = static.paging.static_input(), inputs.out_cache_loc, inputs.widths
    assert widths is not None, "a ragged step has them"
    rows = paging.rows if isinstance(paging, RequestTable) else None
    geometry, num_columns = paging.geometry, table.shape[1] if isinstance(paging, BlockTable) else 1
    sizes = RaggedSizes(
        bs=paging.bs,
        width=static.width,
        num_tokens=static.num_tokens,
        included=int(inputs.lens_include_rows),
        most=bound.most,
        page_size=geometry.page_size,
        num_pages=geometry.num_pages,
        num_rows=paging.table.shape[0],
        num_given=paging.table.shape[1],
        num_columns=num_columns,
        paging_stride=table.stride(0),
        reserved_page=geometry.reserved_page,
        reserved_row=geometry.reserved_row,
    )
    given = (inputs.seq_lens, inputs.num_real, slots, paging.table, rows, widths)
    strides = (
        inputs.seq_lens.stride(0),
        0 if slots is None else slots.stride(0),
        *paging.table.stride(),
        0 if rows is None else rows.stride(0),
        widths.stride(0),
    )
    into = (static.seq_lens, static.num_real, static.out_cache_loc, table, packed_starts(static.query))
    grid = (static.bs, num_parts(static.bs, max(num_columns, static.width)), 1)
    launch = Launch(_read_ragged, static.device, grid)
    variant = tuple(None if each is None else each.dtype for each in given)

    def read() -> None:
        with torch.cuda.device_of(inputs.seq_lens):
            launch(variant, *given, *strides, *into, opaque(sizes), _BLOCK)

    return read
