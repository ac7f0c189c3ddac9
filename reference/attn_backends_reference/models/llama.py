"""LlamaForCausalLM and its draft: grouped-query attention over cached keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from attn_backends.cache import CacheFormat, KeyValues
from attn_backends.layer import AttentionLayer
from attn_backends_reference.models.attention import Attention
from attn_backends_reference.models.decoder import Family, TargetModel
from attn_backends_reference.models.draft import EagleDraft

_INTERFACE = "attn_backends"


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    attention: Attention,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. query: [1, num_heads, T, head_dim], key and value likewise, after RoPE."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attention.attend(module.layer_idx, q, KeyValues(k, v)).unsqueeze(0), None


AttentionInterface.register(_INTERFACE, _attend)


def _attach(blocks: Iterable[Any], config: Any) -> tuple[AttentionLayer, ...]:
    config._attn_implementation = _INTERFACE
    return tuple(
        AttentionLayer(
            id=index,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=block.self_attn.head_dim,
            v_head_dim=block.self_attn.head_dim,
            scale=block.self_attn.scaling,
        )
        for index, block in enumerate(blocks)
    )


LLAMA = Family(
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle",
    CacheFormat.KV,
    _attach,
    TargetModel,
    EagleDraft,
    mtp_architecture="LlamaForCausalLMMTP",
)
