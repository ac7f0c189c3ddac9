"""The 8-bit page format of DeepSeek-V4's key-value rows, which FlashMLA's sparse kernel reads: 584 bytes a row.

A row of 512 is 448 elements as float8_e4m3fn, in seven groups of 64 that have a power of two as scale each, and 64
rotated ones as bfloat16. A page of n rows is n times 576 bytes of elements, then n times 8 bytes of scales (seven
exponents and a zero), and then nothing up to a multiple of 576.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP, NUM_GROUPS, ROPE = 64, 7, 64
NOPE = GROUP * NUM_GROUPS
ROW_DIM = NOPE + ROPE
DATA_BYTES, SCALE_BYTES = NOPE + 2 * ROPE, NUM_GROUPS + 1
ROW_BYTES = DATA_BYTES + SCALE_BYTES
LARGEST = 448.0  # of float8_e4m3fn
_LEAST = 1e-4  # a group of smaller elements has the scale of this one
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23  # of float32


def page_bytes(num_rows: int) -> int:
    """Bytes of a page of so many rows."""
    return -(-num_rows * ROW_BYTES // DATA_BYTES) * DATA_BYTES


def quantise(rows: Tensor) -> Tensor:
    """[..., 584] bytes of rows [..., 512]: the elements, then the scales."""
    nope, rope = rows.float().split([NOPE, ROPE], dim=-1)
    groups = nope.unflatten(-1, (NUM_GROUPS, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(dim=-1).clamp_min(_LEAST) / LARGEST)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
    elements = (groups / _power(exponent).unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    scales = torch.nn.functional.pad((exponent + _EXPONENT_BIAS).to(torch.uint8), (0, 1))
    return torch.cat((elements.view(torch.uint8), rope.to(torch.bfloat16).view(torch.uint8), scales), dim=-1)


def dequantise(bytes: Tensor) -> Tensor:
    """[..., 512] float32 rows of their bytes [..., 584], contiguous."""
    elements, rope, scales, _ = bytes.split([NOPE, 2 * ROPE, NUM_GROUPS, 1], dim=-1)
    nope = elements.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (NUM_GROUPS, GROUP))
    nope = nope * _power(scales.int() - _EXPONENT_BIAS).unsqueeze(-1)
    return torch.cat((nope.flatten(-2), rope.contiguous().view(torch.bfloat16).float()), dim=-1)


def byte_offsets(offset: Tensor, num_rows: int) -> Tensor:
    """[..., 584] int64: where in a page of `num_rows` the bytes of row `offset` [...] lie."""
    data = offset.unsqueeze(-1) * DATA_BYTES + torch.arange(DATA_BYTES, device=offset.device)
    scales = offset.unsqueeze(-1) * SCALE_BYTES + torch.arange(SCALE_BYTES, device=offset.device)
    return torch.cat((data, scales + num_rows * DATA_BYTES), dim=-1)


def _power(exponent: Tensor) -> Tensor:
    """Two to the power of an integer in [-126, 127], exactly, by its float32 bits."""
    return ((exponent + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)
