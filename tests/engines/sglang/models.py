"""The library's trained models in the forms that SGLang loads.

`gqa`: a fifth layer that adds nothing, because SGLang's Llama hands out states in front of a layer and `gqa-eagle3`
takes the one behind the last. `mla`: the target, and MTP module 0 as a NextN draft, as `attn-backends export` writes
them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attn_backends_reference.models.exports import export

ROOT = Path(__file__).parents[3]
CHECKPOINTS = ROOT / "reference" / "attn_backends_reference" / "models" / "checkpoints"


def write_all(folder: Path, min_hidden: int = 0) -> None:
    """gqa_target, gqa_eagle3, mla_target and mla_nextn. min_hidden: the smallest hidden size of `mla`."""
    gqa, weights = CHECKPOINTS / "gqa", load_file(CHECKPOINTS / "gqa" / "target" / "model.safetensors")
    _write(folder / "gqa_target", *_five_layers(json.loads((gqa / "target" / "config.json").read_text()), weights))
    shutil.copytree(gqa / "eagle3", folder / "gqa_eagle3")
    mla = CHECKPOINTS / "mla"
    written = export(mla / "target", mla / "mtp", "sglang", folder / "mla", min_hidden=min_hidden)
    for path, name in zip(written, ("mla_target", "mla_nextn"), strict=True):
        path.rename(folder / name)


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
