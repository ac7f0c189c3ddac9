"""One attention layer as a kernel sees it, and what a kernel returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.torch_attention import SINK_TYPES


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionLayer:
    """An attention layer on this rank (tensor parallelism is local heads).

    id: index of its cache. num_heads, num_kv_heads: local query and KV heads; 1 KV head for absorbed MLA. head_dim,
    v_head_dim: elements of a query-key and a value head; absorbed MLA has (rank + rope, rank), such as (576, 512).
    scale: multiplies query·key, above 0; for MLA that of the heads before absorption. group: cache group. window: keys
    that a row sees at most, itself included (None: all). sinks: [num_heads] of `SINK_TYPES`, of each query head the
    logit of a key without value, to which scale is not applied; -inf for no sink. No kernel rounds them: it refuses a
    type that it does not take. k_scale, v_scale: stored = value / scale; from 2**-63 to 2**63, half of float32's
    exponents, which leaves the other half to the values. Raises `UnsupportedStepError` for sizes, scales and sinks that
    can't be.
    """

    id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    group: str = "full"
    window: int | None = None
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")}
        counts |= {} if self.window is None else {"window": self.window}
        scales = {name: getattr(self, name) for name in ("scale", "k_scale", "v_scale")}
        reasons = [f"{name} is {x!r}, not a positive integer" for name, x in counts.items() if not _is_count(x)]
        reasons += [f"{name} is {x!r}, not a finite number" for name, x in scales.items() if not _is_real(x)]
        if not reasons:
            divisors = {"k_scale": self.k_scale, "v_scale": self.v_scale}
            reasons += [f"{name} is {x!r}, not from 2**-63 to 2**63" for name, x in divisors.items() if not _divides(x)]
            reasons += _scale_reasons(self.scale, self.k_scale)
        if not reasons and self.num_heads % self.num_kv_heads:
            reasons.append(f"{self.num_heads} query heads can't share {self.num_kv_heads} KV heads evenly")
        if not reasons and self.sinks is not None:
            reasons += _sinks_reasons(self.sinks, self.num_heads)
        if reasons:
            raise UnsupportedStepError(f"layer {self.id}", reasons)


class LatentQuery(NamedTuple):
    """An absorbed MLA query in its two parts, as models compute them: a kernel that takes them so spares the copy that
    joins them. latent: [num_tokens, num_heads, rank]. rope: [num_tokens, num_heads, rope], of the same dtype.
    """

    latent: Tensor
    rope: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of both parts, joined in their last dimension."""
        return torch.Size((*self.rope.shape[:-1], self.latent.shape[-1] + self.rope.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        """Type of both parts."""
        return self.rope.dtype


def joined(q: Tensor | LatentQuery) -> Tensor:
    """A query as one tensor, [num_tokens, num_heads, head_dim]."""
    # torch copies dense parts several times as fast as views, and the rotated part is one in vLLM
    return torch.cat((q.latent, q.rope.contiguous()), dim=-1) if isinstance(q, LatentQuery) else q


def query_reasons(q: Tensor | LatentQuery, num_rows: int, layer: AttentionLayer) -> list[str]:
    """Reasons why a query, or its parts, is not [num_rows, num_heads, head_dim] of a layer; empty if it is."""
    expected = (num_rows, layer.num_heads, layer.head_dim)
    if q.shape != expected:
        return [f"q is {list(q.shape)}, not {list(expected)}"]
    if isinstance(q, LatentQuery):
        latent, size = q.latent, (*expected[:2], layer.v_head_dim)
        if latent.shape != size or latent.dtype is not q.dtype:
            given = f"{list(latent.shape)} {latent.dtype}"
            return [f"q.latent is {given}, not {list(size)} {q.dtype}, as q.rope and the layer say"]
    return []


class AttentionOutput(NamedTuple):
    """out: [num_tokens, num_heads, v_head_dim], the query's dtype. lse: [num_tokens, num_heads] float32 (float64 for
    float64 queries), natural logarithm of the sum of exp(scale * query·key) over the keys that the row sees.

    It never counts a layer's sinks, as FlashMLA's does not: so outputs over disjoint keys can be joined by it, and the
    sink counted once, then. Where a kernel declares none (`Capabilities.lse_of`) it may hold anything.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def of_no_rows(cls, q: Tensor, v_head_dim: int) -> Self:
        """The output for queries [0, num_heads, head_dim]."""
        lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        return cls(q.new_empty(*q.shape[:2], v_head_dim), q.new_empty(q.shape[:2], dtype=lse_dtype))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _sinks_reasons(sinks: object, num_heads: int) -> list[str]:
    given = repr(sinks)
    if isinstance(sinks, Tensor):
        if tuple(sinks.shape) == (num_heads,) and sinks.dtype in SINK_TYPES:
            return []
        given = f"{list(sinks.shape)} {sinks.dtype}"
    return [f"sinks are {given}, not [{num_heads}] float32, bfloat16 or float16, a logit of each query head"]


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _divides(value: float) -> bool:
    return 2.0**-63 <= value <= 2.0**63


def _scale_reasons(scale: float, k_scale: float) -> list[str]:
    """Why kernels can't multiply scores, to the base of two, with one float32 for both scales; empty if they can."""
    if scale <= 0:
        return [f"scale is {scale!r}, not above 0 (kernels scale the largest score, and look for no other)"]
    product, limits = scale * k_scale * math.log2(math.e), torch.finfo(torch.float32)
    if limits.tiny <= product <= limits.max:
        return []
    return [
        f"scale * k_scale is {scale * k_scale:g}; times log2(e), as kernels multiply by it, it leaves float32's range"
    ]
