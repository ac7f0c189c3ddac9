"""DeepseekV2ForCausalLM, DeepseekV3ForCausalLM with its draft, and Glm4MoeLiteForCausalLM, whose attention is V3's:
multi-head latent attention (MLA) in absorbed form.

A head's key is W_UK · c and its value W_UV · c of the latent c. So q' = W_UK^T · q_nope gives its scores as q' · c, and
W_UV is applied once, to the attention-weighted latent. The cache holds one row for all heads.

See DeepSeek-V2 (DeepSeek-AI, 2024, https://arxiv.org/abs/2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from attn_backends.cache import CacheFormat, Latents
from attn_backends.layer import AttentionLayer
from attn_backends_reference.models.attention import Attention
from attn_backends_reference.models.decoder import Family, TargetModel
from attn_backends_reference.models.draft import EagleDraft


class AbsorbedAttention(nn.Module):
    """Takes the place of `source`, transformers' `DeepseekV2Attention`, `DeepseekV3Attention` or one like it, with its
    projections; kv_b_proj is absorbed.

    w_uk: [num_heads, nope, rank], queries to latents. w_uv: [num_heads, v, rank], latents to values.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.layer_idx = source.layer_idx
        self.num_heads, self.scale = source.num_heads, source.scaling
        self.query_sizes = [source.qk_nope_head_dim, source.qk_rope_head_dim]
        self.latent_sizes = [source.kv_lora_rank, source.qk_rope_head_dim]
        self.rotate = _rotation_of(source)
        if source.q_lora_rank is None:
            self.q_proj = source.q_proj
        else:
            self.q_proj = nn.Sequential(source.q_a_proj, source.q_a_layernorm, source.q_b_proj)
        self.kv_a_proj, self.kv_a_layernorm = source.kv_a_proj_with_mqa, source.kv_a_layernorm
        up = source.kv_b_proj.weight.detach().unflatten(0, (self.num_heads, -1))
        w_uk, w_uv = up.split([source.qk_nope_head_dim, source.v_head_dim], dim=1)
        self.w_uk, self.w_uv = nn.Buffer(w_uk.contiguous()), nn.Buffer(w_uv.contiguous())
        self.o_proj = source.o_proj

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention: Attention, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, T, hidden]. position_embeddings: as the model's own rotary embeddings give them."""
        q = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q.split(self.query_sizes, dim=-1)
        latent, k_rope = self.kv_a_proj(hidden_states).split(self.latent_sizes, dim=-1)
        q_rope, k_rope = self.rotate(q_rope, k_rope.unsqueeze(2), position_embeddings)
        q_latent = torch.einsum("bthn,hnr->bthr", q_nope, self.w_uk)
        absorbed = torch.cat((q_latent, q_rope), dim=-1).squeeze(0)
        row = torch.cat((self.kv_a_layernorm(latent), k_rope.squeeze(2)), dim=-1).squeeze(0)
        mixed = attention.attend(self.layer_idx, absorbed, Latents(row))
        heads = torch.einsum("thr,hvr->thv", mixed, self.w_uv)
        return self.o_proj(heads.flatten(1).unsqueeze(0)), None


def _rotation_of(source: Any) -> Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]:
    """What turns the queries [1, T, num_heads, rope] and keys [1, T, 1, rope] of an attention layer by its model's
    position embeddings: of V2 complex numbers [1, T, rope / 2], of V3 cosines and sines [1, T, rope].
    """
    if isinstance(source, v2.DeepseekV2Attention):
        return _turn_pairs
    turn = v3.apply_rotary_pos_emb_interleave if source.config.rope_interleave else v3.apply_rotary_pos_emb
    return lambda q, k, angles: turn(q, k, *angles, unsqueeze_dim=2)


def _turn_pairs(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    q, k = v2.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), angles)
    return q.transpose(1, 2), k.transpose(1, 2)


def _attach(blocks: Iterable[Any], config: Any) -> tuple[AttentionLayer, ...]:
    layers = []
    for index, block in enumerate(blocks):
        block.self_attn = absorbed = AbsorbedAttention(block.self_attn)
        rank, rope = absorbed.latent_sizes
        layers.append(AttentionLayer(index, absorbed.num_heads, 1, rank + rope, rank, absorbed.scale))
    return tuple(layers)


DEEPSEEK = Family(
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForCausalLMEagle",
    CacheFormat.LATENT,
    _attach,
    TargetModel,
    EagleDraft,
    mtp_architecture="DeepseekV3ForCausalLMMTP",
)
DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", None, CacheFormat.LATENT, _attach, TargetModel, EagleDraft)
GLM4_MOE_LITE = Family("Glm4MoeLiteForCausalLM", None, CacheFormat.LATENT, _attach, TargetModel, EagleDraft)
