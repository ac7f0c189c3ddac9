"""Attention by definition, row by row over the list of tokens that a row must see, and budgets that come from data.

Knows no metadata.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, weights: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """One row. q: [num_heads, dim]. keys, values: of the visible tokens, [num_tokens, num_kv_heads, dim] each. weights:
    type that the softmax weights are rounded to before they are summed, as kernels on tensor cores do (None: q's).
    Returns out [num_heads, v_dim] and lse [num_heads], in q's dtype.
    """
    grouped = q.unflatten(0, (keys.shape[1], -1))
    scores = torch.einsum("kgd,nkd->nkg", grouped, keys).flatten(1) * scale
    lse = scores.logsumexp(dim=0)
    probabilities = (scores - lse).exp()  # through the log-sum-exp, as parts of a tree are joined
    rounded = probabilities.to(weights or q.dtype).to(q.dtype)
    of_heads = rounded.unflatten(1, (keys.shape[1], -1))
    return torch.einsum("nkg,nkd->kgd", of_heads, values).flatten(0, 1), lse


def rounded_lse(q: Tensor, keys: Tensor, scale: float, weights: torch.dtype) -> Tensor:
    """The LSE [num_heads] of a row whose softmax weights, the largest 1, are rounded to a type before they are counted.

    q, keys: as in `attend`.
    """
    scores = torch.einsum("kgd,nkd->nkg", q.unflatten(0, (keys.shape[1], -1)), keys).flatten(1) * scale
    peak = scores.amax(dim=0)
    return peak + (scores - peak).exp().to(weights).to(q.dtype).sum(dim=0).log()


def truncation(dim: int, largest: float) -> float:
    """Largest error of a score on a tensor core: it cuts off its float32 sum, not rounds it, after every 16 products.

    dim: elements of a head. largest: bound on the sum of a score's products, each without its sign.
    """
    return -(-dim // 16) * torch.finfo(torch.float32).eps * largest


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The row's output with a key without value added for each head: it takes its share and gives nothing."""
    return out * (lse - torch.logaddexp(lse, sinks.to(lse.dtype))).exp().unsqueeze(1)


def budget(exact: Tensor, rounded: Tensor, dtype: torch.dtype) -> float:
    """Largest allowed error of an output of `dtype`: twice the largest error over the case of the reference in that
    precision, plus one rounding step of the largest number.

    rounded: what the reference gives. For float64 it is the reference in float32, with its error scaled to float64, and
    the budget is eight times as large. There the oracle is no more exact than what is compared with it, matrix products
    round differently on another processor, and no mistake is that small. For float32 it is four times as large. A
    processor sums the products of a head in some sixteen lanes, a kernel on a GPU one after the other. The error of a
    sum grows like the root of what it adds up.
    """
    if exact.numel() == 0:
        return 0.0
    step = torch.finfo(dtype).eps * float(exact.abs().max())
    if dtype is not torch.float64:
        by_reference = 2 * float((rounded.to(dtype).double() - exact).abs().max()) + step
        return 4 * by_reference if dtype is torch.float32 else by_reference
    error = float((rounded.double() - exact).abs().max()) * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    return 8 * (2 * error + step)
