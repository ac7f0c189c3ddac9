"""The raw inputs of a captured step as one Triton launch: copies into its static tensors, and padding after them.

The definition is `spec_metadata.copy_step`. The inputs are read as they come, of either integer type and any stride.
Write slots that a step leaves out are looked up in its table by the same launch. Of a block table only those pages are
copied that a request's tokens lie in, committed or written by this step: no form reads the entries after them. At a
long context, copying these would take longer than all else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import Launch, opaque, unspecialized
from attn_backends.kernels.triton_requests import number
from attn_backends.kernels.triton_step import copy_mask, slots_at
from attn_backends.kernels.triton_widths import fitted_rows
from spec_metadata import BlockTable, BoundedQuery, Step, StepKind
from spec_metadata.query import packed_starts

_BLOCK = 256
_MOST_PROGRAMS = 2048


class StaticSizes(NamedTuple):
    """Sizes of a static step. num_writes: slots of a request, of packed ones all. max_real: requests that are no
    padding of packed rows. num_columns, paging_stride: of a block table. row_stride, slot_stride, row_tokens: of a
    table of slots.
    """

    width: int
    num_writes: int
    max_real: int
    page_size: int
    num_columns: int
    paging_stride: int
    reserved_page: int
    reserved_row: int
    row_stride: int
    slot_stride: int
    row_tokens: int


@triton.jit
def _first_write(given_starts, starts_stride, bs, request, sizes):
    """First write slot of a request: packed ones start where they are said to, then come requests without a row, and
    then those that have what is left.
    """
    if given_starts is None:
        return request * number(sizes.num_writes)
    else:
        place = tl.minimum(request, bs)
        given = tl.load(given_starts + place * starts_stride, mask=place > 0, other=0)
        left_over = tl.maximum(request - number(sizes.max_real), 0) * number(sizes.width)
        return tl.minimum(given + left_over, number(sizes.num_writes))


@triton.jit
def _padded_rows(widths, stride, count, request, width, room, max_real, bound, num_rows, BLOCK: tl.constexpr):
    """First and end row of a request of a ragged step, and the end of all real ones' rows. Requests from
    `max_real` on have what is left, up to `bound` rows each of num_rows. The rest as of `fitted_rows`.
    """
    begin, end, total = fitted_rows(widths, stride, count, request, width, room, BLOCK)
    left_over = tl.maximum(request - max_real, 0) * bound
    next_left_over = tl.maximum(request + 1 - max_real, 0) * bound
    return tl.minimum(begin + left_over, num_rows), tl.minimum(end + next_left_over, num_rows), total


@triton.jit
def _writes_of(
    given_starts,
    stride,
    bs,
    widths,
    count,
    given_width,
    room,
    sizes,
    IS_RAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the writes of a request begin and end, where those of all real ones end, and the first slot that it is
    given.
    """
    request = tl.program_id(0)
    if IS_RAGGED:
        asked = (widths, stride, count, request, given_width, room)
        padding = (number(sizes.max_real), number(sizes.width), number(sizes.num_writes))
        begin, end, num_rows = _padded_rows(*asked, *padding, BLOCK)
        return begin, end, num_rows, request * given_width
    else:
        begin = _first_write(given_starts, stride, bs, request, sizes)
        end = _first_write(given_starts, stride, bs, request + 1, sizes)
        return begin, end, _first_write(given_starts, stride, bs, bs, sizes), begin


@triton.jit
def _row_of(paging, paging_stride, column_stride, num_given, table, real, sizes, HAS_COLUMNS: tl.constexpr):
    """A request's row: its number in a table of slots, where it begins, and the stride and number of its columns."""
    request = tl.program_id(0)
    if HAS_COLUMNS:
        return request, paging + request.to(tl.int64) * paging_stride, column_stride, num_given
    else:
        own = tl.load(paging + request * paging_stride, mask=real, other=0).to(tl.int64)
        return own, table + own * number(sizes.row_stride), number(sizes.slot_stride), number(sizes.row_tokens)


@triton.jit
def _copy_slots(
    given,
    stride,
    num_given,
    into,
    begin,
    end,
    first,
    committed,
    row,
    column_stride,
    num_columns,
    sizes,
    HAS_COLUMNS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The write slots of a request, given from the place `first` on, or right after its committed tokens; after those
    of real requests come those of the reserved page, walked round and round. row, column_stride, num_columns: of its
    table.
    """
    part, num_parts, page_size = tl.program_id(1), tl.num_programs(1), number(sizes.page_size)
    for start in range(begin + part * BLOCK, end, num_parts * BLOCK):
        write = start + tl.arange(0, BLOCK)
        is_given = (write < num_given) & (write < end)
        if HAS_SLOTS:
            place = (first + write - begin).to(tl.int64)
            slots = tl.load(given + place * stride, mask=is_given, other=0).to(tl.int64)
        else:
            position, reserved_page = committed + write - begin, number(sizes.reserved_page)
            columns = (column_stride, num_columns, page_size, reserved_page)
            slots = slots_at(row, position, is_given, *columns, HAS_COLUMNS)
        padding = number(sizes.reserved_page).to(tl.int64) * page_size + write % page_size
        tl.store(into + write, tl.where(is_given, slots, padding), mask=write < end)


@triton.jit
def _copy_pages(row, stride, num_given, into, num_tokens, real, sizes, BLOCK: tl.constexpr):
    """The pages of a request's tokens; reserved where its row is shorter, as a padded one's is. into: of all."""
    part, num_parts, reserved_page = tl.program_id(1), tl.num_programs(1), number(sizes.reserved_page)
    end = tl.minimum(tl.cdiv(num_tokens, number(sizes.page_size)), number(sizes.num_columns))
    into += tl.program_id(0).to(tl.int64) * number(sizes.paging_stride)
    for start in range(part * BLOCK, end, num_parts * BLOCK):
        page = start + tl.arange(0, BLOCK)
        is_given = page < tl.minimum(end, tl.where(real, num_given, 0))
        ids = tl.load(row + page * stride, mask=is_given, other=0).to(tl.int32)
        tl.store(into + page, tl.where(is_given, ids, reserved_page), mask=page < end)


@unspecialized
def _copy_inputs(
    seq_lens,
    num_real,
    out_cache_loc,
    paging,
    nodes,
    given_starts,
    seq_stride,
    loc_stride,
    starts_stride,
    paging_stride,
    column_stride,
    mask_stride,
    mask_row_stride,
    mask_column_stride,
    bs,
    known_real,
    num_given,
    given_width,
    room,
    table,
    static_lens,
    static_num_real,
    static_loc,
    static_paging,
    static_mask,
    static_starts,
    sizes,
    HAS_COLUMNS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All inputs of a request; a padded one commits nothing and writes to the reserved page. paging: rows of a table
    of slots, or a block table of num_given columns. nodes: a tree mask, or widths of a ragged step, up to given_width
    rows a request and `room` of all. known_real: of the host, or below 0. None: what a step has not.
    """
    request, part, real = tl.program_id(0), tl.program_id(1), tl.program_id(0) < bs
    count = tl.where(known_real < 0, tl.load(num_real).to(tl.int32), known_real)
    committed = tl.load(seq_lens + request * seq_stride, mask=real, other=0).to(tl.int32)
    rows_of = (starts_stride, bs, nodes, tl.minimum(count, bs), given_width, room, sizes)
    begin, end, num_rows, first = _writes_of(given_starts, *rows_of, IS_RAGGED, BLOCK)
    committed = tl.where((end > begin) | (not IS_RAGGED), committed, 0)
    of_paging = (paging, paging_stride, column_stride, num_given, table, real, sizes)
    own, row, stride, columns = _row_of(*of_paging, HAS_COLUMNS)
    writes = (num_rows, static_loc, begin, end, first, committed)
    _copy_slots(out_cache_loc, loc_stride, *writes, row, stride, columns, sizes, HAS_COLUMNS, HAS_SLOTS, BLOCK)
    if part == 0:
        tl.store(static_num_real, count, mask=request == 0)
        tl.store(static_lens + request, committed)
        if static_starts is not None:
            tl.store(static_starts + request, begin)
            tl.store(static_starts + request + 1, end)
        if static_mask is not None:
            of_mask = (nodes, mask_stride, mask_row_stride, mask_column_stride, static_mask)
            copy_mask(*of_mask, real, number(sizes.width), BLOCK)
    if not HAS_COLUMNS:
        tl.store(static_paging + request, tl.where(real, own, number(sizes.reserved_row)), mask=part == 0)
    else:
        _copy_pages(row, column_stride, num_given, static_paging, committed + end - begin, real, sizes, BLOCK)


def bind_inputs(static: Step) -> Callable[[Step], Callable[[Step], None]]:
    """A function of a step that fits the static one (`spec_metadata.misfit`), or of an idle one. It returns a function
    that fills the static step, as `copy_step` does, from steps of that one's types, shapes and strides, of packed rows
    from that one. A step's tensors lie on one device, so an address is enough.
    """
    table, has_columns = static.paging.static_input(), isinstance(static.paging, BlockTable)
    num_columns, starts = table.shape[1] if has_columns else 1, packed_starts(static.query)
    num_writes = static.num_writes // static.bs if starts is None else static.num_writes
    launch = Launch(_copy_inputs, static.device, (static.bs, num_parts(static.bs, max(num_columns, num_writes)), 1))
    mask = None if static.tree_mask is None else _as_bytes(static.tree_mask)
    into = (static.seq_lens, static.num_real, static.out_cache_loc, table, mask, starts)
    slots_of_rows = None if isinstance(static.paging, BlockTable) else static.paging.table
    outputs = (slots_of_rows, *into, opaque(_sizes_of(static, num_writes, num_columns)), has_columns)

    def bind(like: Step) -> Callable[[Step], None]:
        is_idle, is_ragged = like.kind is StepKind.IDLE, isinstance(like.query, BoundedQuery)
        given, bs, has_slots = static if is_idle else like, like.bs, is_idle or like.out_cache_loc is not None
        tensors = _read_of(given, static)
        variant = (has_slots, is_ragged, *(each.dtype for each in tensors), *(each.dtype for each in _nodes(like)))
        known_real = 0 if is_idle else -1 if isinstance(like.num_real, Tensor) else like.num_real
        sizes = (bs, known_real, tensors[-1].shape[-1], like.width, like.num_tokens)
        fixed = (*_strides_of(given), *sizes, *outputs, has_slots, is_ragged, _BLOCK)
        if starts is not None and not is_ragged:
            return lambda step: _launch_packed(launch, variant, static if is_idle else step, static, fixed)
        bound = (None,) * (2 - len(_nodes(given))) + fixed
        direct = launch.bind(variant, bound)

        def fill(step: Step) -> None:
            nonlocal direct
            source = static if is_idle else step
            lens, real, loc, paging = _read_of(source, static)
            nodes = _nodes(source)
            if direct is None:
                launch.compile(variant, lens, real, loc, paging, *(*nodes, None, None)[:2], *fixed)
                direct = launch.bind(variant, bound)
            elif not nodes:
                direct(lens.data_ptr(), real.data_ptr(), loc.data_ptr(), paging.data_ptr())
            else:
                direct(lens.data_ptr(), real.data_ptr(), loc.data_ptr(), paging.data_ptr(), nodes[0].data_ptr())

        return fill

    return bind


def num_parts(bs: int, num_columns: int) -> int:
    """Programs that share what a request has so many entries of."""
    return max(1, min(triton.cdiv(num_columns, _BLOCK), _MOST_PROGRAMS // bs))


def _launch_packed(launch: Launch, variant: Hashable, step: Step, static: Step, fixed: Sequence[Any]) -> None:
    """Every packed step has a layout of its own, so that its launch would be bound for one call."""
    with torch.cuda.device_of(step.seq_lens):
        launch(variant, *_read_of(step, static), None, packed_starts(step.query), *fixed)


def _nodes(step: Step) -> tuple[Tensor, ...]:
    """What a step says of its nodes: the mask of a tree, or the widths of a ragged step; nothing of any other."""
    if isinstance(step.query, BoundedQuery):
        return (step.query.widths,)
    return () if step.tree_mask is None else (_as_bytes(step.tree_mask),)


def _read_of(step: Step, static: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lengths, number of real requests, slots and paging of a step. For what the device is not told of them stands the
    static one's, whose value is not used.
    """
    num_real = step.num_real if isinstance(step.num_real, Tensor) else static.num_real
    slots = static.out_cache_loc if step.out_cache_loc is None else step.out_cache_loc
    assert isinstance(num_real, Tensor), "a graph reads it from a buffer"
    assert slots is not None, "a graph reads them from a buffer"
    paging = step.paging
    return step.seq_lens, num_real, slots, paging.table if isinstance(paging, BlockTable) else paging.rows


def _sizes_of(static: Step, num_writes: int, num_columns: int) -> StaticSizes:
    geometry, table = static.paging.geometry, static.paging.table
    return StaticSizes(
        width=static.width,
        num_writes=num_writes,
        max_real=static.max_real,
        page_size=geometry.page_size,
        num_columns=num_columns,
        paging_stride=static.paging.static_input().stride(0),
        reserved_page=geometry.reserved_page,
        reserved_row=geometry.reserved_row,
        row_stride=table.stride(0),
        slot_stride=table.stride(1),
        row_tokens=table.shape[1],
    )


def _strides_of(step: Step) -> tuple[int, ...]:
    """Of lengths, slots, starts or widths, what a table gives, and masks, as the kernel takes them."""
    paging = step.paging.static_input().stride()
    starts = step.query.widths if isinstance(step.query, BoundedQuery) else packed_starts(step.query)
    loc_stride, starts_stride = (0 if each is None else each.stride(0) for each in (step.out_cache_loc, starts))
    own = (step.seq_lens.stride(0), loc_stride, starts_stride)
    return (*own, paging[0], paging[-1], *((0, 0, 0) if step.tree_mask is None else step.tree_mask.stride()))


def _as_bytes(tensor: Tensor) -> Tensor:
    """A tensor that Triton can address: of truth values their bytes."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
