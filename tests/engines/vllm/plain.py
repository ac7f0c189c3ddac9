"""Attention in float64 from vLLM's own `CommonAttentionMetadata`: what every call is compared with, and a backend.

The backend, TESTS_PLAIN and TESTS_PLAIN_MLA, runs eagerly, has nothing of the library's, and builds the metadata of
each draft forward anew: what engines with our backends must equal in every token, accepted or drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)


def register() -> None:
    """Entry point of `vllm.general_plugins`."""
    from vllm.v1.attention.backends.registry import register_backend

    register_backend("TESTS_PLAIN", "tests.engines.vllm.plain.Plain")
    register_backend("TESTS_PLAIN_MLA", "tests.engines.vllm.plain.PlainMLA")


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    common: CommonAttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[num_rows, num_heads, value size] float64; rows of no request are zeros. q: [num_rows, num_heads, head size].
    k, v: [blocks, block size, KV heads, size]. window: keys that a row sees at most. sinks: [num_heads], scores
    that have no value: their exponentials are in the denominators. chunk: a row sees no key of the chunks of so many
    tokens before its own. Rows of a block draft see one another.
    """
    is_causal = getattr(common, "causal", True)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64, device=q.device)
    starts = common.query_start_loc.tolist()
    for request, length in enumerate(common.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        num = rows.stop - rows.start
        if not 0 < num <= length:
            continue
        blocks = common.block_table_tensor[request, : -(-length // k.shape[1])].long()
        keys, values = (pages[blocks].flatten(0, 1)[:length].double() for pages in (k, v))
        queries = q[rows].double().unflatten(1, (k.shape[2], -1))  # the heads of each KV head
        scores = torch.einsum("qngd,knd->ngqk", queries, keys).flatten(0, 1) * scale
        places = torch.arange(length, device=q.device)
        behind = places[length - num :].unsqueeze(1) - places
        first = places[length - num :, None] // (chunk or length) * (chunk or length)
        hidden = ((behind < 0) & is_causal) | (behind >= (window or length)) | (places < first)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, num, 1)), -1)
        weights = scores.softmax(-1)[..., :length].unflatten(0, queries.shape[1:3])
        out[rows] = torch.einsum("ngqk,knd->qngd", weights, values).flatten(1, 2)
    return out


@dataclass
class Metadata:
    """vLLM's own, and what its MLA layer reads."""

    common: CommonAttentionMetadata
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class Builder(AttentionMetadataBuilder[Metadata]):
    """Hands vLLM's metadata on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        num_tokens = common_attn_metadata.num_actual_tokens
        return Metadata(common_attn_metadata, num_tokens, common_attn_metadata.num_reqs, num_tokens)


class Impl(AttentionImpl[Metadata]):
    """Grouped-query attention."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
        alibi_slopes: Any = None, sliding_window: int | None = None, *args: Any, sinks: Tensor | None = None, **kw: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.window, self.sinks = sliding_window, sinks

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None:
            return output.fill_(0)
        self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.common.slot_mapping)
        k, v = kv_cache.transpose(1, 2).split(self.head_size, -1)
        seen = (attn_metadata.common, self.scale, self.window, self.sinks)
        return output.copy_(exact_attention(query, k, v, *seen))

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """What a block draft calls of its context."""
        pages = kv_cache.transpose(1, 2)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                pages[slot // pages.shape[1], slot % pages.shape[1]] = torch.cat((key[row], value[row]), -1)


class MLAImpl(MLAAttentionImpl[Metadata]):
    """Absorbed MLA."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill = False

    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, kv_lora_rank: int, **kw: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.rank = num_heads, head_size, scale, kv_lora_rank

    def forward_mqa(self, q: Any, cache: Tensor, attn_metadata: Metadata, layer: Any) -> tuple[Tensor, None]:
        q, k = torch.cat(q, -1), cache.unsqueeze(2)
        return exact_attention(q, k, k[..., : self.rank], attn_metadata.common, self.scale).to(q.dtype), None


class Plain(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16]

    @classmethod
    def get_name(cls) -> str:
        return "TESTS_PLAIN_MLA" if cls.is_mla() else "TESTS_PLAIN"

    @classmethod
    def supports_non_causal(cls) -> bool:
        return not cls.is_mla()

    @classmethod
    def get_impl_cls(cls) -> Any:
        return MLAImpl if cls.is_mla() else Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class PlainMLA(Plain):
    @classmethod
    def is_mla(cls) -> bool:
        return True
