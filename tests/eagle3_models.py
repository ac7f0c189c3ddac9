"""EAGLE-3 drafts for tests: random ones of any Llama target, and folders as they are published."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from attn_backends_reference.models import TargetModel
from attn_backends_reference.models.eagle3 import Eagle3Draft, Eagle3Model
from attn_backends_reference.models.head_config import read_eagle3
from tests import reference_models as rm
from tests.eagle3_oracle import Oracle

LAYERS, NUM_LAYERS, NUM_IDS = (0, 2, 3), 4, 40
CONFIG: dict[str, Any] = {
    "vocab_size": rm.VOCAB,
    "draft_vocab_size": NUM_IDS,
    "hidden_size": rm.HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
}


def random_draft(config: dict[str, Any], seed: int = 1) -> Eagle3Draft:
    """Random weights, and a random choice of the target's ids."""
    draft = Eagle3Draft(read_eagle3(config, "the draft")).eval()
    parts = {name: part for name, part in draft.named_children() if name != "rotary_emb"}
    rm.randomize(nn.ModuleDict(parts), seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(config["vocab_size"], generator=generator)[: len(draft.d2t)].sort().values
    draft.d2t.copy_(ids - torch.arange(len(ids)))
    draft.t2d.zero_()[ids] = True
    return draft.requires_grad_(False)


def published(draft: Eagle3Draft) -> dict[str, Tensor]:
    """A draft's tensors by the names that published folders have."""
    layer, attention, mlp = draft.layers[0], draft.layers[0].self_attn, draft.layers[0].mlp
    modules = {
        "fc": draft.fc,
        "midlayer.hidden_norm": layer.hidden_norm,
        "midlayer.input_layernorm": layer.input_layernorm,
        "midlayer.post_attention_layernorm": layer.post_attention_layernorm,
        "midlayer.self_attn.q_proj": attention.q_proj,
        "midlayer.self_attn.k_proj": attention.k_proj,
        "midlayer.self_attn.v_proj": attention.v_proj,
        "midlayer.self_attn.o_proj": attention.o_proj,
        "midlayer.mlp.gate_proj": mlp.gate_proj,
        "midlayer.mlp.up_proj": mlp.up_proj,
        "midlayer.mlp.down_proj": mlp.down_proj,
        "norm": draft.norm,
        "lm_head": draft.lm_head,
    }
    tensors = {f"{name}.weight": module.weight.detach().clone() for name, module in modules.items()}
    return tensors | {"d2t": draft.d2t.clone(), "t2d": draft.t2d.clone()}


def publish(folder: Path, draft: Eagle3Draft, config: dict[str, Any]) -> None:
    """Writes a draft's folder as published."""
    folder.mkdir(exist_ok=True)
    fields = config | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(published(draft), folder / "model.safetensors", metadata={"format": "pt"})


@cache
def tiny_target(num_layers: int = NUM_LAYERS) -> PreTrainedModel:
    """A random float32 target deep enough for three states."""
    return rm.tiny_target("gqa", num_hidden_layers=num_layers)


@cache
def tiny_oracle() -> Oracle:
    """The tiny target and a draft of it."""
    return Oracle(tiny_target(), CONFIG, published(random_draft(CONFIG)), LAYERS)


def served(device: str = "cpu") -> tuple[TargetModel, Eagle3Model]:
    """Copies of the oracle's models on a device, attending through backends."""
    target = rm.served_target("gqa", copy.deepcopy(tiny_target()).to(device))
    return target, Eagle3Model(random_draft(CONFIG).to(device), target, LAYERS)
