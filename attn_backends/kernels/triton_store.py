"""Storing rows to the slots of a paged cache: one Triton launch per layer, keys and values together.

A program takes one token and a block of its entry's elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.triton_launch import Call, DirectLaunch, strided

MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["slots", "slot_stride"])
def _store_rows(
    pages,
    rows,
    slots,
    slot_stride,
    page_size,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pages and rows are (pointer, strides), of 4 and of 3 dimensions."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride)  # 64 bits, and so is every address made of it
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < HEADS * DIM
    head, dim = (element // DIM).to(tl.int64), element % DIM
    row_entry = rows[0] + token * rows[1][0] + head * rows[1][1] + dim * rows[1][2]
    value = tl.div_rn(tl.load(row_entry, mask=inside, other=0.0).to(tl.float32), scale)
    value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    page_entry = pages[0] + (slot // page_size) * pages[1][0] + (slot % page_size) * pages[1][1]
    page_entry += head * pages[1][2] + dim * pages[1][3]
    tl.store(page_entry, value.to(pages[0].dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slots", "slot_stride"])
def _store_kv(
    k_pages,
    v_pages,
    k,
    v,
    slots,
    slot_stride,
    page_size,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _store_rows(k_pages, k, slots, slot_stride, page_size, k_scale, HEADS, DIM, LIMIT, BLOCK)
    _store_rows(v_pages, v, slots, slot_stride, page_size, v_scale, HEADS, V_DIM, LIMIT, BLOCK)


def store_rows(pages: Tensor, rows: Tensor, slots: Tensor, scale: float) -> None:
    """`operators.store_rows` for types up to 32 bits."""
    _launch_rows((pages, rows, slots), *rows.shape, pages.shape[1], scale)


def store_kv(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: float, v_scale: float
) -> None:
    """`operators.store_kv` for types up to 32 bits; both pages are of one type."""
    _launch_kv((k_pages, v_pages, k, v, slots), *k.shape, v.shape[2], k_pages.shape[1], k_scale, v_scale)


def _rows_call(tensors: Sequence[Tensor], num_tokens: int, dim: int, page_size: int, scale: float) -> Call:
    pages, rows, slots = tensors
    block = min(MAX_BLOCK, triton.next_power_of_2(dim))
    views = strided((pages.unsqueeze(2), rows.unsqueeze(1)))
    constants = {"HEADS": 1, "DIM": dim, "LIMIT": _limit(pages.dtype), "BLOCK": block}
    return Call((num_tokens, triton.cdiv(dim, block)), (*views, slots, slots.stride(0), page_size, scale), constants)


def _kv_call(
    tensors: Sequence[Tensor],
    num_tokens: int,
    num_kv_heads: int,
    dim: int,
    v_dim: int,
    page_size: int,
    k_scale: float,
    v_scale: float,
) -> Call:
    size = num_kv_heads * max(dim, v_dim)
    block = min(MAX_BLOCK, triton.next_power_of_2(size))
    sizes = {"HEADS": num_kv_heads, "DIM": dim, "V_DIM": v_dim}
    constants = {**sizes, "LIMIT": _limit(tensors[0].dtype), "BLOCK": block}
    *views, slots = tensors
    arguments = (*strided(views), slots, slots.stride(0), page_size, k_scale, v_scale)
    return Call((num_tokens, triton.cdiv(size, block)), arguments, constants)


_launch_rows, _launch_kv = DirectLaunch(_store_rows, _rows_call), DirectLaunch(_store_kv, _kv_call)


def _limit(dtype: torch.dtype) -> float:
    """The magnitude at which a stored value saturates: 8-bit floats may have no infinity to round to."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else float("inf")
