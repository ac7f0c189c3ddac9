"""Attention of transformers' own models through backends, and their experts, under the name `IMPLEMENTATION`.

Attention is registered with `AttentionInterface`. `AttentionMaskInterface` gets nothing of that name, so transformers
builds no mask, as it documents (https://huggingface.co/docs/transformers/attention_interface): building one would read
the positions on the host. Experts are transformers' `batched_mm`, whose shapes don't depend on the routing, in parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from attn_backends.cache import KeyValues
from attn_backends_reference.models.attention import Attention

IMPLEMENTATION = "attn_backends"
"""The name by which transformers' attention and experts interfaces know ours."""
GATHERED_BYTES = 1 << 30
"""The weights that `batched_mm` may gather at once: those of a token's experts for each token of a part."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, attention: Attention, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention function. query: [1, num_heads, T, head_dim], key and value likewise, after RoPE. Scale
    and window are those of the backend's layer.
    """
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attention.attend(module.layer_idx, q, KeyValues(k, v)).unsqueeze(0), None


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts function: [T, hidden_size] of as many rows and [T, num_experts_per_tok] of the others.

    Reads nothing on the host, so it can be recorded. Its memory is bounded by `GATHERED_BYTES`, or by one token's.
    """
    expert_bytes = max(weights[0].nbytes for weights in module.parameters(recurse=False))
    rows = max(1, GATHERED_BYTES // (expert_bytes * top_k_index.shape[1]))
    parts = zip(*(rows_of.split(rows) for rows_of in (hidden_states, top_k_index, top_k_weights)), strict=True)
    batched = ExpertsInterface()["batched_mm"]
    return torch.cat([batched(module, *part) for part in parts])


AttentionInterface.register(IMPLEMENTATION, attend)
ExpertsInterface.register(IMPLEMENTATION, run_experts)
