"""MLA over paged latents for Hopper, in Gluon: warp groups that hand each other the tensor cores.

A program takes 64 query rows of a request (query rows times heads) and a part of its keys, two blocks of 64 at a time,
as FlashMLA does (its "seesaw" schedule). One warp group multiplies the queries with the even block, the other with the
odd one, and each adds up its half of the outputs, 64 x 256, over both blocks. So each passes its weights on through
shared memory, while it has them in registers for its own product. As the running peak goes from one to the other and
back, one group computes weights while the other multiplies. A third one gathers latents (`cp.async`), entry by entry,
so that pages may be of any size: half a block at a time, as soon as the group that read it last is through. What lies
past a request's keys is not read and counts as zeros. Weights stand where the rotated elements of their block were.

    shared memory   queries 64 x 576, two blocks of 64 x 576: 221,184 of 232,448 bytes, one program a multiprocessor
    registers       216 a thread for the two groups, 72 for the third (`gluon_forms`)

The last requests' keys are divided where whole requests leave multiprocessors idle (`latent_shares`), and those of a
request that is much longer than the others (`triton_pieces`). Their parts are merged in their order by `triton_merge`;
nothing is read on the host. Gluon's compiler keeps what is invariant in a loop
outside of it, here the descriptors of 72 products of 16 elements, and spills it; `zero_in_turn` is a zero that it can't
know. Without, the kernel takes a third longer. Without the one in a tile's number, latents of 8 bits are spilled.

On an H200 (bfloat16, pages of 64 tokens, CUDA graphs, microseconds, kernels in turn;
docs/results/h200/kernels_gluon.json has all rows but the last, which was timed apart):

                                          this       FlashMLA   triton_decode
    128 heads, 32 x 4096, width 1         84         75         172
    the same, width 4 and 8               251, 491   213, 416   582, 1147
    128 heads, 128 x 4096, width 1        274        235        602
    the same, width 4 and 8               981, 1969  833, 1648  2283, 4636
    128 heads, 32 and 128 x 32768         504, 1996  440, 1701  1175, 4945
    128 heads, 8 x 4096                   37         33         58
    16 heads, 128 x 4096, width 4 and 8   173, 273   159, 235   325, 599
    128 heads, a prompt of 8192 behind    3700       3099       7373      (its last 1024 rows)

So it reaches 0.76 to 0.93 of FlashMLA's speed with 128 heads, up to 644 TFLOP/s. A profile (ncu, 128
x 4096, width 1) has them at work in 0.60 of all cycles, memory at 0.49 and L2 at 0.67 of what they can. For 0.07 of the
time a multiprocessor has no program, at the end. No unit is full: the groups wait for one another and for latents.
Counted, not measured: shared memory is busy for about as many cycles as the tensor cores, because products of 64 x 64
take both operands from there and latents come in beside them. FlashMLA has a ninth of the queries in registers instead,
and the copy engine (TMA) bring latents.

Types are bfloat16 and float16, sums float32. Latents may be float8_e4m3fn: the third group reads them into registers,
and writes them to shared memory in the queries' type. That is right on Hopper, and on the model of
`tests/gluon_model.py`. Times beside Triton's are in docs/results/h200/eight_bits.json.

Gluon is experimental and changes from one version of Triton to the next; `providers.GLUON_TRITON` is the one that this
was tried with.
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
from attn_backends.kernels.gluon_forms import LATENT, form_of
from attn_backends.kernels.gluon_groups import (
    COPIED,
    NUMBERS,
    PLAIN,
    TILE,
    barriers_of_groups,
    copy,
    even,
    gather_any,
    halves,
    odd,
    zero_in_turn,
)
from attn_backends.kernels.gluon_pieces import share_of
from attn_backends.kernels.latent_shares import Batch, share_requests
from attn_backends.kernels.paged_operators import RANK
from attn_backends.kernels.triton_launch import Call, DirectLaunch, strided
from attn_backends.kernels.triton_merge import Parts, merge
from attn_backends.kernels.triton_pieces import most_pieces

BLOCK_KEYS = 128
_LOG2_E = 1.4426950408889634


@gluon.jit
def _load_queries(q, queries, rows):
    """Begin to load the query rows of a tile, 0 past the last."""
    tile, group, first, num_rows, _ = rows
    row = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, COPIED))
    source = q[0] + (first + row // group).to(gl.int64) * q[1][0] + (row % group) * q[1][1]
    real = row < num_rows * group
    copy(source, real, queries[0].index(0), 0, 256)
    copy(source, real, queries[1].index(0), 256, 256)
    copy(source, real, queries[2].index(0), 512, 64)


@gluon.jit
def _tiles(dtype: gl.constexpr, NUM: gl.constexpr):
    """Shared memory of 64 rows, so many times: left halves, right halves and rests."""
    left, right = halves(dtype, NUM)
    return left, right, gl.allocate_shared_memory(dtype, [NUM, 64, 64], TILE)


@gluon.jit
def _memory(dtype: gl.constexpr):
    """Shared memory: queries, blocks, peaks of both groups (and in the end their totals), barriers."""
    peaks = gl.allocate_shared_memory(gl.float32, [4, 64], NUMBERS)
    full, free, handed = barriers_of_groups()
    return _tiles(dtype, 1), _tiles(dtype, 2), peaks, full, free, handed


@gluon.jit
def _keys_of(split, num_parts, num_keys):
    """The first key of a part and the one past its last, as `triton_merge.part_of`."""
    size = gl.maximum(gl.cdiv(gl.cdiv(num_keys, num_parts), 128), 1) * 128
    return split * size, gl.minimum(split * size + size, num_keys)


@gluon.jit
def _rows_of(query_indptr, request, width):
    """The first query row of a request, and how many it has."""
    first, num_rows = request * width, width
    if query_indptr is not None:
        first = gl.load(query_indptr + request)
        num_rows = gl.load(query_indptr + request + 1) - first
    return first, num_rows


@gluon.jit
def _pages_of(page_indptr, page_ids, request, table_stride):
    """Where the page ids of a request begin."""
    ids = page_ids + request.to(gl.int64) * table_stride
    if page_indptr is not None:
        ids = page_ids + gl.load(page_indptr + request)
    return ids


@gluon.jit
def _rows_before(share, query_indptr, num_whole, first, width, group):
    """Rows times heads that lie before those of a part, less its request's first. share: split, parts, piece, splits
    and their stride.
    """
    split, num_parts, piece, num_splits, split_stride = share
    offset = split.to(gl.int64) * split_stride
    if piece >= 0:
        offset = piece.to(gl.int64) * (width * group) + num_splits * split_stride - first * group
    elif num_parts > 1:
        offset -= _rows_of(query_indptr, num_whole, width)[0] * group
    return offset


_SHARES = ("pieces", "num_tiles", "bs", "num_whole", "num_splits", "most", "split_stride")


@gluon.jit(do_not_specialize=[*PLAIN, "partial_lse", "width", "group", *_SHARES])
def _attend(
    q,
    latents,
    query_indptr,
    page_indptr,
    page_ids,
    kv_lens,
    out,
    lse,
    partial_out,
    partial_lse,
    pieces,
    width,
    group,
    table_stride,
    num_tiles,
    bs,
    num_whole,
    num_splits,
    most,
    split_stride,
    score_scale,
    v_scale,
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """q and latents are (pointer, strides). width: rows of each request if query_indptr is None. group: heads.
    table_stride: elements between two rows of a table. num_tiles: of rows; the last see most keys and come first. bs to
    most: as of `share_of`. split_stride: rows between two splits, from the first divided request's on; pieces follow.
    """
    tile, batch = num_tiles - 1 - gl.program_id(0) % num_tiles + zero_in_turn(bs), (bs, num_whole, num_splits, most)
    request, split, num_parts, piece = share_of(gl.program_id(0) // num_tiles, kv_lens, batch, pieces, tile == 0)
    first, num_rows = _rows_of(query_indptr, request, width)
    num_keys = gl.load(kv_lens + request)
    start, end = _keys_of(split, gl.maximum(num_parts, 1), num_keys)
    if (tile * 64 >= num_rows * group) | (num_parts == 0) | ((num_parts > 1) & (start >= end)):
        return
    last = gl.minimum(tile * 64 + 63, num_rows * group - 1) // group
    end = gl.minimum(end, num_keys - (num_rows - 1 - last) * CAUSAL)
    ids = _pages_of(page_indptr, page_ids, request, table_stride)
    rows, keys_of = (tile, group, first, num_rows, num_keys), (start, end, gl.maximum(gl.cdiv(end - start, 128), 0))
    queries, blocks, peaks, full, free, handed = _memory(q[0].dtype.element_ty)
    gl.thread_barrier()
    _load_queries(q, queries, rows)
    share = (split, num_parts, piece, num_splits, split_stride)
    offset = _rows_before(share, query_indptr, num_whole, first, width, group)
    outputs = (out, partial_out + offset * 512, num_parts > 1)
    if num_parts > 1:
        lse = partial_lse + offset
    given = (queries, blocks, full, free, peaks, handed, rows, keys_of, score_scale, v_scale, None, None)
    gl.warp_specialize(
        [
            (gather_any, (blocks, full, free, latents[0], latents[1], ids, keys_of, PAGE_SIZE)),
            (even, (given, outputs, lse, CAUSAL)),
            (odd, (given, outputs, CAUSAL)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def latent_attention(
    q: Tensor,
    latents: Tensor,
    query_indptr: Tensor | None,
    page_indptr: Tensor | None,
    page_ids: Tensor,
    kv_lens: Tensor,
    max_query: int,
    max_kv_len: int,
    causal: bool,
    scale: float,
    k_scale: float,
    v_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """`paged_operators.latent_attention` on SM90."""
    num_tokens, num_heads, _ = q.shape
    bs, rows, processors = kv_lens.shape[0], max_query * num_heads, gpu_of(q.device).num_processors
    room = min(partial_lse.numel(), partial_out.numel() // RANK)
    batch = Batch(bs, rows, triton.cdiv(max_kv_len, BLOCK_KEYS), room)
    shares = share_requests(batch, processors)
    num_divided = bs - shares.num_whole
    split_stride = min(num_tokens, num_divided * max_query) * num_heads if shares.num_splits > 1 else 0
    at_once = processors // max(batch.tiles, 1)
    most = most_pieces(bs, batch.blocks, at_once, rows, room - shares.num_splits * split_stride)
    pieces = kv_lens.new_empty(bs) if most else kv_lens
    out, lse = q.new_empty(num_tokens, num_heads, RANK), q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    shape = (max_query, num_heads, page_ids.stride(0), batch.tiles, bs, *shares, most, split_stride)
    scales = (scale * k_scale * _LOG2_E, v_scale)
    tensors = (q, latents, query_indptr, page_indptr, page_ids, kv_lens, out, lse, partial_out, partial_lse, pieces)
    num_units = shares.num_whole + num_divided * shares.num_splits + most
    form = form_of(LATENT, latents.element_size(), latents.shape[1], num_heads, max_query, processors)
    _launch(tensors, num_units * batch.tiles, shape, scales, causal, latents.shape[1], form.registers)
    parts = Parts(partial_out, partial_lse, *shares, split_stride, most, pieces)
    if shares.num_splits > 1 or most:
        merge(parts, query_indptr, kv_lens, (out, lse), max_query, BLOCK_KEYS, causal, (None, None, None))
    return out, lse


def _call(
    tensors: Sequence[Any],
    num_programs: int,
    shape: tuple[int, ...],
    scales: tuple[float, float],
    causal: bool,
    page_size: int,
    registers: int,
) -> Call:
    q, latents, *rest = tensors
    arguments = (*strided((q, latents)), *rest, *shape, *scales)
    constants = {"CAUSAL": causal, "PAGE_SIZE": page_size, "REGISTERS": registers}
    return Call((num_programs,), arguments, {**constants, "num_warps": 4})


_launch = DirectLaunch(_attend, _call)
