"""Attention by definition: float64, row by row, over the list of tokens that a row must see. Knows no metadata."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """One row. q: [num_heads, dim]. keys, values: of each visible token, [num_kv_heads, dim] each. Returns out
    [num_heads, v_dim] and lse [num_heads], in q's dtype.
    """
    group = q.shape[0] // keys[0].shape[0]
    k, v = (torch.stack(list(x)).repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,nhd->nh", q, k) * scale
    return torch.einsum("nh,nhd->hd", scores.softmax(dim=0), v), scores.logsumexp(dim=0)


def assert_near(actual: Tensor, exact: Tensor, rounded: Tensor) -> None:
    """Compare with the float64 oracle. rounded: the oracle's arithmetic in the actual dtype, whose error is the budget.

    The budget is twice that error, largest over the case, plus one rounding step of the largest number.
    """
    assert actual.shape == exact.shape, f"shape {list(actual.shape)}, expected {list(exact.shape)}"
    if actual.numel() == 0:
        return
    step = torch.finfo(actual.dtype).eps * float(exact.abs().max())
    budget = 2 * float((rounded.double() - exact).abs().max()) + 4 * step
    error = (actual.double() - exact).abs()
    assert bool((error <= budget).all()), f"error {float(error.max()):.3g} over the budget of {budget:.3g} (NaN counts)"
