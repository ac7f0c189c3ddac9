"""The rows of a tile of `triton_decode`: queries that are loaded, outputs that are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn_backends.kernels.triton_windows import sink_weights

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_LEAST = tl.constexpr(2.0**-63)  # below the weights of a row that sees a key; the largest scale over it is finite
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def elements(entry, stride, live, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Elements FIRST to FIRST + DIM of live entries, 0 elsewhere: other memory may hold NaN."""
    dim = tl.arange(0, BLOCK)
    mask = live[:, None]
    if DIM < BLOCK:
        mask = mask & (dim < DIM)[None, :]
    return tl.load(entry[:, None] + (FIRST + dim)[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def load_queries(
    q,
    token,
    head,
    real,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DOT: tl.constexpr,
):
    """The elements of rows that are multiplied with the main ones of a key, and with its rest."""
    row = q[0] + token * q[1][0] + head * q[1][1]
    rest = elements(row, q[1][2], real, DIM, REST, BLOCK_REST).to(DOT)
    return elements(row, q[1][2], real, 0, DIM, BLOCK_DIM).to(DOT), rest


@triton.jit
def _store(state, out, lse, place, head, real, sinks, v_scale, V_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr):
    """Outputs and log-sum-exps of rows. place: of a row of a head. sinks: None where they are not due yet."""
    summed, total, peak = state
    tl.store(lse + place, (peak + tl.log2(total)) * _LN_2, mask=real)
    if sinks is not None:
        total += sink_weights(sinks, head, real, tl.maximum(peak, _LOWEST) * _LN_2)
    result = summed * (v_scale / tl.maximum(total, _LEAST))[:, None]
    dim = tl.arange(0, BLOCK_V_DIM)
    written = real[:, None] & (dim < V_DIM)[None, :]
    tl.store(out + place[:, None] * V_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=written)


@triton.jit
def write_rows(state, into, place, head, real, sinks, v_scale, V_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr):
    """Rows of a request that is not divided, or of a part. into: outputs and log-sum-exps, then those of parts. place:
    of a row of a head, parts of its request, and rows times heads before it among those of parts. sinks: of what is not
    divided.
    """
    row, num_parts, before = place
    out, lse, partial_out, partial_lse = into
    if num_parts == 1:
        _store(state, out, lse, row, head, real, sinks, v_scale, V_DIM, BLOCK_V_DIM)
    else:
        _store(state, partial_out, partial_lse, row + before, head, real, None, v_scale, V_DIM, BLOCK_V_DIM)
