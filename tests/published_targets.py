"""Folders of targets as they are published, tiny: their config.json, and their tensors by name and shape.

Keys are those of the config.json of meta-llama/Llama-3.1-8B-Instruct, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-7B,
Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B, mistralai/Mixtral-8x7B-Instruct-v0.1, allenai/OLMoE-1B-7B-0924,
deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-R1, moonshotai/Kimi-K2-Instruct, zai-org/GLM-4.7-Flash and
openai/gpt-oss-20b; numbers are as small as the sizes, so that each of them shows in a text of 40 tokens. Tensors:
transformers' modules of the families of one MLP; deepseek-ai/DeepSeek-V2 modeling_deepseek.py, DeepSeek-V3
README_WEIGHTS.md (R1's and GLM's are the same), MoonshotAI/Kimi-K2 docs/deploy_guidance.md (V3's); openai/gpt-oss
gpt_oss/torch/weights.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, HEADS, EXPERTS, WINDOW = 4, 4, 8, 6
SIZES = {"V": 64, "H": 32, "I": 48, "M": 16, "S": 32, "R": 24, "KV": 32, "KVA": 32 + 16, "QB": HEADS * (12 + 16)}
SIZES |= {"KVB": HEADS * (12 + 8), "O": HEADS * 8, "E": EXPERTS, "N": HEADS, "Q": HEADS * 64, "K": 2 * 64}
SIZES |= {"P": HEADS * 16, "G": 2 * 16, "D": 16, "J": 64, "2J": 128, "B": 16, "HB": 1, "JB": 2}
"""P, G: columns of queries and keys. Of gpt-oss: Q, K, these; J, an expert's inside; B, bytes of a block; HB, JB,
blocks."""
ENDS = {"model.embed_tokens.weight": "V H", "model.norm.weight": "H", "lm_head.weight": "V H"}
NORMS = {"input_layernorm.weight": "H", "post_attention_layernorm.weight": "H"}
LATENT = {"kv_a_proj_with_mqa": "KVA H", "kv_a_layernorm": "KV", "kv_b_proj": "KVB KV", "o_proj": "H O"}
Q_LORA = {"q_a_proj": "R H", "q_a_layernorm": "R", "q_b_proj": "QB R"}
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "vocab_size": 64,
}
DEEPSEEK = COMMON | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_key_value_heads": HEADS,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 100,
    "seq_aux": True,
    "v_head_dim": 8,
}
YARN = {"beta_fast": 2, "beta_slow": 0.25, "factor": 8, "original_max_position_embeddings": 32, "type": "yarn"}
V2 = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "scoring_func": "softmax",
}
V3 = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "model_type": "deepseek_v3",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 24,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 2,
    "head_dim": 64,
    "initial_context_length": 16,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "output_router_logits": False,
    "pad_token_id": 2,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 2.0,
        "beta_slow": 0.25,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 100,
    "router_aux_loss_coef": 0.9,
    "sliding_window": WINDOW,
    "swiglu_limit": 7.0,
    "transformers_version": "4.55.0.dev0",
}


@dataclass(frozen=True)
class Published:
    """A target. config: its config.json. tensors: names, and sizes by `SIZES`, such as "Q H". idle: keys that change
    nothing beside the others of this configuration. sizes: others than `SIZES`.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, str]
    idle: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def shape(self, name: str) -> list[int]:
        """Of a tensor."""
        known = SIZES | dict(self.sizes)
        return [known[word] for word in self.tensors[name].split()]


def _mlp(prefix: str, inside: str) -> dict[str, str]:
    sizes = {"gate_proj": f"{inside} H", "up_proj": f"{inside} H", "down_proj": f"H {inside}"}
    return {f"{prefix}.{name}.weight": of_name for name, of_name in sizes.items()}


def _llama(
    config: Mapping[str, Any], *more: str, idle: tuple[str, ...] = (), sizes: Mapping[str, int] = {}
) -> Published:
    """more: tensors of a layer beside Llama's, with their sizes. idle, sizes: as of `Published`."""
    layer = NORMS | {
        f"self_attn.{name}_proj.weight": f"{rows} H" for name, rows in zip("qkv", ("P", "G", "G"), strict=True)
    }
    layer |= {"self_attn.o_proj.weight": "H P"}
    layer |= dict(each.split(" ", 1) for each in more)
    if config["model_type"] == "mixtral":
        layer["block_sparse_moe.gate.weight"] = "E H"
        projections = {"w1": "I H", "w2": "H I", "w3": "I H"}
        experts = [f"block_sparse_moe.experts.{expert}." for expert in range(EXPERTS)]
        layer |= {f"{expert}{name}.weight": of_name for expert in experts for name, of_name in projections.items()}
    elif config["model_type"] == "olmoe":
        layer |= {"mlp.gate.weight": "E H"}
        for expert in range(EXPERTS):
            layer |= _mlp(f"mlp.experts.{expert}", "I")
    elif "num_experts" in config:
        layer["mlp.gate.weight"] = "E H"
        for expert in range(EXPERTS):
            layer |= _mlp(f"mlp.experts.{expert}", "M")
    else:
        layer |= _mlp("mlp", "I")
    of_layers = {f"model.layers.{at}.{name}": sizes for at in range(LAYERS) for name, sizes in layer.items()}
    return Published(COMMON | {"intermediate_size": 48} | dict(config), ENDS | of_layers, idle, sizes)


def _deepseek(
    config: Mapping[str, Any], attention: Mapping[str, str], *, shared: str, idle: tuple[str, ...] = ()
) -> Published:
    """shared: the size of the shared experts, which are one MLP. idle: as of `Published`."""
    tensors = dict(ENDS)
    for layer in range(LAYERS):
        found = NORMS | {f"self_attn.{name}.weight": sizes for name, sizes in (attention | LATENT).items()}
        if layer < config["first_k_dense_replace"]:
            found |= _mlp("mlp", "I")
        else:
            found |= {"mlp.gate.weight": "E H"} | _mlp("mlp.shared_experts", shared)
            found |= {} if config["model_type"] == "deepseek_v2" else {"mlp.gate.e_score_correction_bias": "E"}
            for expert in range(EXPERTS):
                found |= _mlp(f"mlp.experts.{expert}", "M")
        tensors |= {f"model.layers.{layer}.{name}": sizes for name, sizes in found.items()}
    return Published(config, tensors, idle)


def _gpt_oss() -> Published:
    rows = {"q_proj": "Q", "k_proj": "K", "v_proj": "K"}
    layer = NORMS | {"self_attn.sinks": "N", "mlp.router.weight": "E H", "mlp.router.bias": "E"}
    layer |= {f"self_attn.{name}.weight": f"{size} H" for name, size in rows.items()}
    layer |= {f"self_attn.{name}.bias": size for name, size in rows.items()}
    layer |= {"self_attn.o_proj.weight": "H Q", "self_attn.o_proj.bias": "H"}
    for name, sizes, bias in (("gate_up_proj", "E 2J HB", "E 2J"), ("down_proj", "E H JB", "E H")):
        experts = f"mlp.experts.{name}"
        layer |= {f"{experts}_blocks": f"{sizes} B", f"{experts}_scales": sizes, f"{experts}_bias": bias}
    of_layers = {f"model.layers.{at}.{name}": sizes for at in range(LAYERS) for name, sizes in layer.items()}
    return Published(GPT_OSS, ENDS | of_layers)


GROUPS = {"n_group": 2, "topk_group": 1}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
QK_NORMS = ("self_attn.q_norm.weight D", "self_attn.k_norm.weight D")
TARGETS = {
    "Llama-3.1": _llama(
        {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": 16,
            "mlp_bias": False,
            "model_type": "llama",
            "num_key_value_heads": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            "rope_theta": 100.0,
        }
    ),
    "Mistral": _llama(
        {
            "architectures": ["MistralForCausalLM"],
            "head_dim": 16,
            "model_type": "mistral",
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": WINDOW,
        }
    ),
    "Qwen2.5": _llama(
        {key: value for key, value in QWEN.items() if key not in ("head_dim", "rope_scaling")}
        | {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "model_type": "qwen2"}
        | {"sliding_window": WINDOW, "use_sliding_window": True},
        *("self_attn.q_proj.bias P", "self_attn.k_proj.bias G", "self_attn.v_proj.bias G"),
        sizes={"H": 64},
    ),
    "Qwen3": _llama(QWEN, *QK_NORMS, idle=("max_window_layers", "sliding_window", "use_sliding_window")),
    "Qwen3-30B-A3B": _llama(
        QWEN
        | {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": []}
        | {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "norm_topk_prob": True, "num_experts": EXPERTS}
        | {"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001},
        *QK_NORMS,
        idle=("max_window_layers", "sliding_window", "use_sliding_window", "intermediate_size"),
    ),
    "Mixtral": _llama(
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2}
        | {"num_experts_per_tok": 2, "num_local_experts": EXPERTS, "output_router_logits": False, "head_dim": 16}
        | {"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": WINDOW},
    ),
    "OLMoE": _llama(
        {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 0.5, "hidden_size": 64, "model_type": "olmoe"}
        | {"norm_topk_prob": True, "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_key_value_heads": 2}
        | {"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100.0}
        | {"router_aux_loss_coef": 0.01},
        *("self_attn.q_norm.weight P", "self_attn.k_norm.weight G"),
        sizes={"H": 64},
    ),
    "DeepSeek-V2-Lite": _deepseek(
        V2
        | {"n_group": 1, "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy"},
        {"q_proj": "QB H"},
        shared="S",
        idle=("n_group", "topk_group"),
    ),
    "DeepSeek-V2": _deepseek(
        V2 | GROUPS | {"q_lora_rank": 24, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy"},
        Q_LORA,
        shared="S",
    ),
    "DeepSeek-R1": _deepseek(V3 | GROUPS | {"routed_scaling_factor": 2.5}, Q_LORA, shared="M"),
    "Kimi-K2": _deepseek(
        V3
        | {
            "model_type": "kimi_k2",
            "n_group": 1,
            "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_theta": 500.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
        },
        Q_LORA,
        shared="M",
    ),
    "GLM-4.7-Flash": _deepseek(
        {key: value for key, value in V3.items() if key not in ("auto_map", "ep_size", "scoring_func")}
        | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "rope_scaling": None}
        | {"partial_rotary_factor": 1.0, "n_group": 1, "routed_scaling_factor": 1.8, "topk_group": 1},
        Q_LORA,
        shared="M",
    ),
    "gpt-oss": _gpt_oss(),
}


def random_tensors(target: Published) -> dict[str, Tensor]:
    """Every tensor of a folder. Blocks are any bytes; their powers of two keep weights near the others'."""
    generator, tensors = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for name in target.tensors:
        shape = target.shape(name)
        noise = torch.randn(shape, generator=generator)
        if name.endswith("_blocks"):
            tensors[name] = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        elif name.endswith("_scales"):
            tensors[name] = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        elif "norm" in name:
            tensors[name] = (1 + 0.2 * noise).bfloat16()
        else:
            tensors[name] = (noise * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.5)).bfloat16()
    return tensors


def write(target: Published, folder: Path, config: Mapping[str, Any] | None = None) -> None:
    """A folder with random tensors. config: another one than the target's."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(target.config if config is None else config)))
    save_file(random_tensors(target), folder / "model.safetensors", metadata={"format": "pt"})
