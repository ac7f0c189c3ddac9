"""The tree part of attention as one Triton launch: drafted tokens read by slot, joined to the prefix.

A program takes one request, one KV head and a block of query rows. These are the rows of the request times the query
heads that share the KV head, so that 16 tree nodes of 16 MLA heads are 256 rows over the same few keys. All keys are
one block, so the softmax weights are final before the first value is read, and neither head size is held whole. Queries
and keys pass in chunks through the scores, values and the prefix in chunks to the output.

Arithmetic is float32, matrix products too for float32 inputs (no TF32).

For 16 nodes of 32 requests it reads queries and the prefix's outputs, and writes outputs. These are 27 MB for 16 heads
of MLA, 211 for 128, 15 for 32 heads of 128 over 8, drafted keys and values included. At 4.3 TB/s, an H200's copy, that
is 6, 49 and 4 us. With our kernels a tree costs 13, 80 and 7 us more than the chain of as many nodes, at 4096 keys of
prefix (docs/results/h200/trees.json). At 32 and 128 requests that is 1.02 to 1.14 times the chain on every kernel, at
32768 keys at most 1.04. One request of 4096 keys takes 1.12 to 1.63 times, on FlashMLA most: it stops at being a launch
of its own, which weighs there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.operators import MAX_TREE_KEYS
from attn_backends.kernels.triton_launch import Call, DirectLaunch, strided
from attn_backends.kernels.triton_windows import dense, sink_weights

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_TINIEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _load(row, live, stride, dim, DIM: tl.constexpr):
    """A chunk of elements of live rows, 0 elsewhere."""
    return tl.load(row[:, None] + dim[None, :] * stride, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def _drafted(mask, slots, slot_strides, request, node, real, num_keys, page_size, BLOCK_KEYS: tl.constexpr):
    """The drafted tokens of a request: which row sees which, which are seen at all, and where they lie."""
    key = tl.arange(0, BLOCK_KEYS)
    entry = mask[0] + request * mask[1][0] + node[:, None] * mask[1][1] + key[None, :] * mask[1][2]
    sees = tl.load(entry, mask=real[:, None] & (key < num_keys)[None, :], other=0).to(tl.int1)
    seen = tl.max(sees.to(tl.int32), axis=0) > 0  # other keys are never read: their memory may hold NaN
    slot = tl.load(slots + request * slot_strides[0] + key * slot_strides[1], mask=seen, other=0)
    return sees, seen, slot // page_size, slot % page_size


@triton.jit
def _products(q, q_stride, real, k, k_stride, seen, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, DOT: tl.constexpr):
    """Query times key of each row and key, in float32."""
    products = tl.zeros((q.shape[0], k.shape[0]), dtype=tl.float32)
    for start in range(0, DIM, BLOCK_DIM):
        dim = start + tl.arange(0, BLOCK_DIM)
        queries, keys = _load(q, real, q_stride, dim, DIM).to(DOT), _load(k, seen, k_stride, dim, DIM).to(DOT)
        products = tl.dot(queries, tl.trans(keys), products, input_precision="ieee")
    return products


@triton.jit(do_not_specialize=["slots", "lse", "width", "num_keys"])
def _tree_join(
    q,
    k_pages,
    v_pages,
    slots,
    slot_strides,
    mask,
    prefix_out,
    prefix_lse,
    sinks,
    out,
    lse,
    width,
    num_keys,
    shape,
    scales,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    DOT: tl.constexpr,
):
    """Tensors are (pointer, strides), the rest dense. shape: heads of a KV head, page size."""
    group, page_size = shape
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < width * group
    node, head = row // group, kv_head * group + row % group
    token = request * width + node
    sees, seen, page, offset = _drafted(mask, slots, slot_strides, request, node, real, num_keys, page_size, BLOCK_KEYS)
    q_row = q[0] + token * q[1][0] + head * q[1][1]
    k_entry = k_pages[0] + page * k_pages[1][0] + offset * k_pages[1][1] + kv_head * k_pages[1][2]
    scores = _products(q_row, q[1][2], real, k_entry, k_pages[1][3], seen, DIM, BLOCK_DIM, DOT)
    scores = tl.where(sees, scores * scales[0], float("-inf"))

    prefix_entry = prefix_lse[0] + token * prefix_lse[1][0] + head * prefix_lse[1][1]
    prefix = tl.load(prefix_entry, mask=real, other=float("-inf"))
    peak = tl.maximum(tl.maximum(tl.max(scores, axis=1), prefix), _LOWEST)
    weights, prefix_weight = tl.exp(scores - peak[:, None]), tl.exp(prefix - peak)
    total = tl.sum(weights, axis=1) + prefix_weight
    flat = token * (tl.num_programs(1) * group) + head
    tl.store(lse + flat, peak + tl.log(total), mask=real)
    if sinks is not None:
        total += sink_weights(sinks, head, real, peak)
    norm = 1.0 / tl.maximum(total, _TINIEST)

    before = prefix_out[0] + token * prefix_out[1][0] + head * prefix_out[1][1]
    v_entry = v_pages[0] + page * v_pages[1][0] + offset * v_pages[1][1] + kv_head * v_pages[1][2]
    has_prefix = real & (prefix_weight > 0)  # else its output may be garbage
    for start in range(0, V_DIM, BLOCK_V_DIM):
        dim = start + tl.arange(0, BLOCK_V_DIM)
        values = _load(v_entry, seen, v_pages[1][3], dim, V_DIM).to(DOT)
        tree = tl.dot(weights.to(DOT), values, input_precision="ieee") * (norm * scales[1])[:, None]
        prefix_part = _load(before, has_prefix, prefix_out[1][2], dim, V_DIM).to(tl.float32)
        joined = tree + prefix_part * (norm * prefix_weight)[:, None]
        place = out + flat[:, None] * V_DIM + dim[None, :]
        tl.store(place, joined.to(out.dtype.element_ty), mask=real[:, None] & (dim < V_DIM)[None, :])


def tree_join(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    mask: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`operators.tree_join` for float32, bfloat16 and float16 queries and at most `operators.MAX_TREE_KEYS` keys.

    The cache may also be of an 8-bit float type. Products of 16-bit queries with a cache of their type or of 8 bits are
    done in the queries' type, all others in float32.
    """
    bs, width, num_keys = mask.shape
    num_rows, num_heads, dim = q.shape
    page_size, num_kv_heads, v_dim = v_pages.shape[1:]
    group = num_heads // num_kv_heads
    if num_keys > MAX_TREE_KEYS:
        raise ValueError(
            f"the tree part reads {num_keys} drafted tokens per request, the kernel at most {MAX_TREE_KEYS}"
        )
    out, lse = q.new_empty(num_rows, num_heads, v_dim), q.new_empty(num_rows, num_heads, dtype=torch.float32)
    shape, scales = (width, group, num_keys, page_size), (scale * k_scale, v_scale)
    tensors = (q, k_pages, v_pages, slots, mask, prefix_out, prefix_lse, dense(sinks), out, lse)
    _launch(tensors, bs, num_kv_heads, shape, scales, dim, v_dim)
    return out, lse


def _call(
    tensors: Sequence[Tensor],
    bs: int,
    num_kv_heads: int,
    shape: tuple[int, int, int, int],
    scales: tuple[float, float],
    dim: int,
    v_dim: int,
) -> Call:
    (q, k_pages, *_), (width, group, num_keys, page_size) = tensors, shape
    dot = q.dtype if k_pages.dtype is q.dtype or k_pages.dtype.itemsize == 1 else torch.float32
    blocks = _blocks(width * group, num_keys, dim, v_dim, dot.itemsize)
    grid = (bs, num_kv_heads, triton.cdiv(width * group, blocks["BLOCK_ROWS"]))
    constants = {"DIM": dim, "V_DIM": v_dim, **blocks, "DOT": _DOT_TYPES[dot]}
    slots = (tensors[3], tensors[3].stride())  # of which no address is specialised on, as in a tuple it would be
    arguments = (
        *strided(tensors[:3]),
        *slots,
        *strided(tensors[4:7]),
        *tensors[7:],
        width,
        num_keys,
        (group, page_size),
        scales,
    )
    return Call(grid, arguments, constants)


_launch = DirectLaunch(_tree_join, _call)


def _blocks(num_rows: int, num_keys: int, dim: int, v_dim: int, itemsize: int) -> dict[str, int]:
    """What a program holds at once: rows, all keys, and elements of keys or values worth 16 KB."""
    keys = max(16, triton.next_power_of_2(num_keys))
    rows = min(64 if keys <= 32 else 32 if keys <= 64 else 16, max(16, triton.next_power_of_2(num_rows)))
    chunk = max(16, min(128, 2**14 // (keys * itemsize)))
    elements, v_elements = (min(chunk, max(16, triton.next_power_of_2(size))) for size in (dim, v_dim))
    return {"BLOCK_ROWS": rows, "BLOCK_KEYS": keys, "BLOCK_DIM": elements, "BLOCK_V_DIM": v_elements}
