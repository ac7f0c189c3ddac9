"""The formats of published draft heads: configurations, tensors and shapes as exporters and loaders state them, tiny.

Facts of public code, each with its file and commit. Repositories: EAGLE is SafeAILab/EAGLE, SpecForge sgl-project's,
speculators vllm-project's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SIZES = {"H": 32, "T": 32, "I": 40, "Q": 64, "K": 32, "V": 64, "D": 40, "HEAD": 16, "KV": 24, "R": 20, "ROPE": 8}
"""Columns: of the head, of a state of its target, of its MLP, of queries, of keys; tokens of the target and the draft;
of one attention head; of MLA's key-value rank, query rank and rotary part.
"""
EAGLE = "SafeAILab/EAGLE cb7e0841"
SPECFORGE = "sgl-project/SpecForge a6b6b023"
SPECULATORS = "vllm-project/speculators c05b95b3"
SGLANG = "sgl-project/sglang 03d5a777 (0.5.23 for later keys)"
VLLM = "vllm-project/vllm 00bd1493 (0.33.0 for later keys)"
EPS = 0.05
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8,
}


@dataclass(frozen=True)
class Format:
    """A format of drafts. catalogue: whose heads have it. source: of its tensors and keys. config: config.json.
    tensors: names, and sizes by `SIZES`, such as "Q 2H". facts: what the source computes, for `head_forward`. sizes:
    others than `SIZES`. num_layers: of its target; pickled: whether its tensors are in pytorch_model.bin.
    """

    catalogue: str
    source: str
    config: Mapping[str, Any]
    tensors: Mapping[str, str]
    facts: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)
    num_layers: int = 4
    pickled: bool = False

    def shape(self, sizes: str) -> tuple[int, ...]:
        """Of words such as "D 2H"."""
        known = SIZES | dict(self.sizes)
        words = [re.fullmatch(r"(\d*)(\w+)", word) for word in sizes.split()]
        return tuple(int(word[1] or 1) * known[word[2]] for word in words if word)


def layer(prefix: str, attention: Mapping[str, str], *norms: str, biases: tuple[str, ...] = ()) -> dict[str, str]:
    """A decoder layer: its attention's tensors, a gated MLP, and norms."""
    mlp = {"mlp.gate_proj": "I H", "mlp.up_proj": "I H", "mlp.down_proj": "H I"}
    weights = {f"self_attn.{name}": sizes for name, sizes in attention.items()} | mlp | dict.fromkeys(norms, "H")
    named = {f"{prefix}{name}.weight": sizes for name, sizes in weights.items()}
    return named | {f"{prefix}{name}.bias": weights[name].split()[0] for name in biases}


def gqa(width: str) -> dict[str, str]:
    """Llama's projections of an input of `width`."""
    return {"q_proj": f"Q {width}", "k_proj": f"K {width}", "v_proj": f"K {width}", "o_proj": "H Q"}


MLA = {
    "q_a_proj": "R 2H",
    "q_a_layernorm": "R",
    "q_b_proj": "QB R",
    "kv_a_proj_with_mqa": "KVA 2H",
    "kv_a_layernorm": "KV",
    "kv_b_proj": "KVB KV",
    "o_proj": "H Q",
}
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
ENDS = {"fc.weight": "H 3T", "norm.weight": "H", "lm_head.weight": "D H"}
MAPS = {"d2t": "D", "t2d": "V"}
QKV_BIASES = tuple(f"self_attn.{name}_proj" for name in "qkv")
BIASES = (*QKV_BIASES, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
BASE: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 64,
}
EAGLE3 = BASE | {"draft_vocab_size": 40}
TAPS = (0, 2, 3)
NVIDIA = {
    "eagle_aux_hidden_state_layer_ids": list(TAPS),
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
    "norm_before_fc": True,
}
PROPOSALS = {
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
}
OWN_HEAD_DIM = {"HEAD": 8, "Q": 32, "K": 16}
MLA_SIZES = {"KVA": 32, "QB": 4 * 20, "KVB": 4 * (12 + 16), "Q": 64}


def speculators(layer: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """config.json of speculators: the layer's keys in a table of their own."""
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": PROPOSALS,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": dict(layer),
    } | keys


def write(
    format: Format,
    folder: Path,
    config: Mapping[str, Any] | None = None,
    given: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """A folder of the format with random tensors, which it returns. config: another one than the format's. given:
    tensors that take the place of random ones.
    """
    generator, tensors = torch.Generator().manual_seed(7), dict[str, Tensor]()
    for name, sizes in format.tensors.items():
        shape = format.shape(sizes)
        if name in MAPS:
            continue
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and "norm" in name
        tensors[name] = 1 + 0.3 * noise if is_norm else 1.5 * noise * shape[-1] ** -0.5
    vocab_size, num_ids = format.shape("V D")
    ids = torch.randperm(vocab_size, generator=generator)[:num_ids].sort().values
    maps = {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True),
    }
    tensors |= {name: maps[name] for name in format.tensors if name in MAPS} | dict(given)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(format.config if config is None else config)))
    if format.pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors
