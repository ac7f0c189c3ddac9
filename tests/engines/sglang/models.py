"""The library's trained models in the forms that SGLang loads.

`gqa`: a fifth layer that adds nothing, because SGLang's Llama hands out states in front of a layer and `gqa-eagle3`
takes the one behind the last. `mla`: the target, and MTP module 0 as a NextN draft, whose MLP SGLang makes a mixture:
of two experts, both the dense MLP, and a shared one of zeros.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[3]
CHECKPOINTS = ROOT / "reference" / "attn_backends_reference" / "models" / "checkpoints"
DEEPSEEK = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "yarn",  # of factor 1, so none: the only kind that SGLang's DeepSeek takes on a CPU
        "type": "yarn",
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
}


def write_all(folder: Path) -> None:
    """gqa_target, gqa_eagle3, mla_target and mla_nextn."""
    _write(folder / "gqa_target", *_five_layers(*_read("gqa/target")))
    shutil.copytree(CHECKPOINTS / "gqa" / "eagle3", folder / "gqa_eagle3")
    config, weights = _read("mla/target")
    _write(folder / "mla_target", config | DEEPSEEK, weights)
    _write(folder / "mla_nextn", *_nextn(weights["model.embed_tokens.weight"], *_read("mla/mtp")))


def _read(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = CHECKPOINTS / name
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def _five_layers(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    last = config["num_hidden_layers"] - 1
    own = {name: tensor for name, tensor in weights.items() if name.startswith(f"model.layers.{last}.")}
    for name, tensor in own.items():
        adds = "o_proj" in name or "down_proj" in name
        weights[name.replace(f".{last}.", f".{last + 1}.", 1)] = torch.zeros_like(tensor) if adds else tensor.clone()
    return config | {"num_hidden_layers": last + 2}, weights


def _nextn(
    embed: Tensor, config: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layer = config["num_hidden_layers"]
    mlp = f"model.layers.{layer}.mlp."
    own = {name: tensor for name, tensor in weights.items() if name.startswith(f"model.layers.{layer}.")}
    for part in ("gate_proj", "up_proj", "down_proj"):
        dense = own.pop(f"{mlp}{part}.weight")
        own |= {f"{mlp}experts.{expert}.{part}.weight": dense.clone() for expert in range(2)}
        own[f"{mlp}shared_experts.{part}.weight"] = torch.zeros_like(dense)
    own[f"{mlp}gate.weight"] = torch.zeros(2, config["hidden_size"], dtype=embed.dtype)
    own[f"{mlp}gate.e_score_correction_bias"] = torch.zeros(2, dtype=embed.dtype)
    own["model.embed_tokens.weight"] = embed
    mixture = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
    }
    return config | DEEPSEEK | mixture, own
