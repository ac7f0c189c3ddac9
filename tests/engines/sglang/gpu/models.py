"""The library's trained models as SGLang loads them on a GPU, and configurations of large ones without weights."""

from __future__ import annotations

import json
from pathlib import Path

from attn_backends_reference.models.exports import MIN_HIDDEN, SGLANG_FIELDS, YARN
from tests.engines.sglang import models
from tests.engines.sglang.cases import NUM_STEPS

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
LARGE_MLA = SGLANG_FIELDS | {
    "rope_parameters": YARN | {"rope_theta": 10000.0, "original_max_position_embeddings": 2048},
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
ADAPTIVE = {"1": 5, "2": 1, "8": 0, "24": NUM_STEPS, "64": 1}
"""Steps of a draft that adapts, by the number of requests of a graph."""
STEP_TIMES = {
    "bias_seconds": 1.0,
    "bs_probes": [1, 64],
    "alpha_seconds": [0.0, 0.0],
    "m_probes": [1, 256],
    "theta_seconds": [0.0, 2.55],
}
"""How long SGLang is told that a verify of so many rows takes: so long that it leaves out the least likely ones."""
LARGE = {
    "llama_target": LLAMA,
    "llama_eagle3": LLAMA
    | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": LLAMA["vocab_size"]},
    "deepseek_target": LARGE_MLA,
    "deepseek_nextn": LARGE_MLA,
}


def write_all(folder: Path) -> None:
    """The trained models, block drafts for each, and the configurations of `LARGE`, which SGLang loads with
    `load_format` dummy.
    """
    models.write_all(folder, MIN_HIDDEN)
    for name in ("dflash", "dspark"):
        (folder / name).rename(folder / f"gqa_{name}")
    models.write_dflash(folder / "mla_dflash", MIN_HIDDEN)
    models.write_dspark(folder / "mla_dspark", MIN_HIDDEN)
    adaptive = {bs: {"candidate_steps": [steps]} for bs, steps in ADAPTIVE.items()}
    (folder / "adaptive.json").write_text(json.dumps(adaptive))
    (folder / "step_times.json").write_text(json.dumps(STEP_TIMES))
    for name, config in LARGE.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
