"""Folders that vLLM reads, of the models that the reference engine ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from attn_backends_reference.models.exports import export

CHECKPOINTS = Path(__file__).parents[3] / "reference/attn_backends_reference/models/checkpoints"


def write_models(folder: Path) -> Path:
    """gqa with its EAGLE-3 head, also with windows in every other layer, and with its EAGLE head; mla with one MTP
    module, run again each step, and with three.
    """
    tensors = load_file(CHECKPOINTS / "gqa/target/model.safetensors")
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20}
    for name, fields in (("gqa", {}), ("gqa-window", windows)):
        _write(folder / name, _config("gqa/target") | fields, tensors)
        _write_eagle3(folder / f"{name}-draft")
    _write(folder / "gqa-eagle", _config("gqa/target"), tensors)
    _write_eagle(folder / "gqa-eagle-draft")
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


def _write_eagle(folder: Path) -> None:
    """Without the bias, for which vLLM's class has no place: the head drafts less well, and is as good to compare with.
    `bias` is that of the attention layers to vLLM.
    """
    tensors = load_file(CHECKPOINTS / "gqa/draft/model.safetensors")
    del tensors["fc.bias"]
    _write(folder, _config("gqa/draft") | {"bias": False}, tensors)


def _write_mtp(folder: Path) -> None:
    mla = CHECKPOINTS / "mla"
    for num in (1, 3):
        target, draft = export(mla / "target", mla / "mtp", "vllm", folder / f"mla-{num}-written", num_modules=num)
        target.rename(folder / f"mla-{num}")
        draft.rename(folder / f"mla-{num}-draft")
