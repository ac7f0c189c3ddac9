"""Mutants of sliding windows and attention sinks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import backend as base
from attn_backends.backend import AttentionBackend
from attn_backends.backends import fa3
from attn_backends.kernels import torch_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.memory import static_memory
from spec_metadata import BlockTable, BufferSpec, Extent, Paging, StepKind
from spec_metadata.visibility import TreePart
from tests.mutants.mutant import mutant


@mutant("SGLang #39287: a verify's clipped prefix gathered from offset 0", "math.window", "math.window_and_sinks")
def window_clipped_from_offset_zero(patch: pytest.MonkeyPatch) -> None:
    """A window has the right number of keys, but the first ones of the request."""
    over_pages = torch_attention._over_pages

    def clipped(q: Tensor, lens: Tensor, k: Tensor, v: Tensor, pages: Tensor, kv_lens: Tensor, *rest: Any) -> Any:
        window = rest[-1].window
        kv_lens = kv_lens if window is None else kv_lens.clamp(max=window + q.shape[1] - 1)
        return over_pages(q, lens, k, v, pages, kv_lens, *rest)

    patch.setattr(torch_attention, "_over_pages", clipped)


@mutant("SGLang #26513: a prefill on a cached prefix ignores the window", "math.window")
def prefill_drops_the_window(patch: pytest.MonkeyPatch) -> None:
    """Packed rows attend to all keys."""
    ragged = torch_attention._ragged_over_pages

    def whole(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, pages: Tensor, lens: Tensor, most: int, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        is_packed = len(q) < len(lens) * most
        extras = rest[-1]._replace(window=None) if is_packed else rest[-1]
        return ragged(q, k, v, starts, pages, lens, most, *rest[:-1], extras)

    patch.setattr(torch_attention, "_ragged_over_pages", whole)


def drop_past_256_keys(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let attention lose what goes beyond plain where tables hold more than 256 keys."""
    over_pages = torch_attention._over_pages

    def dropped(q: Tensor, lens: Tensor, k: Tensor, v: Tensor, pages: Tensor, *rest: Any) -> Any:
        is_long = pages.shape[1] * k.shape[1] > 256
        return over_pages(q, lens, k, v, pages, *rest[:-1], rest[-1]._replace(**(changes if is_long else {})))

    patch.setattr(torch_attention, "_over_pages", dropped)


@mutant("our own: no window met more than 75 keys", "math.window", "math.window_and_sinks")
def window_dropped_past_256_keys(patch: pytest.MonkeyPatch) -> None:
    """A window is ignored where the table holds more than 256 keys."""
    drop_past_256_keys(patch, window=None)


@mutant("our own: no scale met more than 124 keys", "math.kv_scales", "math.cache_types")
def scales_dropped_past_256_keys(patch: pytest.MonkeyPatch) -> None:
    """Scales of keys and values are ignored where the table holds more than 256 keys."""
    drop_past_256_keys(patch, k_scale=1.0, v_scale=1.0)


@mutant("our own: the window of a tree's rows", "math.window")
def window_by_the_row_and_not_its_depth(patch: pytest.MonkeyPatch) -> None:
    """A node's window in the prefix begins where its number in the tree puts it, as in a chain."""
    windowed = fa3.windowed

    def by_row(window: int | None, drafted: Any) -> tuple[int | None, Tensor | None]:
        window, depths = windowed(window, drafted)
        if depths is not None and isinstance(drafted, Tensor):
            depths = torch.arange(1, drafted.shape[1] + 1, dtype=torch.int32, device=drafted.device).repeat(
                len(drafted)
            )
        return window, depths

    patch.setattr(fa3, "windowed", by_row)


@mutant("our own: a window shorter than a tree is deep", "math.window")
def window_of_the_prefix_alone(patch: pytest.MonkeyPatch) -> None:
    """A node sees all its ancestors, those before its window too."""
    patch.setattr(TreePart, "within", lambda self, window: self.mask)


@mutant("parts of a softmax that each count the sink", "math.sinks", "math.window_and_sinks")
def sinks_counted_twice_in_a_tree(patch: pytest.MonkeyPatch) -> None:
    """The prefix of a tree takes the sink's share out, and so does the join."""
    patch.setattr(base, "replace", lambda value, **changes: value if "sinks" in changes else replace(value, **changes))


@mutant("a merge that leaves the sink to the parts", "math.sinks")
def sinks_dropped_in_a_tree(patch: pytest.MonkeyPatch) -> None:
    """The join of a tree knows no sink, and its parts have none."""
    join = base.tree_join
    patch.setattr(base, "tree_join", lambda *arguments: join(*arguments[:10]))


@mutant("FlashAttention-3's and FlashInfer's meaning of it", "math.sinks")
def lse_counts_the_sink(patch: pytest.MonkeyPatch) -> None:
    """The log-sum-exp is that of the keys and the sink."""
    forward = AttentionBackend.forward

    def counted(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        out, lse = forward(self, q, cache, meta, layer)
        return AttentionOutput(out, lse if layer.sinks is None else torch.logaddexp(lse, layer.sinks.to(lse.dtype)))

    patch.setattr(AttentionBackend, "forward", counted)


@mutant("a kernel for windows beside one for sinks", "math.window_and_sinks")
def sinks_dropped_in_a_window(patch: pytest.MonkeyPatch) -> None:
    """A layer's sinks are left out where it has a window."""
    forward = AttentionBackend.forward

    def dropped(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        return forward(self, q, cache, meta, layer if layer.window is None else replace(layer, sinks=None))

    patch.setattr(AttentionBackend, "forward", dropped)


@mutant("vLLM #57432: a bound where the device has widths, for windows", "math.window", "math.window_and_sinks")
def ragged_verify_drops_the_window(patch: pytest.MonkeyPatch) -> None:
    """Rows of a verify of several widths attend to all keys."""
    forward = AttentionBackend.forward

    def whole(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        plan = meta.schedules._plans[0]
        is_ragged = meta.kind is StepKind.TARGET_VERIFY and len(q) < len(plan.seqused_k) * plan.max_seqlen_q
        return forward(self, q, cache, meta, replace(layer, window=None) if is_ragged else layer)

    patch.setattr(AttentionBackend, "forward", whole)


@mutant("SGLang #26513, of the decodes of a mixed batch", "math.mixed")
def decodes_of_a_mixed_batch_see_all_keys(patch: pytest.MonkeyPatch) -> None:
    """A request with one packed row has no window."""
    over_pages = torch_attention._over_pages

    def whole(q: Tensor, lens: Tensor, *rest: Any) -> Any:
        out, lse = over_pages(q, lens, *rest[:-1], rest[-1]._replace(window=None))
        own_out, own_lse = over_pages(q, lens, *rest)
        is_one = ((lens == 1) & (lens.amax() > 1)).view(-1, 1, 1)
        return torch.where(is_one.unsqueeze(3), out, own_out), torch.where(is_one, lse, own_lse)

    patch.setattr(torch_attention, "_over_pages", whole)


@mutant("vLLM #50707, captured: metadata made for one group", "graph.cache_groups", graph=True)
def groups_share_page_ids(patch: pytest.MonkeyPatch) -> None:
    """Captured phases share page ids whatever table they read, as if a step had one group of caches."""
    key = static_memory._key
    patch.setattr(static_memory, "_key", lambda *given: (*key(*given)[:2], *key(*given)[4:]))


@mutant("vLLM #50707, with its page tables in place", "graph.cache_groups", backend="trtllm_mla", graph=True)
def bound_groups_share_page_ids(patch: pytest.MonkeyPatch) -> None:
    """Captured phases share the page ids of bound page tables, as if one were given to every group."""
    key = static_memory._key

    def of_any(spec: BufferSpec, extent: Extent, paging: Paging, device: torch.device) -> Hashable:
        found = key(spec, extent, paging, device)
        return (*found[:2], *found[4:]) if isinstance(paging, BlockTable) else found

    patch.setattr(static_memory, "_key", of_any)


@mutant("our own: one plan and one window for all groups", "graph.cache_groups", "api.cache_groups", graph=True)
def windowed_group_planned_as_the_full_one(patch: pytest.MonkeyPatch) -> None:
    """Layers of every group attend as those of the first one, without a window."""
    forward = AttentionBackend.forward

    def full(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        return forward(self, q, cache, meta, replace(layer, window=None) if layer.id else layer)

    patch.setattr(AttentionBackend, "forward", full)
