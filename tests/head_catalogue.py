"""Every format of `head_formats` by name."""

from __future__ import annotations

from tests.head_formats import (
    BASE,
    BIASES,
    EAGLE,
    EAGLE3,
    ENDS,
    LLAMA3,
    MAPS,
    MLA,
    MLA_SIZES,
    NORMS,
    NVIDIA,
    OWN_HEAD_DIM,
    QKV_BIASES,
    SGLANG,
    SPECFORGE,
    SPECULATORS,
    TAPS,
    VLLM,
    YARN,
    Format,
    gqa,
    layer,
    speculators,
)

FIRST = gqa("2H")
LATER = layer("layers.1.", gqa("H"), "input_layernorm", "post_attention_layernorm")
IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True}}
FORMATS = {
    "SafeAILab EAGLE-3": Format(
        catalogue="SafeAILab",
        source=f"{EAGLE} eagle/traineagle3/config.json, eagle/model/cnets.py; pytorch_model.bin",
        config=EAGLE3 | {"architectures": ["LlamaForCausalLM"]},
        tensors=ENDS | MAPS | layer("midlayer.", FIRST, *NORMS),
        facts={"taps": (1, 2, 3)},
        sizes=OWN_HEAD_DIM,
        num_layers=7,
        pickled=True,
    ),
    "SafeAILab EAGLE-3, wider target": Format(
        catalogue="SafeAILab",
        source=f"{EAGLE} eagle/model/cnets.py (target_hidden_size, embed_tokens)",
        config=EAGLE3
        | IDS
        | {"architectures": ["LlamaForCausalLM"], "hidden_size": 24, "head_dim": 16, "target_hidden_size": 32},
        tensors=ENDS | MAPS | layer("midlayer.", FIRST, *NORMS) | {"embed_tokens.weight": "V H"},
        facts={"taps": TAPS},
        sizes={"H": 24},
    ),
    "SpecForge": Format(
        catalogue="SpecForge",
        source=f"{SPECFORGE} configs/qwen3-8b-eagle3.json, specforge/export/to_sglang.py, checkpoint_io.py (rope)",
        config=EAGLE3
        | IDS
        | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "rope_theta": 500.0, "rope_scaling": LLAMA3}
        | {"attention_bias": False, "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False},
        tensors=ENDS | MAPS | layer("midlayer.", FIRST, *NORMS),
        facts={"taps": TAPS, "theta": 500.0, "rope": LLAMA3},
    ),
    "SpecForge, gpt-oss": Format(
        catalogue="SpecForge",
        source=f"{SPECFORGE} configs/gpt-oss-20B-eagle3.json, gpt-oss-120B-eagle3.json: no rope keys, no biases",
        config={key: value for key, value in EAGLE3.items() if key not in ("bos_token_id", "eos_token_id")}
        | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16}
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)}},
        tensors=ENDS | MAPS | layer("midlayer.", FIRST, *NORMS) | {"embed_tokens.weight": "V H"},
        facts={"taps": TAPS},
    ),
    "SpecForge EAGLE-3.1": Format(
        catalogue="SpecForge",
        source=f"{SPECFORGE} configs/qwen3-30B-A3B-eagle3.1.json, specforge/modeling/draft/llama3_eagle.py",
        config=EAGLE3
        | IDS
        | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "fc_norm": True, "norm_output": True}
        | {"rope_theta": 1000.0, "rope_scaling": None},
        tensors=ENDS | MAPS | layer("midlayer.", FIRST, *NORMS) | {f"fc_norm.{i}.weight": "T" for i in range(3)},
        facts={"taps": TAPS, "theta": 1000.0, "fc_norms": [f"fc_norm.{i}" for i in range(3)], "feeds_normed": True},
    ),
    "SGLang's reader": Format(
        catalogue="SGLang",
        source=f"{SGLANG} models/llama_eagle3.py: use_aux_norm, aux_norm_*, bias, layers.N.hidden_norm, no t2d",
        config=EAGLE3
        | IDS
        | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "use_aux_norm": True, "bias": True}
        | {"num_aux_hidden_states": 3, "num_hidden_layers": 2},
        tensors=ENDS
        | {"d2t": "D", "fc.bias": "H"}
        | {f"aux_norm_{name}.weight": "T" for name in ("low", "mid", "high")}
        | layer("model.midlayer.", FIRST, *NORMS)
        | layer("model.layers.1.", gqa("H"), "hidden_norm", "post_attention_layernorm"),
        facts={"taps": TAPS, "fc_norms": ["aux_norm_low", "aux_norm_mid", "aux_norm_high"], "num_layers": 2},
    ),
    "SGLang's reader, the target's output head": Format(
        catalogue="SGLang",
        source=f"{SGLANG} models/llama_eagle3.py: draft_vocab_size null",
        config=EAGLE3 | IDS | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "draft_vocab_size": None},
        tensors={"fc.weight": "H 3T", "norm.weight": "H"} | layer("midlayer.", FIRST, *NORMS),
        facts={"taps": TAPS, "head": "target"},
    ),
    "SGLang's reader, tied": Format(
        catalogue="SGLang",
        source=f"{SGLANG} models/llama_eagle3.py: tie_word_embeddings",
        config=EAGLE3
        | IDS
        | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "tie_word_embeddings": True}
        | {"draft_vocab_size": 64},
        tensors={"fc.weight": "H 3T", "norm.weight": "H", "embed_tokens.weight": "V H"}
        | layer("midlayer.", FIRST, *NORMS),
        facts={"taps": TAPS, "head": "embedding"},
    ),
    "NVIDIA Model Optimizer": Format(
        catalogue="nvidia (SafeAILab's list)",
        source="NVIDIA/Model-Optimizer's export template (eagle_config); vllm-project/vllm #42143 (norm_before_fc)",
        config=EAGLE3
        | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "eagle_config": NVIDIA, "pretraining_tp": 1},
        tensors=ENDS | MAPS | layer("midlayer.", FIRST, *NORMS) | {"input_norm.weight": "3T"},
        facts={"taps": TAPS, "input_norm": True},
    ),
    "vLLM's reader": Format(
        catalogue="AngelSlim, Tengyunw",
        source=f"{VLLM} models/llama_eagle3.py: layers before which states are, biases, several layers",
        config=EAGLE3
        | {"architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 16, "attention_bias": True, "mlp_bias": True}
        | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "num_hidden_layers": 2}
        | {"norm_before_residual": True},
        tensors=ENDS
        | MAPS
        | layer("layers.0.", FIRST, *NORMS, biases=BIASES)
        | layer("layers.1.", gqa("H"), "input_layernorm", "post_attention_layernorm", biases=BIASES),
        facts={"taps": TAPS, "num_layers": 2, "residual_normed": True},
    ),
    "speculators": Format(
        catalogue="speculators",
        source=f"{SPECULATORS} src/speculators/models/eagle3/config.py, core.py; vllm …/speculators/algos.py 055e47c2",
        config=speculators(
            {key: value for key, value in BASE.items() if key != "tie_word_embeddings"}
            | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
            | {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
        ),
        tensors=ENDS
        | MAPS
        | layer("layers.0.", FIRST, *NORMS)
        | LATER
        | {"input_norm.weight": "3T", "embed_tokens.weight": "V H"},
        facts={"taps": TAPS, "num_layers": 2, "residual_normed": True, "feeds_normed": True, "input_norm": True}
        | {"windows": (7, None), "theta": 700.0},
    ),
    "speculators, Qwen3's layer": Format(
        catalogue="speculators",
        source=f"{SPECULATORS} src/speculators/models/eagle3/model_definitions.py (Qwen3DecoderEagle3FirstLayer)",
        config=speculators(
            BASE
            | {"model_type": "qwen3", "head_dim": 16, "layer_types": ["full_attention"]}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}},
            fc_norm=True,
        ),
        tensors=ENDS
        | MAPS
        | layer("layers.0.", FIRST | {"q_norm": "HEAD", "k_norm": "HEAD"}, *NORMS)
        | {f"fc_norm.{i}.weight": "T" for i in range(3)},
        facts={"taps": TAPS, "fc_norms": [f"fc_norm.{i}" for i in range(3)], "qk_norm": True, "theta": 900.0},
    ),
    "MLA": Format(
        catalogue="Kimi-K2.x",
        source="vllm-project/vllm 03590193 models/deepseek_eagle3.py; sgl-project/sglang 054a1cef kimi_k25_eagle3.py",
        config={key: value for key, value in EAGLE3.items() if key != "num_key_value_heads"}
        | IDS
        | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 384}
        | {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"rope_theta": 600.0, "rope_scaling": YARN, "fc_norm": True, "norm_output": True},
        tensors=ENDS | MAPS | layer("midlayer.", MLA, *NORMS) | {f"fc_norm.{i}.weight": "T" for i in range(3)},
        facts={"taps": TAPS, "theta": 600.0, "rope": YARN, "mla": (24, 12, 8, 16), "feeds_normed": True}
        | {"fc_norms": [f"fc_norm.{i}" for i in range(3)]},
        sizes=MLA_SIZES,
    ),
    "SafeAILab EAGLE-1/2": Format(
        catalogue="SafeAILab",
        source=f"{EAGLE} eagle/train/vicuna_7B_config.json, eagle/model/cnets1.py; pytorch_model.bin",
        config=BASE | {"architectures": ["LlamaForCausalLM"]},
        tensors=layer("layers.0.", gqa("H"), "post_attention_layernorm")
        | {"fc.weight": "H 2H", "fc.bias": "H", "embed_tokens.weight": "V H"},
        facts={"eagle": 1},
        sizes=OWN_HEAD_DIM,
        pickled=True,
    ),
    "SafeAILab EAGLE-1/2, Qwen2": Format(
        catalogue="SafeAILab",
        source=f"{EAGLE} eagle/testbug/model/config.json (max_sequence_length), eagle/model/cnets1.py (qkv_bias, bias)",
        config={key: value for key, value in BASE.items() if key != "max_position_embeddings"}
        | {"architectures": ["LlamaForCausalLM"], "qkv_bias": True, "bias": False, "max_sequence_length": 80}
        | {"num_hidden_layers": 2, "rope_theta": 300.0, "model_type": "qwen2"},
        tensors=layer("layers.0.", gqa("H"), "post_attention_layernorm", biases=QKV_BIASES)
        | layer("layers.1.", gqa("H"), "input_layernorm", "post_attention_layernorm", biases=QKV_BIASES)
        | {"fc.weight": "H 2H"},
        facts={"eagle": 1, "num_layers": 2, "theta": 300.0},
        sizes=OWN_HEAD_DIM,
    ),
}
_MLA, _ROPE = FORMATS["MLA"], {"rope_type": "linear", "rope_theta": 400.0, "factor": 4.0}
_NO_POSITIONS = {key: value for key, value in BASE.items() if key != "max_position_embeddings"}
VARIANTS = {
    "EAGLE-1/2, further keys": Format(
        catalogue="SafeAILab",
        source=f"{VLLM} models/llama_eagle.py (LlamaDecoderLayer's keys)",
        config=BASE
        | {"architectures": ["LlamaForCausalLM"], "head_dim": 16, "attention_bias": True, "mlp_bias": True}
        | {"hidden_act": "gelu", "layer_types": ["sliding_attention"], "sliding_window": 7, "rope_parameters": _ROPE},
        tensors=layer("layers.0.", gqa("H"), "post_attention_layernorm", biases=BIASES)
        | {"fc.weight": "H 2H", "fc.bias": "H"},
        facts={"eagle": 1, "act": "gelu", "windows": (7,), "theta": 400.0, "rope": _ROPE},
    ),
    "EAGLE-1/2, older rope": Format(
        catalogue="SafeAILab",
        source=f"{EAGLE} eagle/model/cnets1.py (rope_scaling)",
        config=BASE
        | {"architectures": ["LlamaForCausalLM"], "head_dim": 16, "rope_scaling": {"type": "linear", "factor": 4.0}},
        tensors=layer("layers.0.", gqa("H"), "post_attention_layernorm") | {"fc.weight": "H 2H"},
        facts={"eagle": 1, "rope": {"rope_type": "linear", "factor": 4.0}},
    ),
    "EAGLE-3, positions by the older key": Format(
        catalogue="SafeAILab",
        source=f"{EAGLE} eagle/testbug/model/config.json (max_sequence_length)",
        config=_NO_POSITIONS
        | IDS
        | {"architectures": ["LlamaForCausalLM"], "head_dim": 16, "draft_vocab_size": 40, "max_sequence_length": 80}
        | {"hidden_act": "gelu"},
        tensors=ENDS | MAPS | layer("midlayer.", FIRST, *NORMS),
        facts={"taps": TAPS, "act": "gelu"},
    ),
    "MLA, further keys": Format(
        catalogue="Kimi-K2.x",
        source=_MLA.source,
        config={key: value for key, value in _MLA.config.items() if key not in ("fc_norm", "rope_theta")}
        | {"max_position_embeddings": None, "max_sequence_length": 80, "rope_scaling": None, "rope_parameters": _ROPE}
        | {"num_hidden_layers": 2, "hidden_act": "gelu", "bias": True, "use_aux_norm": True}
        | {"norm_before_residual": True, "hidden_size": 24, "target_hidden_size": 32},
        tensors=_MLA.tensors
        | {"fc.bias": "H", "embed_tokens.weight": "V H"}
        | layer(
            "layers.1.",
            MLA | {"q_a_proj": "R H", "kv_a_proj_with_mqa": "KVA H"},
            "input_layernorm",
            "post_attention_layernorm",
        ),
        facts={key: value for key, value in _MLA.facts.items() if key not in ("theta", "rope")}
        | {"theta": 400.0, "rope": _ROPE, "num_layers": 2, "act": "gelu", "residual_normed": True},
        sizes=MLA_SIZES | {"H": 24},
    ),
    "MLA, tied": Format(
        catalogue="Kimi-K2.x",
        source=_MLA.source,
        config={key: value for key, value in _MLA.config.items() if key not in ("fc_norm", "draft_vocab_size")}
        | {"tie_word_embeddings": True, "norm_before_fc": True},
        tensors={"fc.weight": "H 3T", "norm.weight": "H", "embed_tokens.weight": "V H", "input_norm.weight": "3T"}
        | layer("midlayer.", MLA, *NORMS),
        facts={key: value for key, value in _MLA.facts.items() if key != "fc_norms"}
        | {"head": "embedding", "input_norm": True},
        sizes=MLA_SIZES,
    ),
}
"""Further keys that the readers of a format take, so that each is given once."""
