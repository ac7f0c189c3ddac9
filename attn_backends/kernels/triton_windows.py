"""Sliding windows and attention sinks, as the Triton kernels of dense attention have them in common.

window, drafted, sinks: None for none, and then nothing is compiled for it. Of what a row sees, it attends to the last
`window` keys. drafted: what each row sees after the keys that a kernel reads, which its window counts too; below zero,
how many of these keys come after the row's own (`paged_operators`). sinks: a logit of each head, whose weight joins the
sum of a row's weights once, and not its log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def window_start(num_keys, num_rows, window, drafted, CAUSAL: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """First key of the block in which the first window of a request's rows begins, or of one before it."""
    if window is None:
        start = 0
    else:
        end = num_keys if drafted is None and not CAUSAL else num_keys - (num_rows - 1)
        start = tl.maximum(end - window, 0) // BLOCK_KEYS * BLOCK_KEYS
    return start


@triton.jit
def first_keys(num_seen, token, real, num_keys, window, drafted):
    """First key in the window of each row; of rows that are not real the end of all keys. num_seen: keys that rows see.
    token: the rows.
    """
    behind = 0 if drafted is None else tl.load(drafted + token, mask=real, other=0)
    return tl.where(real, tl.maximum(num_seen + behind - window, 0), num_keys)


@triton.jit
def sink_weights(sinks, head, live, peak):
    """Weights of sinks in the softmax sums of rows whose largest logit, natural, is `peak`."""
    return tl.exp(tl.load(sinks + head, mask=live, other=float("-inf")).to(tl.float32) - peak)


def dense(tensor: Tensor | None) -> Tensor | None:
    """The tensor, elements beside each other."""
    return None if tensor is None else tensor.contiguous()
