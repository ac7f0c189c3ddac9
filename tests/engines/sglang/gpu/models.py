"""The library's trained models as SGLang loads them on a GPU, and configurations of large ones without weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines.sglang import models
from tests.engines.sglang.models import DEEPSEEK

_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "enorm", "hnorm")
_READ_HIDDEN = ("embed_tokens", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "gate")
_WRITE_HIDDEN = ("o_proj", "down_proj")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Llama 3.1 8B's shapes, of 16 of its 32 layers, and of a smaller vocabulary."""
DEEPSEEK_LAYERS = 4
LARGE_MLA = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": DEEPSEEK_LAYERS,
    "first_k_dense_replace": DEEPSEEK_LAYERS,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""DeepSeek-V3's shapes: 4 dense layers, 16 experts in the draft, of which 8 are taken, and a smaller vocabulary."""
LARGE = {
    "llama_target": LLAMA,
    "llama_eagle3": LLAMA
    | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": LLAMA["vocab_size"]},
    "deepseek_target": LARGE_MLA,
    "deepseek_nextn": LARGE_MLA,
}


def write_all(folder: Path) -> None:
    """The trained models, and the configurations of `LARGE`, which SGLang loads with `load_format` dummy."""
    models.write_all(folder)
    for name in ("mla_target", "mla_nextn"):
        widen_folder(folder / name)
    for name, config in LARGE.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))


def widen_folder(folder: Path) -> None:
    """The same model with twice the hidden size, which is 256: SGLang's CUDA kernel in front of a NextN layer takes
    none below 512.
    """
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 2 * config["hidden_size"], "rms_norm_eps": config["rms_norm_eps"] / 2}
    save_file(widened(load_file(path)), path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def widened(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model whose hidden state has as many zeros behind it. A mean over twice as many columns is half as
    large, which weights of norms take back.
    """
    return {name: _widened(_part(name), given.float()).to(given.dtype) for name, given in weights.items()}


def _part(name: str) -> str:
    return name.split(".")[-2] if name.endswith(".weight") else name


def _widened(part: str, given: Tensor) -> Tensor:
    if part in _NORMS:
        return torch.cat((given / math.sqrt(2), torch.zeros_like(given)))
    if part in _READ_HIDDEN:
        return _with_zeros(given, 1)
    if part in _WRITE_HIDDEN:
        return _with_zeros(given, 0)
    if part == "eh_proj":
        halves: Any = given.chunk(2, 1)
        return _with_zeros(torch.cat([_with_zeros(half, 1) for half in halves], 1), 0)
    return given


def _with_zeros(given: Tensor, dim: int) -> Tensor:
    return torch.cat((given, torch.zeros_like(given)), dim)
