"""Attention of many query rows over paged keys and values for Hopper, in Gluon: prefill, in whole or in chunks.

A program takes tiles of 128 query rows (tokens times the query heads of a KV head) from a counter. Those of some KV
heads are side by side, and of a request those come first that see most keys. One warp group gathers keys and values
(`cp.async`), entry by entry, so that pages may be of any size: two blocks of 128 ahead, and the next tile's while this
one is written out. Two groups attend with 64 rows each, as FlashAttention-3's do (Shah et al. 2024): a group's products
with the next keys are under way while it computes weights, and the groups begin their products in turns.

    shared memory   queries 128 x 128, two blocks of keys and of values 128 x 128, and room to write out: 180,996 of
                    232,448 bytes; keys of 192 elements take 230,148; of 256, in blocks of 64 keys, 213,764
    registers       208 a thread for the two groups, 88 for the third; of other sizes as of `gluon_forms.DEFAULTS`

Blocks that every row sees whole are not masked. Keys past a request's length are not read and count as zeros. The order
of all sums is fixed by the query's own request, and by the form (`gluon_forms`). The third group reads a block's page
ids while the block before it is copied, for keys of at most 128 elements. On an H100 that took 3 to 7 % off a prompt's
time, in pages of one token 9 to 19 %, in a comparison that is not kept. Longer keys have it in pages of 1 and 16
tokens, where it takes up to 26 % off. Keys of 192 elements in pages of 64 would spill.

In bfloat16, 32 heads of 128 over 8, pages of 64, causal, CUDA graphs, microseconds on an H200
(docs/results/h200/kernels_prefill_fa3.json):

                                      this     FlashAttention-3   triton_prefill
    a prompt of 8192                  925      854                1552
    a prompt of 32768                 15150    13461              24374
    the last 1024 of 32768            932      826                1559
    8 prompts of 1024                 228      175                268
    a prompt of 1024                  34       31                 44

So it reaches 0.82 to 0.92 of FlashAttention-3's speed from 8192 tokens on, with 32 and 64 heads, and 0.77 to 0.92 in
prompts of 1024, whose tiles have 4.5 blocks each. Other sizes of heads and pages, and prompts of unequal lengths, are
in docs/results/h200/{prompt_forms,prompts_64}.json: 0.75 and more, but for 32768 tokens with heads of 256 elements, at
0.73. Heads of 64 reach 0.748 in 32768 tokens and 0.744 in 8 prompts of 8192.
FlashAttention-3 has the copy engine (TMA) bring keys and take outputs, where threads do both here.

Profiles are of ncu on an H100, before page ids were read ahead (docs/results/h100/profiles.json). In a prompt of 32768
a multiprocessor's busiest unit was at 0.63 of what it can, FlashAttention-3's at 0.76. L1 was at 0.48 and L2 at 0.44:
none was full. In a prompt of 1024 tensor cores were at 0.21 to 0.27, by multiprocessor. With heads of 256 elements they
are at 0.73, FlashAttention-3's at 0.93 (docs/results/h100/profiles_forms.json). Warps wait longest for global memory
there, which is not among FlashAttention-3's four longest waits; page ids are not read ahead.

Compiled, the warps of a group meet five times in a block, twice because Triton adds it, and there are two fences. With
arrivals thread by thread (cp.async.mbarrier.arrive) they meet once. Then prompts of 8192 and more took 3 to 4 % longer,
in a comparison that is not kept.

Types are bfloat16 and float16, sums float32. Keys and values may be float8_e4m3fn: the third group reads them into
registers, and writes them to shared memory in the queries' type. On an H200 the conformance suite passed with heads of
64, 128 and 256, and with latents of 192 whose first 128 elements are values
(docs/results/h200/conformance_fa3_gluon.json). Keys of 8 bits of all four sizes were timed and compared with Triton's
there (docs/results/h200/eight_bits.json).

`gluon_mla` says which versions of Triton it was tried with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.gluon_forms import Form, form_of
from attn_backends.kernels.gluon_groups import PLAIN, barriers
from attn_backends.kernels.gluon_prefill_groups import attend, gather
from attn_backends.kernels.triton_launch import Call, DirectLaunch, strided

BLOCK_ROWS = 128
_LOG2_E = 1.4426950408889634
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_SIZES = ("bs", "width", "group", "num_tiles", "num_columns", "of_head", "together")


@gluon.jit
def _tiles(dtype: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Shared memory of two tiles of rows; of 192 elements the first 128, and the rest."""
    if DIM == 192:
        first = gl.allocate_shared_memory(dtype, [2, ROWS, 128], _TILE)
        return first, gl.allocate_shared_memory(dtype, [2, ROWS, 64], _TILE)
    else:
        return (gl.allocate_shared_memory(dtype, [2, ROWS, DIM], _TILE),)


@gluon.jit(do_not_specialize=[*PLAIN, "counter", *_SIZES])
def _paged_attention(
    q,
    k_pages,
    v_pages,
    out,
    lse,
    query_indptr,
    page_indptr,
    page_ids,
    kv_lens,
    counter,
    bs,
    width,
    group,
    num_tiles,
    num_columns,
    of_head,
    together,
    table_stride,
    scales,
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    KEYS: gl.constexpr,
    REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """q, k_pages, v_pages are (pointer, strides), out and lse dense. bs: requests. width: rows of each if query_indptr
    is None. group: query heads of a KV head. num_tiles: of a column, which is a KV head, of one request if query_indptr
    is None. of_head: columns of a KV head. together: columns whose tiles take turns, the longest first. table_stride:
    elements between two rows of a table.
    """
    dtype: gl.constexpr = q[0].dtype.element_ty
    queries, keys = _tiles(dtype, 64, DIM), _tiles(dtype, KEYS, DIM)
    values = gl.allocate_shared_memory(dtype, [2, KEYS, V_DIM], _TILE)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], _NUMBERS)
    tiles = gl.allocate_shared_memory(gl.int32, [6, 1], _NUMBERS)
    full = (barriers(2, 128), barriers(2, 128), barriers(1, 129))  # threads that gather, and who announces a tile
    free = (barriers(2, 2), barriers(2, 2), barriers(1, 2))  # both groups that attend
    order = (barriers(1, 1), barriers(1, 1))
    gl.thread_barrier()
    lists, sizes = (query_indptr, kv_lens), (bs, width, group, num_tiles, num_columns, together)
    pages = (page_indptr, page_ids, table_stride, counter)
    given = (queries, keys, values, totals, tiles, full, free, lists, sizes)
    attended = (queries, keys, values, totals, tiles, full, free, order, (group, num_columns, of_head))
    gl.warp_specialize(
        [
            (gather, (given, q, k_pages, v_pages, pages, CAUSAL, PAGE_SIZE, DIM, V_DIM, AHEAD)),
            (attend, (attended, out, lse, scales, CAUSAL, 0)),
            (attend, (attended, out, lse, scales, CAUSAL, 1)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    causal: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> tuple[Tensor, Tensor]:
    """`triton_prefill.paged_attention` on SM90: 16-bit queries, no windows and no sinks, and heads of
    `prefill_operator.HEAD_SIZES`.
    """
    num_tokens, num_heads, dim = q.shape
    page_size, num_kv_heads, v_dim = v_pages.shape[1:]
    group, bs = num_heads // num_kv_heads, kv_lens.shape[0]
    out, lse = q.new_empty(num_tokens, num_heads, v_dim), q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if query_indptr is None:
        num_tiles, num_columns = triton.cdiv(max_query * group, BLOCK_ROWS), num_kv_heads * bs
    else:
        num_tiles, num_columns = num_tokens * group // BLOCK_ROWS + bs, num_kv_heads
    processors = gpu_of(q.device).num_processors
    form = form_of(dim, k_pages.element_size(), page_size, num_heads, max_query, processors)
    num_turns = num_tiles * num_columns // (form.turn * processors)
    together = triton.cdiv(num_columns, max(num_turns, 1))
    shape = (bs, max_query, group, num_tiles, num_columns, num_columns // num_kv_heads, together, page_ids.stride(0))
    lists, scales = (query_indptr, page_indptr, page_ids, kv_lens), (scale * k_scale * _LOG2_E, v_scale)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    _launch((q, k_pages, v_pages, out, lse, *lists, counter), shape, scales, causal, page_size, (dim, v_dim), form)
    return out, lse


def _call(
    tensors: Sequence[Any],
    shape: tuple[int, ...],
    scales: tuple[float, float],
    causal: bool,
    page_size: int,
    dims: tuple[int, int],
    form: Form,
) -> Call:
    num_programs = min(shape[3] * shape[4], gpu_of(tensors[0].device).num_processors)
    arguments = (*strided(tensors[:3]), *tensors[3:], *shape, scales)
    sizes = {"DIM": dims[0], "V_DIM": dims[1], "KEYS": form.keys, "REGISTERS": form.registers, "AHEAD": form.ahead}
    return Call((num_programs,), arguments, {"CAUSAL": causal, "PAGE_SIZE": page_size, **sizes, "num_warps": 4})


_launch = DirectLaunch(_paged_attention, _call)
