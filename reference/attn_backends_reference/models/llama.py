"""Llama and the families that differ from it within transformers' own layers: Mistral, Mixtral, Qwen2, Qwen3,
Qwen3-MoE, OLMoE and gpt-oss.

All attend by grouped queries over cached keys and values, so biases, norms of queries and keys, experts and rotary
embeddings are transformers' business. Sliding windows and sinks are the backend's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_backends.cache import CacheFormat
from attn_backends.layer import AttentionLayer
from attn_backends_reference.models.decoder import Family, TargetModel
from attn_backends_reference.models.draft import EagleDraft
from attn_backends_reference.models.interface import IMPLEMENTATION


def _attach(blocks: Iterable[Any], config: Any) -> tuple[AttentionLayer, ...]:
    config._attn_implementation = IMPLEMENTATION
    return tuple(
        AttentionLayer(
            id=index,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=block.self_attn.head_dim,
            v_head_dim=block.self_attn.head_dim,
            scale=block.self_attn.scaling,
            window=window_of(config, index),
            sinks=_sinks_of(block.self_attn),
        )
        for index, block in enumerate(blocks)
    )


def window_of(config: Any, index: int) -> int | None:
    """The keys that a row of a layer sees at most, itself included; None where it sees all."""
    kinds = getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True) or (kinds and kinds[index] != "sliding_attention"):
        return None
    return getattr(config, "sliding_window", None)


def _sinks_of(attention: Any) -> Tensor | None:
    """The logit of each query head's key without value, [num_heads] in the model's type, if attention has them."""
    sinks = getattr(attention, "sinks", None)
    return None if sinks is None else sinks.detach()


def _family(architecture: str) -> Family:
    """A family without drafts of its own."""
    return Family(architecture, None, CacheFormat.KV, _attach, TargetModel, EagleDraft)


LLAMA = Family(
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle",
    CacheFormat.KV,
    _attach,
    TargetModel,
    EagleDraft,
    mtp_architecture="LlamaForCausalLMMTP",
)
MISTRAL = _family("MistralForCausalLM")
QWEN2 = _family("Qwen2ForCausalLM")
QWEN3 = _family("Qwen3ForCausalLM")
QWEN3_MOE = _family("Qwen3MoeForCausalLM")
OLMOE = _family("OlmoeForCausalLM")
MIXTRAL = replace(_family("MixtralForCausalLM"), experts=("block_sparse_moe", "w1", "w3", "w2"))
GPT_OSS = replace(_family("GptOssForCausalLM"), experts=None)
