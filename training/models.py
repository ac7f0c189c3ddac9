"""Configurations of the shipped models, and the passes that training and evaluation share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from attn_backends.models.draft import EagleDraft
from training import attention

CHECKPOINTS = Path("attn_backends/models/checkpoints")
NAMES = ("gqa", "mla")
COMMON = {
    "vocab_size": 256,
    "hidden_size": 256,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
DRAFT_MLP = {"gqa": 256, "mla": 256}


def target_config(name: str) -> PreTrainedConfig:
    """The configuration of the target ``"gqa"`` or ``"mla"``."""
    if name == "gqa":
        return LlamaConfig(
            **COMMON,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=320,
        )
    return DeepseekV3Config(
        **COMMON,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        q_lora_rank=96,
        qk_rope_head_dim=64,
        qk_nope_head_dim=16,
        v_head_dim=16,
        intermediate_size=384,
        num_mtp_layers=0,
    )


def draft_config(name: str) -> PreTrainedConfig:
    """The target's configuration with one layer and the draft's own MLP width."""
    config = target_config(name)
    config.num_hidden_layers = 1
    config.intermediate_size = DRAFT_MLP[name]
    if name == "mla":
        config.first_k_dense_replace = 1
    return config


def new_target(name: str) -> PreTrainedModel:
    """A target with fresh weights on the training attention function."""
    return AutoModelForCausalLM.from_config(
        target_config(name), attn_implementation=attention.NAME, dtype=torch.float32
    )


def load_target(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A stored target, frozen, on the training attention function."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME, dtype=dtype)
    return model.eval().requires_grad_(False).to(device)


def load_draft(folder: Path, dtype: torch.dtype, device: torch.device) -> EagleDraft:
    """A stored draft, frozen, on the training attention function."""
    draft = EagleDraft.from_pretrained(folder, dtype, attention.NAME)
    return draft.requires_grad_(False).to(device)


def target_hidden(model: PreTrainedModel, ids: Tensor, positions: Tensor, plan: attention.Plan | None = None) -> Tensor:
    """The target's hidden states after its final norm.

    Args:
        model: a target on the training attention function.
        ids: ``[B, T]`` token ids.
        positions: ``[B or 1, T]`` positions.
        plan: what the tokens see; plain causal attention by default.

    Returns:
        ``[B, T, H]``, what the output head reads.
    """
    base = model.model
    rows = base.embed_tokens(ids)
    position_embeddings = base.rotary_emb(rows, positions)
    for layer in base.layers:
        rows = layer(rows, position_ids=positions, position_embeddings=position_embeddings, plan=plan)
    return base.norm(rows)
