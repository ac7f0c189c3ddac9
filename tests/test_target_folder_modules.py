"""Modules in targets' own folders, by the names that DeepSeek publishes: V3's and R1's (`test_v4_published` has V4's).

deepseek-ai/DeepSeek-V3 README_WEIGHTS.md and inference/configs; read so by SGLang 0.5.23
(models/deepseek_common/deepseek_weight_loader.py) and vLLM 0.33.0 (models/deepseek_mtp.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from attn_backends_reference.models import TargetModel, load_draft, load_mtp
from attn_backends_reference.models.mtp import MtpModule, module_config
from tests import reference_models as rm

LAYERS, HEADS, EXPERTS = 2, 4, 8
SIZES = {"H": 32, "2H": 64, "V": 64, "R": 24, "KV": 32, "KVA": 48, "QB": HEADS * 28, "KVB": HEADS * 20}
SIZES |= {"O": HEADS * 8, "M": 16, "E": EXPERTS}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "kv_lora_rank": 32,
    "max_position_embeddings": 128,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 8,
    "vocab_size": 64,
}
MLP = {"gate_proj": "M H", "up_proj": "M H", "down_proj": "H M"}
MODULE = {
    "enorm.weight": "H",
    "hnorm.weight": "H",
    "eh_proj.weight": "H 2H",
    "shared_head.norm.weight": "H",
    "input_layernorm.weight": "H",
    "post_attention_layernorm.weight": "H",
    "self_attn.q_a_proj.weight": "R H",
    "self_attn.q_a_layernorm.weight": "R",
    "self_attn.q_b_proj.weight": "QB R",
    "self_attn.kv_a_proj_with_mqa.weight": "KVA H",
    "self_attn.kv_a_layernorm.weight": "KV",
    "self_attn.kv_b_proj.weight": "KVB KV",
    "self_attn.o_proj.weight": "H O",
    "mlp.gate.weight": "E H",
    "mlp.gate.e_score_correction_bias": "E",
    **{f"mlp.shared_experts.{name}.weight": sizes for name, sizes in MLP.items()},
    **{f"mlp.experts.{i}.{name}.weight": sizes for i in range(EXPERTS) for name, sizes in MLP.items()},
}


def shape(sizes: str) -> tuple[int, ...]:
    return tuple(SIZES[word] for word in sizes.split())


def target_of(**changes: Any) -> TargetModel:
    model = AutoModelForCausalLM.from_config(rm.tiny_config("mla_experts", **changes))
    rm.randomize(model, 0)
    return rm.served_target("mla_experts", model.eval().requires_grad_(False))


def test_nextn_modules_load_by_their_published_names(tmp_path: Path) -> None:
    target = target_of()
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape(sizes), generator=generator) for name, sizes in MODULE.items()}
    shared = {"embed_tokens.weight": target.embedding.weight, "shared_head.head.weight": target.head.weight}
    named = {f"model.layers.{LAYERS}.{name}": x.clone() for name, x in (tensors | shared).items()}
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    draft = load_draft(tmp_path, target)
    (module,) = load_mtp(tmp_path, target)
    for each in (draft, module):
        assert each.head is target.head
        assert torch.equal(each._draft.eh_proj.weight, tensors["eh_proj.weight"])
        assert torch.equal(each._draft.layers[0].mlp.experts.down_proj[3], tensors["mlp.experts.3.down_proj.weight"])
    fresh = MtpModule(module_config(DeepseekV3Config.from_pretrained(tmp_path), 0))
    assert {name: x.shape for name, x in fresh.published().items()} == {name: x.shape for name, x in tensors.items()}
