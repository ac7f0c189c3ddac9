"""One attention layer as a kernel sees it, and what a kernel returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from attn_backends.errors import UnsupportedStepError


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """An attention layer on this rank (tensor parallelism is local heads).

    id: index of its cache. num_heads, num_kv_heads: local query and KV heads; 1 KV head for absorbed MLA. head_dim,
    v_head_dim: elements of a query-key and a value head; absorbed MLA has (rank + rope, rank), such as (576, 512).
    scale: multiplies query·key; for MLA that of the heads before absorption. group: cache group. window: keys that a
    row sees at most, itself included (None: all). sinks: [num_heads] float32 logits of a key without value. k_scale,
    v_scale: stored = value / scale.
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
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedStepError(
                f"layer {self.id}", [f"{self.num_heads} query heads can't share {self.num_kv_heads} KV heads evenly"]
            )


class AttentionOutput(NamedTuple):
    """out: [num_tokens, num_heads, v_head_dim], the query's dtype. lse: [num_tokens, num_heads] float32 (float64 for
    float64 queries), natural logarithm of the sum of exp(scale * query·key) over the keys that the row sees.
    """

    out: Tensor
    lse: Tensor
