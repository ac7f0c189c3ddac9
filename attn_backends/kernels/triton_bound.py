"""A captured step from an engine's own buffers as one Triton launch, which a graph holds: `spec_metadata.read_bound`.

Every program counts the real requests itself, which are few, so that there is no second launch. Of a block table only
those pages are copied that a request's tokens lie in, committed or written by this step, as in `triton_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn_backends.kernels.triton_inputs import as_bytes, copy_mask, num_parts
from attn_backends.kernels.triton_launch import Launch, opaque, unspecialized
from attn_backends.kernels.triton_plan import number
from spec_metadata import BlockTable, BoundInputs, Capacity, Paging, RequestTable, Step
from spec_metadata.bound_inputs import most_committed

_BLOCK = 256


class BoundSizes(NamedTuple):
    """Sizes of a captured step and its table. included: rows that lengths count beside committed tokens. num_writes: of
    a request. num_given: columns of the engine's table. num_columns, paging_stride: of the static block table.
    """

    bs: int
    width: int
    num_writes: int
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
def _store_slots(into, write, slots, real, count, mask, sizes):
    """Write slots of a request; those of padding, or outside the pool, walk round the reserved page."""
    page_size, num_writes = number(sizes.page_size), number(sizes.num_writes)
    inside = real & (slots >= 0) & (slots < number(sizes.num_pages).to(tl.int64) * page_size)
    behind = (write - count * num_writes) % page_size
    behind = tl.where(behind < 0, behind + page_size, behind)
    padding = number(sizes.reserved_page).to(tl.int64) * page_size + behind
    tl.store(into + write, tl.where(inside, slots, padding), mask=mask)


@triton.jit
def _copy_slots(given, stride, into, request, count, sizes, BLOCK: tl.constexpr):
    """The slots that an engine gives a request."""
    num_writes = number(sizes.num_writes)
    for start in range(tl.program_id(1) * BLOCK, num_writes, tl.num_programs(1) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask, write = place < num_writes, request * num_writes + place
        slots = tl.load(given + write.to(tl.int64) * stride, mask=mask, other=0).to(tl.int64)
        _store_slots(into, write, slots, request < count, count, mask, sizes)


@triton.jit
def _find_slots(
    table, rows, request, row, table_stride, column_stride, committed, into, count, sizes, BLOCK: tl.constexpr
):
    """The slots of a request's table right after its committed tokens."""
    num_writes, real = number(sizes.num_writes), request < count
    for start in range(tl.program_id(1) * BLOCK, num_writes, tl.num_programs(1) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask, write = place < num_writes, request * num_writes + place
        live = place < tl.where(real, num_writes, 0)
        slots = _own_slots(table, rows, request, row, table_stride, column_stride, committed + place, live, sizes)
        _store_slots(into, write, slots, real, count, mask, sizes)


@unspecialized
def _read_bound(
    seq_lens,
    num_real,
    out_cache_loc,
    table,
    rows,
    tree_mask,
    seq_stride,
    loc_stride,
    table_stride,
    column_stride,
    rows_stride,
    mask_stride,
    mask_row_stride,
    mask_column_stride,
    static_lens,
    static_num_real,
    static_loc,
    static_paging,
    static_mask,
    sizes,
    BLOCK: tl.constexpr,
):
    """All inputs of a request. num_real, out_cache_loc, rows, tree_mask: None where the engine has none."""
    request, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    count = _count(seq_lens, seq_stride, num_real, rows, rows_stride, sizes, BLOCK)
    real, page_size, num_writes = request < count, number(sizes.page_size), number(sizes.num_writes)
    committed = tl.load(seq_lens + request * seq_stride).to(tl.int64) - number(sizes.included)
    committed = tl.minimum(tl.maximum(committed, 0), number(sizes.most)).to(tl.int32)
    committed = tl.where(real, committed, 0)
    row = number(sizes.reserved_row).to(tl.int64)
    if rows is not None:
        given = tl.load(rows + request * rows_stride).to(tl.int64)
        row = tl.where(real & (given >= 0) & (given < number(sizes.num_rows)), given, row)
    if part == 0:
        if request == 0:
            tl.store(static_num_real, count)
        tl.store(static_lens + request, committed)
        if rows is not None:
            tl.store(static_paging + request, row)
        if tree_mask is not None:
            node, width = tree_mask + request.to(tl.int64) * mask_stride, number(sizes.width)
            copy_mask(node, mask_row_stride, mask_column_stride, static_mask, real, width, BLOCK)
    if out_cache_loc is not None:
        _copy_slots(out_cache_loc, loc_stride, static_loc, request, count, sizes, BLOCK)
    else:
        _find_slots(table, rows, request, row, table_stride, column_stride, committed, static_loc, count, sizes, BLOCK)
    if rows is None:
        into = static_paging + request.to(tl.int64) * number(sizes.paging_stride)
        end = tl.minimum(tl.cdiv(committed + num_writes, page_size), number(sizes.num_columns))
        for start in range(part * BLOCK, end, parts * BLOCK):
            page = start + tl.arange(0, BLOCK)
            live = page < tl.where(real, end, 0)
            ids = _pages_of(table, request, table_stride, column_stride, page, live, sizes)
            tl.store(into + page, ids, mask=page < end)


def bind_bound(static: Step, inputs: BoundInputs, paging: Paging, capacity: Capacity) -> Callable[[], None]:
    """What writes a captured step from bound inputs with every call. Arguments as of `spec_metadata.read_bound`."""
    is_table, table = isinstance(paging, BlockTable), static.paging.static_input()
    rows = paging.rows if isinstance(paging, RequestTable) else None
    mask, slots, num_writes = inputs.tree_mask, inputs.out_cache_loc, static.num_writes // static.bs
    geometry, num_columns = paging.geometry, table.shape[1] if is_table else 1
    sizes = BoundSizes(
        bs=static.bs,
        width=static.width,
        num_writes=num_writes,
        included=static.num_added_at_least if inputs.lens_include_rows else 0,
        most=most_committed(static, capacity),
        page_size=geometry.page_size,
        num_pages=geometry.num_pages,
        num_rows=paging.table.shape[0],
        num_given=paging.table.shape[1],
        num_columns=num_columns,
        paging_stride=table.stride(0),
        reserved_page=geometry.reserved_page,
        reserved_row=geometry.reserved_row,
    )
    given = (inputs.seq_lens, inputs.num_real, slots, paging.table, rows, None if mask is None else as_bytes(mask))
    strides = (
        inputs.seq_lens.stride(0),
        0 if slots is None else slots.stride(0),
        *paging.table.stride(),
        0 if rows is None else rows.stride(0),
        *((0, 0, 0) if mask is None else mask.stride()),
    )
    static_mask = None if static.tree_mask is None else as_bytes(static.tree_mask)
    into = (static.seq_lens, static.num_real, static.out_cache_loc, table, static_mask)
    grid = (static.bs, num_parts(static.bs, max(num_columns, num_writes)), 1)
    launch = Launch(_read_bound, static.device, grid)
    variant = tuple(None if each is None else each.dtype for each in given)

    def read() -> None:
        with torch.cuda.device_of(inputs.seq_lens):
            launch(variant, *given, *strides, *into, opaque(sizes), _BLOCK)

    return read
