"""MTP modules for tests: random ones of any target, and folders as they are published."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attn_backends_reference.models import DraftModel, TargetModel
from attn_backends_reference.models.mtp import MtpModule, module_config
from tests import reference_models as rm

NUM_LAYERS = 2
NUM_MODULES = 2
DENSE = {"first_k_dense_replace": NUM_LAYERS + NUM_MODULES}
NAMES = ("gqa_bias", "mla_q_lora", "mla_experts")


def random_mtp(target: TargetModel, num_modules: int, seed: int = 1) -> tuple[DraftModel, ...]:
    """Modules with the target's last layer and random weights, in its dtype and on its device."""
    config = copy.deepcopy(target._decoder.config)
    if getattr(config, "first_k_dense_replace", 0) == config.num_hidden_layers:
        config.first_k_dense_replace += num_modules
    modules = []
    for index in range(num_modules):
        module = MtpModule(module_config(config, index))
        rm.randomize(module, seed + index)
        modules.append(DraftModel(module.to(target.device, target.dtype), target))
    return tuple(modules)


def deep_model(name: str) -> PreTrainedModel:
    """A model of a tiny target's layers and, behind them, those of its MTP modules."""
    changes = DENSE if name in ("mla", "mla_q_lora") else {}
    config = rm.tiny_config(name, num_hidden_layers=NUM_LAYERS + NUM_MODULES, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    rm.randomize(model, 0)
    return model.requires_grad_(False)


def extra_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What an MTP module has beside its layer, by published names; embedding and head are the model's."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for index in range(NUM_LAYERS, NUM_LAYERS + NUM_MODULES):
        prefix = f"model.layers.{index}."
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + 0.2 * torch.randn(rm.HIDDEN, generator=generator)
        weight = torch.randn(rm.HIDDEN, 2 * rm.HIDDEN, generator=generator)
        tensors[f"{prefix}eh_proj.weight"] = weight * (2 * rm.HIDDEN) ** -0.5
        tensors[f"{prefix}embed_tokens.weight"] = model.model.embed_tokens.weight.clone()
        tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.clone()
    return tensors


def publish(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Writes a target's folder as DeepSeek-V3's is: shards with an index, MTP modules behind the layers.

    transformers writes the layers, so that their names are its own. Returns the tensors of `extra_tensors`.
    """
    model.save_pretrained(folder, max_shard_size="20KB")
    extra = extra_tensors(model)
    save_file(extra, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= dict.fromkeys(extra, "model-mtp.safetensors")
    file.write_text(json.dumps(index))
    edit_config(folder, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=NUM_MODULES)
    return extra


def extract(source: Path, folder: Path) -> None:
    """Writes the modules of a target's folder as a folder of their own, in one file."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = [f"{config['architectures'][0]}MTP"]
    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    behind = tuple(f"model.layers.{index}." for index in range(NUM_LAYERS, NUM_LAYERS + NUM_MODULES))
    own = {name: x for name, x in weights.items() if name.startswith(behind) and "embed_tokens" not in name}
    own = {name: x for name, x in own.items() if "shared_head.head" not in name}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
