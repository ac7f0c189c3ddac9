"""Folders that vLLM reads, of the models that the reference engine ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

CHECKPOINTS = Path(__file__).parents[3] / "reference/attn_backends_reference/models/checkpoints"


def write_models(folder: Path) -> Path:
    """gqa with its EAGLE-3 head, also with windows in every other layer; mla with one MTP module, run again each step,
    and with three.
    """
    tensors = load_file(CHECKPOINTS / "gqa/target/model.safetensors")
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20}
    for name, fields in (("gqa", {}), ("gqa-window", windows)):
        _write(folder / name, _config("gqa/target") | fields, tensors)
        _write_eagle3(folder / f"{name}-draft")
    _write_mtp(folder)
    return folder


def _config(name: str) -> dict[str, Any]:
    return json.loads((CHECKPOINTS / name / "config.json").read_text())


def _write(folder: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_eagle3(folder: Path) -> None:
    """vLLM counts the layers before which a state is taken, the shipped head those behind."""
    fields = _config("gqa/eagle3")
    layers = fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    fields["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
    _write(folder, fields, load_file(CHECKPOINTS / "gqa/eagle3/model.safetensors"))


def _write_mtp(folder: Path) -> None:
    """vLLM takes the number of modules from the target's configuration, and its class does not tie the head."""
    target, draft = _config("mla/target"), _config("mla/mtp")
    target["tie_word_embeddings"] = draft["tie_word_embeddings"] = False
    tensors = load_file(CHECKPOINTS / "mla/target/model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    modules, first = load_file(CHECKPOINTS / "mla/mtp/model.safetensors"), target["num_hidden_layers"]
    for module in range(first, first + draft["num_nextn_predict_layers"]):
        modules[f"model.layers.{module}.embed_tokens.weight"] = embedding.clone()
        modules[f"model.layers.{module}.shared_head.head.weight"] = embedding.clone()
    for num in (1, 3):
        fields = {"num_nextn_predict_layers": num}
        kept = {name: tensor for name, tensor in modules.items() if int(name.split(".")[2]) < first + num}
        _write(folder / f"mla-{num}", target | fields, tensors)
        _write(folder / f"mla-{num}-draft", draft | fields, kept)
