"""Capabilities of a kernel, in one record that selection, refusals, documentation and tests share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from attn_backends.cache import CacheFormat
from attn_backends.kernels.torch_attention import SINK_TYPES
from attn_backends.layer import AttentionLayer
from spec_metadata import BoundedQuery, Bucket, PackedQuery, Step, StepKind, TokenBucket, UniformQuery
from spec_metadata.capacity import PACKED_KINDS, UNIFORM_KINDS

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
FLOAT_TYPES = frozenset(DTYPES.values())
FP8_TYPES = frozenset({torch.float8_e4m3fn})


class LseBase(StrEnum):
    """The base of the log-sum-exp that a kernel returns."""

    NATURAL = "e"
    TWO = "2"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits and features of a kernel for one step kind. None in a field means no limit.

    page_sizes: tokens. max_width: query rows of a request. packed: query layouts of differing lengths. non_causal: can
    show every row all keys. lse: base of the returned log-sum-exp, None if there is none. head_sizes: (query-key,
    value) sizes. query_heads: numbers of local query heads. dtypes: of queries and cache. cache_dtypes: of the cache
    beside the query's own, such as float8_e4m3fn with a scale for keys and one for values. own_cache: it takes a cache
    of the query's own type. graph: can be captured at a uniform width. packed_graph: can be captured over packed rows:
    of their lengths its launch takes bounds alone from the host, and requests may have no row. A verify or draft
    extend with both is taken ragged too, its widths known to the device alone.
    needs_host_lens: its planning needs exact lengths on the host. over_read: may read keys of a visible page that the
    request does not see (it multiplies them by zero, so they must be finite). rounded_lse: its log-sum-exp counts
    softmax weights that were rounded to the query's type. window, sinks, kv_scales: which parts of a layer's extras it
    implements; tree_window: a window over a draft tree too, whose rows differ in the first key of the prefix that they
    see. Sinks over a tree are counted where its parts are joined; the log-sum-exp is of keys alone everywhere.
    sink_types, most_sinks: types and number of the sinks that it takes. sinks_in_lse: the log-sum-exp beside them would
    count them, so that it declares none there (`lse_of`).
    """

    page_sizes: frozenset[int] | None
    dtypes: frozenset[torch.dtype]
    head_sizes: frozenset[tuple[int, int]] | None = None
    query_heads: frozenset[int] | None = None
    max_width: int | None = None
    packed: bool = False
    non_causal: bool = False
    lse: LseBase | None = None
    graph: bool = True
    packed_graph: bool = False
    needs_host_lens: bool = False
    over_read: bool = False
    window: bool = False
    tree_window: bool = False
    sinks: bool = False
    sink_types: frozenset[torch.dtype] = SINK_TYPES
    most_sinks: int | None = None
    sinks_in_lse: bool = False
    kv_scales: bool = False
    cache_dtypes: frozenset[torch.dtype] = frozenset()
    own_cache: bool = True
    rounded_lse: bool = False

    @property
    def tree(self) -> bool:
        """Trees need the prefix seen by every row, and a log-sum-exp to join the drafted tokens to it."""
        return self.non_causal and self.lse is not None

    def lse_of(self, layer: AttentionLayer, *, is_tree: bool) -> LseBase | None:
        """Base of the log-sum-exp of a layer's outputs, None if there is none. That of a tree counts no sinks."""
        return None if self.sinks_in_lse and layer.sinks is not None and not is_tree else self.lse

    @property
    def captures_packed(self) -> bool:
        """A graph of packed rows can't hold what is planned on the host from their exact lengths."""
        return self.packed and self.packed_graph and not self.needs_host_lens

    def step_reasons(self, step: Step) -> list[str]:
        """Reasons why a step is not supported; empty if it is."""
        reasons = self.kind_reasons(step.kind)
        if not isinstance(step.query, UniformQuery) and not self.packed:
            lens = f"lengths {step.query.lens_cpu}" if isinstance(step.query, PackedQuery) else "rows"
            reasons.append(f"packed query {lens} (it takes one uniform width)")
        elif isinstance(step.query, BoundedQuery) and not self.captures_packed:
            reasons.append("widths that the device alone knows (its launch takes exact lengths from the host)")
        reasons += self.width_reasons(step.width, step.is_tree)
        return reasons + self.page_reasons(step.paging.geometry.page_size)

    def kind_reasons(self, kind: StepKind) -> list[str]:
        """Reasons why no step of a kind is supported, though the kind is declared; empty if they are."""
        if kind is StepKind.DRAFT_BLOCK and not self.non_causal:
            what = "a draft block, whose rows see those after them"
            return [f"{what} (it needs a non-causal kernel: take one, or draft token by token)"]
        return []

    def width_reasons(self, width: int, is_tree: bool) -> list[str]:
        """Reasons why so many query rows of a request, of a tree or not, are not supported; empty if they are."""
        reasons = []
        if self.max_width is not None and width > self.max_width:
            reasons.append(f"{width} query rows per request (at most {self.max_width})")
        if is_tree and not self.tree:
            reasons.append("a draft tree (it needs a non-causal kernel that returns a log-sum-exp)")
        return reasons

    def page_reasons(self, page_size: int) -> list[str]:
        """Reasons why a page size is not supported; empty if it is."""
        if self.page_sizes is not None and page_size not in self.page_sizes:
            return [f"page size {page_size} (it takes {listed(self.page_sizes)})"]
        return []

    def capture_reasons(self, bucket: Bucket | TokenBucket) -> list[str]:
        """Reasons why no graph can hold steps of a bucket; empty if one can."""
        if isinstance(bucket, Bucket):
            return [] if self.graph else ["can't be captured"]
        why = ": it plans on the host from their exact lengths" if self.needs_host_lens else ""
        return [] if self.captures_packed else [f"can't be captured over packed rows{why}"]

    def layer_reasons(self, layer: AttentionLayer, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[str]:
        """Reasons why a layer is not supported with queries and a cache of these types; empty if it is."""
        reasons = []
        if dtype not in self.dtypes:
            reasons.append(f"queries or rows of {dtype} (it takes {listed(str(d) for d in self.dtypes)})")
        elif cache_dtype not in (allowed := self.cache_dtypes | ({dtype} if self.own_cache else set())):
            takes = listed(str(d) for d in allowed)
            reasons.append(f"a cache of {cache_dtype} under queries of {dtype} (it takes {takes})")
        sizes = (layer.head_dim, layer.v_head_dim)
        if self.head_sizes is not None and sizes not in self.head_sizes:
            reasons.append(f"head sizes {sizes} (it takes {listed(self.head_sizes)})")
        if self.query_heads is not None and layer.num_heads not in self.query_heads:
            reasons.append(f"{layer.num_heads} query heads (it takes {listed(self.query_heads)})")
        if layer.window is not None and not self.window:
            reasons.append(f"a sliding window of {layer.window} tokens (it takes none)")
        if layer.sinks is not None and not self.sinks:
            reasons.append("attention sinks (it takes none)")
        elif layer.sinks is not None and layer.sinks.dtype not in self.sink_types:
            reasons.append(f"attention sinks of {layer.sinks.dtype} (it takes {listed(map(str, self.sink_types))})")
        elif layer.sinks is not None and layer.num_heads > (self.most_sinks or layer.num_heads):
            reasons.append(f"attention sinks of {layer.num_heads} query heads (it takes at most {self.most_sinks})")
        if (layer.k_scale, layer.v_scale) != (1.0, 1.0) and not self.kv_scales:
            reasons.append(f"scaled keys or values (k_scale={layer.k_scale}, v_scale={layer.v_scale}; it takes 1)")
        return reasons

    def tree_reasons(self, layer: AttentionLayer) -> list[str]:
        """Reasons why a layer is not supported over a draft tree, beside `layer_reasons`; empty if it is."""
        if layer.window is None or not self.window or self.tree_window:
            return []
        return [
            f"a sliding window of {layer.window} tokens over a draft tree (rows of other depths begin at other keys of "
            "the prefix, and it takes one window for all: draft chains, or take a kernel with tree_window)"
        ]


TORCH = Capabilities(
    page_sizes=None,
    dtypes=FLOAT_TYPES,
    cache_dtypes=FP8_TYPES,
    non_causal=True,
    lse=LseBase.NATURAL,
    window=True,
    tree_window=True,
    sinks=True,
    kv_scales=True,
)
"""What attention in torch can do with rows of one width."""


def of_dense(uniform: Capabilities) -> dict[StepKind, Capabilities]:
    """Capabilities of a dense kernel, by step kind: prompts, verifies and draft extends may be packed, too."""
    packed = replace(uniform, packed=True, packed_graph=True)
    return dict.fromkeys((StepKind.PREFILL, *UNIFORM_KINDS), uniform) | dict.fromkeys(PACKED_KINDS, packed)


def of_listed(able: Capabilities) -> dict[StepKind, Capabilities]:
    """Capabilities of a kernel that gets the visible slots of each row, by step kind: non-causal in draft blocks."""
    kinds = dict.fromkeys((StepKind.PREFILL, *UNIFORM_KINDS), able)
    return kinds | {StepKind.DRAFT_BLOCK: replace(able, non_causal=True)}


def extras_reasons(layer: AttentionLayer, format: object) -> list[str]:
    """Reasons why a layer's extras do not go with a cache's format, whatever the kernel; empty if they do."""
    reasons = []
    if format is CacheFormat.LATENT and layer.sinks is not None:
        reasons.append("attention sinks on latents (they take none)")
    if format is CacheFormat.LATENT and layer.k_scale != layer.v_scale:
        reasons.append(
            f"k_scale={layer.k_scale} and v_scale={layer.v_scale} on latents, which are key and value at once"
        )
    return reasons


def listed(values: Iterable[object]) -> str:
    """Values in order, a run of whole numbers by its ends."""
    known: list[Any] = sorted(values)
    if len(known) > 2 and all(isinstance(x, int) for x in known) and known[-1] - known[0] == len(known) - 1:
        return f"{known[0]} to {known[-1]}"
    return ", ".join(map(str, known))
