"""The library's trained models as vLLM loads them, and configurations of large ones without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.block_formats import BLOCKS, DSPARKS
from tests.engines.vllm import models
from tests.engines.vllm.gpu.cases import NUM_DRAFTED
from tests.head_formats import write

LLAMA_LAYERS, DEEPSEEK_LAYERS = 24, 10
_COMMON = {
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": LLAMA_LAYERS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}
"""Llama 3.1 8B's shapes, of three quarters of its layers, and of a smaller vocabulary."""
EAGLE3 = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": LLAMA["vocab_size"],
    "eagle_aux_hidden_state_layer_ids": [2, LLAMA_LAYERS // 2, LLAMA_LAYERS - 3],
    "eagle_config": {"use_aux_hidden_state": True},
}
DEEPSEEK: dict[str, Any] = _COMMON | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "head_dim": 64,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": DEEPSEEK_LAYERS,
    "rms_norm_eps": 1e-6,
}
"""DeepSeek-V3's shapes, of a few layers without experts, of which attention knows nothing. What is not said is as in
the library's MLA model.
"""

BLOCK_CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
BLOCK_SIZES = {"H": 256, "T": 256, "I": 320, "Q": 256, "K": 128, "V": 256, "HEAD": 64}
"""Of block drafts for the trained target, gqa; they have random weights."""


def write_all(folder: Path) -> Path:
    """The trained models, alone and with block drafts; configurations of llama and deepseek, which vLLM loads with
    `load_format` dummy.
    """
    models.write_models(folder)
    for name in ("gqa-sinks", "gqa-sinks-draft"):
        (folder / name).symlink_to(name.replace("sinks", "window"))
    _write_block(folder, "gqa-dflash", "SpecForge DFlash", {"block_size": NUM_DRAFTED + 1})
    _write_block(folder, "gqa-dspark", "DSpark", {"block_size": NUM_DRAFTED})
    _write(folder / "llama", LLAMA)
    _write(folder / "llama-draft", EAGLE3)
    for name, like in (("deepseek", "mla-1"), ("deepseek-draft", "mla-1-draft")):
        config = json.loads((folder / like / "config.json").read_text())
        dense = {"first_k_dense_replace": DEEPSEEK_LAYERS + 1}
        _write(folder / name, config | DEEPSEEK | dense)
    return folder


def _write_block(folder: Path, name: str, format: str, size: dict[str, int]) -> None:
    """With the target's embedding where the format has its own. Queries are large, so that a row attends to few others
    and drafts differ from step to step.
    """
    form = (BLOCKS | DSPARKS)[format]
    wide = BLOCK_SIZES | ({"HR": BLOCK_SIZES["H"] + form.sizes["R"]} if "HR" in form.sizes else {})
    form = replace(form, config={**form.config, **BLOCK_CONFIG, **size}, sizes={**form.sizes, **wide})
    given = {key: torch.full(form.shape(size), 4.0) for key, size in form.tensors.items() if "q_norm" in key}
    if "embed_tokens.weight" in form.tensors:
        given["embed_tokens.weight"] = load_file(folder / "gqa/model.safetensors")["model.embed_tokens.weight"]
    write(form, folder / f"{name}-draft", given=given)
    (folder / name).symlink_to("gqa")


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
