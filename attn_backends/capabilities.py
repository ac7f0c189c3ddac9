"""What a kernel of a backend can do, as one record that selection, refusal, documentation and the tests share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch

from attn_backends.layer import AttentionLayer
from spec_metadata import PackedQuery, Step

FLOAT_TYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class LseBase(StrEnum):
    """The base of the log-sum-exp that a kernel returns."""

    NATURAL = "e"
    TWO = "2"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one (backend, kernel, step kind) supports. None in a field means no limit.

    page_sizes: tokens. max_width: query rows of a request. packed: query layouts of differing lengths. non_causal: can
    show every row all keys. lse: base of the returned log-sum-exp, None if there is none. head_sizes: (query-key,
    value) sizes. max_query_heads: local query heads. dtypes: of queries and cache. graph: can be captured at a uniform
    width. needs_host_lens: its planning needs exact lengths on the host. over_read: may read keys of a visible page
    that the request does not see (it multiplies them by zero, so they must be finite). window, sinks, kv_scales: what
    of a layer's extras it implements.
    """

    page_sizes: frozenset[int] | None
    dtypes: frozenset[torch.dtype]
    head_sizes: frozenset[tuple[int, int]] | None = None
    max_query_heads: int | None = None
    max_width: int | None = None
    packed: bool = False
    non_causal: bool = False
    lse: LseBase | None = None
    graph: bool = True
    needs_host_lens: bool = False
    over_read: bool = False
    window: bool = False
    sinks: bool = False
    kv_scales: bool = False

    @property
    def tree(self) -> bool:
        """Trees need the prefix seen by every row, and a log-sum-exp to join the drafted tokens to it."""
        return self.non_causal and self.lse is not None

    def step_reasons(self, step: Step) -> list[str]:
        """Why a step is not supported; empty if it is."""
        reasons = []
        if isinstance(step.query, PackedQuery) and not self.packed:
            reasons.append(f"packed query lengths {step.query.lens_cpu} (it takes one uniform width)")
        if self.max_width is not None and step.width > self.max_width:
            reasons.append(f"{step.width} query rows a request (at most {self.max_width})")
        if step.is_tree and not self.tree:
            reasons.append("a draft tree (it needs a non-causal kernel that returns a log-sum-exp)")
        page_size = step.paging.geometry.page_size
        if self.page_sizes is not None and page_size not in self.page_sizes:
            reasons.append(f"page size {page_size} (it takes {_listed(self.page_sizes)})")
        return reasons

    def layer_reasons(self, layer: AttentionLayer, dtype: torch.dtype) -> list[str]:
        """Why a layer is not supported in a dtype; empty if it is."""
        reasons = []
        if dtype not in self.dtypes:
            reasons.append(f"{dtype} (it takes {_listed(str(d) for d in self.dtypes)})")
        sizes = (layer.head_dim, layer.v_head_dim)
        if self.head_sizes is not None and sizes not in self.head_sizes:
            reasons.append(f"head sizes {sizes} (it takes {_listed(self.head_sizes)})")
        if self.max_query_heads is not None and layer.num_heads > self.max_query_heads:
            reasons.append(f"{layer.num_heads} query heads (at most {self.max_query_heads})")
        if layer.window is not None and not self.window:
            reasons.append(f"a sliding window of {layer.window} tokens")
        if layer.sinks is not None and not self.sinks:
            reasons.append("attention sinks")
        if (layer.k_scale, layer.v_scale) != (1.0, 1.0) and not self.kv_scales:
            reasons.append(f"scaled keys or values (k_scale={layer.k_scale}, v_scale={layer.v_scale})")
        return reasons


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, sorted(values)))  # type: ignore[type-var]
