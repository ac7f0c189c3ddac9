"""Three counts in one int64, so that one reduction sums all of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(high, middle, low, BITS: tl.constexpr):
    """The number. middle, low, and their sums: below 2 ** BITS. high: below what is left of 63 bits."""
    return (high.to(tl.int64) << 2 * BITS) + (middle.to(tl.int64) << BITS) + low


@triton.jit
def unpack(packed, BITS: tl.constexpr):
    """The three of `pack`, or the sums of each."""
    high, upper = packed >> 2 * BITS, packed >> BITS
    return high.to(tl.int32), (upper - (high << BITS)).to(tl.int32), (packed - (upper << BITS)).to(tl.int32)
