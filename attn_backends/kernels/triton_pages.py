"""Rows of pools of compressed layers in Triton: reading and writing them, as they are or in the 8-bit page format.

A pool comes as `pool` says, its 8-bit pages as bytes (`attn_backends.kernels.fp8_pages`). Kernels take it apart before
any loop: Triton 3.6 loses constants there that stand in a tuple within a tuple. Elements are put together by integer
arithmetic, bit for bit as the definition says, and taken apart by it where a GPU has no 8-bit floats. A row of 8-bit
pages is eight groups of 64, the last of them rotated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels import fp8_pages

_GROUP = tl.constexpr(fp8_pages.GROUP)
_NUM_GROUPS = tl.constexpr(fp8_pages.NUM_GROUPS)
_NOPE = tl.constexpr(fp8_pages.NOPE)
_DATA_BYTES = tl.constexpr(fp8_pages.DATA_BYTES)
_SCALE_BYTES = tl.constexpr(fp8_pages.SCALE_BYTES)
_LARGEST = tl.constexpr(fp8_pages.LARGEST)
_LEAST = tl.constexpr(1e-4)
_TO_FLOAT = tl.constexpr(2.0**120)  # e4m3's bits, moved to a float32's, are the value by 2**(7 - 127)
_SUBNORMALS = tl.constexpr(2.0**14)  # a float32 of this size has e4m3's subnormal step, 2**-9, as its last bit


def pool(pages: Tensor, num_rows: int) -> tuple[Any, ...]:
    """A pool as kernels take it: pages, rows of a page, strides of pages, rows and elements."""
    strides = (pages.stride(0), 0, 1) if pages.dtype is torch.uint8 else pages.stride()
    return pages, num_rows, *strides


@triton.jit
def row_pointers(pages, num_rows, page_stride, row_stride, slot):
    """Addresses of the rows of slots, and of their scales in 8-bit pages."""
    page, offset = slot // num_rows, slot % num_rows
    begin = pages + page.to(tl.int64) * page_stride
    if pages.dtype.element_ty == tl.uint8:
        return begin + offset * _DATA_BYTES, begin + num_rows * _DATA_BYTES + offset * _SCALE_BYTES
    else:
        return begin + offset * row_stride, begin


@triton.jit
def read_chunk(
    begin,
    scales,
    stride,
    live,
    chunk: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    TYPE: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):
    """[n, CHUNK] elements of live rows, 0 elsewhere: other memory may hold NaN. Of 8-bit pages a chunk is two groups.

    begin, scales: `row_pointers` [n]. stride: between elements. HAS_E4M3: the GPU converts 8-bit floats itself.
    """
    if begin.dtype.element_ty == tl.uint8:
        return _read_groups(begin, scales, live, 2 * chunk, TYPE, HAS_E4M3)
    else:
        dim = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = live[:, None] if DIM % CHUNK == 0 else live[:, None] & (dim < DIM)[None, :]
        return tl.load(begin[:, None] + dim[None, :] * stride, mask=mask, other=0.0).to(TYPE)


@triton.jit
def _read_groups(begin, scales, live, group: tl.constexpr, TYPE: tl.constexpr, HAS_E4M3: tl.constexpr):
    """Two neighbouring groups of rows, of which the last of a row is rotated."""
    place = tl.arange(0, 2 * _GROUP)
    is_first, real = (place < _GROUP)[None, :], live[:, None]
    first = begin[:, None] + group * _GROUP + place[None, :]
    scale = _scale(scales + group, live)
    if group + 1 < _NUM_GROUPS:
        scale = tl.where(is_first, scale, _scale(scales + group + 1, live))
        return _floats(tl.load(first, mask=real, other=0), scale, TYPE, HAS_E4M3)
    else:
        nope = _floats(tl.load(first, mask=real & is_first, other=0), scale, TYPE, HAS_E4M3)
        tail = (begin + _NOPE).to(tl.pointer_type(tl.bfloat16))[:, None] + (place - _GROUP)[None, :]
        return tl.where(is_first, nope, tl.load(tail, mask=real & (place >= _GROUP)[None, :], other=0.0).to(TYPE))


@triton.jit
def _scale(scales, live):
    """[n, 1] float32 scales of their exponents."""
    return (tl.load(scales, mask=live, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _floats(codes, scale, TYPE: tl.constexpr, HAS_E4M3: tl.constexpr):
    """Elements of their codes; products with powers of two are exact."""
    if HAS_E4M3:
        return codes.to(tl.float8e4nv, bitcast=True).to(TYPE) * scale.to(TYPE)
    else:
        bits = ((codes.to(tl.int32) & 0x80) << 24) | ((codes.to(tl.int32) & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * _TO_FLOAT * scale).to(TYPE)


@triton.jit
def write_row(
    pages, num_rows, page_stride, row_stride, stride, slot, values, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Write values [BLOCK_DIM] float32, of which DIM are real, to a slot of a `pool`; nothing to -1."""
    if slot >= 0:
        row, scales = row_pointers(pages, num_rows, page_stride, row_stride, slot)
        if pages.dtype.element_ty == tl.uint8:
            _encode(row, scales, values)
        else:
            dim = tl.arange(0, BLOCK_DIM)
            tl.store(row + dim * stride, values.to(pages.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _encode(row, scales, values):
    """Write a row of 512 as bytes."""
    group, place = tl.arange(0, _NUM_GROUPS + 1), tl.arange(0, _GROUP)
    groups = values.reshape(_NUM_GROUPS + 1, _GROUP)
    is_nope = (group < _NUM_GROUPS)[:, None]
    nope = tl.where(is_nope, groups, 0.0)
    least_scale = tl.div_rn(tl.maximum(tl.max(tl.abs(nope), axis=1), _LEAST), _LARGEST)
    bits = least_scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # of the next power of two
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    elements = group[:, None] * _GROUP + place[None, :]
    tl.store(row + elements, _e4m3_bits(nope * inverse[:, None]).to(tl.uint8), mask=is_nope)
    tl.store(scales + group, tl.where(group < _NUM_GROUPS, exponent, 0).to(tl.uint8), mask=group <= _NUM_GROUPS)
    tail = (row + _NOPE).to(tl.pointer_type(tl.uint16))
    tl.store(tail + elements - _NOPE, _bfloat16_bits(groups).to(tl.uint16), mask=(group == _NUM_GROUPS)[:, None])


@triton.jit
def _bfloat16_bits(values):
    """The bits of values, rounded to the nearest even; NaN stays NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0)


@triton.jit
def _e4m3_bits(values):
    """The bits of values of at most 448, rounded to the nearest even; NaN stays NaN."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    steps = magnitude.to(tl.float32, bitcast=True) + _SUBNORMALS
    subnormal = steps.to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(magnitude < (121 << 23), subnormal, normal)
    return ((bits >> 24) & 0x80) | tl.where(magnitude > (255 << 23), 0x7F, tl.minimum(code, 0x7F))
