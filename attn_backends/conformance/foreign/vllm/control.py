"""A right backend behind vLLM's interface: its metadata is the batch object itself, over which it attends.

The driver is compared with it (`blame`). Dense attention over each request's whole row of the block table, masked by
what a row must see; slow, and the same eagerly and in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_backends.conformance.foreign.vllm.stand_ins import (
    attend_packed,
    concat_and_cache_mla,
    reshape_and_cache_flash,
)


class RightBuilder:
    """A builder that plans nothing."""

    supports_draft_decode_metadata_update = True

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        """The batch."""
        return common_attn_metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """The batch."""
        return common_attn_metadata

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Nothing: its tensors are those of the batch."""


class RightMLAImpl:
    """Attention over latents."""

    def __init__(self, scale: float, rank: int) -> None:
        self.scale, self.rank = scale, rank

    def do_kv_cache_update(self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, *others: Any) -> None:
        """Write latents to slots."""
        concat_and_cache_mla(kv_c, k_pe.squeeze(1), kv_cache, slots)

    def forward_mqa(self, q: tuple[Tensor, Tensor], kv_cache: Tensor, batch: Any, layer: Any) -> tuple[Tensor, None]:
        """Attention of the batch's rows."""
        keys = kv_cache.unsqueeze(2)
        return _attend_batch(torch.cat(q, dim=-1), keys, keys[..., : self.rank], batch, self.scale), None


class RightKVImpl:
    """Attention over keys and values. halves: of a cache, its keys and its values."""

    def __init__(self, scale: float, halves: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self.scale, self.halves = scale, halves

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Write keys and values to slots."""
        reshape_and_cache_flash(key, value, *self.halves(kv_cache), slots)

    def forward(self, layer: Any, q: Tensor, k: Any, v: Any, kv_cache: Tensor, batch: Any, output: Tensor) -> Tensor:
        """Attention of the batch's rows."""
        return output.copy_(_attend_batch(q, *self.halves(kv_cache), batch, self.scale))


def _attend_batch(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Any, scale: float) -> Tensor:
    """Causal attention of a batch's rows; shapes as of `attend_packed`."""
    lists = batch.query_start_loc, batch.block_table_tensor, batch.seq_lens
    return attend_packed(q, k_pages, v_pages, *lists, max_query=batch.max_query_len, scale=scale)
