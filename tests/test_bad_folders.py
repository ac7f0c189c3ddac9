"""Every kind of folder, and what may be wrong with one: a `CheckpointError` names the file and the key or tensor, and
no weight is read before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import heads, load_draft, load_target
from attn_backends_reference.models.block import load_block
from attn_backends_reference.models.block_draft import BlockDraft, save_block
from tests import mtp_models, test_v4_published
from tests import reference_models as rm
from tests.block_formats import BLOCKS
from tests.head_catalogue import FORMATS
from tests.head_formats import write
from tests.head_runs import target_of

Fields, Tensors = dict[str, Any], dict[str, Tensor]
FILE = "model.safetensors"
Load = Callable[[Path], object]
THEIRS = ("SafeAILab EAGLE-1/2", "SpecForge", "MLA", "speculators")


def write_target(folder: Path) -> Load:
    rm.tiny_target("gqa").save_pretrained(folder)
    return lambda path: load_target(path, torch.float32)


def write_eagle(folder: Path) -> Load:
    target = rm.served_target("gqa", rm.tiny_target("gqa"))
    rm.tiny_draft("gqa").save_pretrained(folder, torch.float32)
    return lambda path: load_draft(path, target)


def write_block(folder: Path) -> Load:
    target = rm.served_target("gqa", rm.tiny_target("gqa"))
    save_block(BlockDraft(LlamaConfig(**rm.GQA | {"num_hidden_layers": 1}, block_size=4)), folder)
    return lambda path: load_block(path, target)


def write_nextn(folder: Path) -> Load:
    """A target's folder with modules behind its layers, in one file."""
    mtp_models.publish(folder, mtp_models.deep_model("mla_experts"))
    tensors = {name: x for shard in folder.glob("*.safetensors") for name, x in load_file(shard).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    target = load_target(folder, torch.float32)
    return lambda path: load_draft(path, target)


def write_modules(folder: Path) -> Load:
    load = write_nextn(folder.parent / "whole")
    folder.rmdir()
    mtp_models.extract(folder.parent / "whole", folder)
    return load


def write_dflash(folder: Path) -> Load:
    format = BLOCKS["SpecForge DFlash"]
    target = target_of(format)
    write(format, folder)
    return lambda path: load_block(path, target)


def write_head(name: str, folder: Path) -> Load:
    format = replace(FORMATS[name], pickled=False)
    target = target_of(format)
    write(format, folder)
    return lambda path: load_draft(path, target)


def write_v4(folder: Path) -> Load:
    layer = test_v4_published.random_model(8, num_hidden_layers=1, num_hash_layers=0, compress_ratios=[0])
    tensors = test_v4_published.published(test_v4_published.random_model(7))
    tensors |= {f"mtp.0.{name}": x for name, x in test_v4_published.module_tensors(layer).items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / FILE)
    fields = test_v4_published.CONFIG | {"quantization_config": None}
    (folder / "config.json").write_text(json.dumps(fields))
    target = load_target(folder, torch.float32)
    return lambda path: load_draft(path, target)


KINDS: dict[str, Callable[[Path], Load]] = {
    "target": write_target,
    "our EAGLE draft": write_eagle,
    "our block draft": write_block,
    "MTP modules": write_modules,
    "NEXTN": write_nextn,
    "MTP of DeepSeek-V4": write_v4,
    "DFlash": write_dflash,
    **{name: partial(write_head, name) for name in THEIRS},
}


@pytest.fixture(scope="module", params=KINDS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Load]:
    """A folder of each kind, and what loads it."""
    folder = tmp_path_factory.mktemp("original") / "folder"
    folder.mkdir()
    return folder, KINDS[request.param](folder)


@pytest.fixture
def kind(original: tuple[Path, Load], tmp_path: Path) -> tuple[Path, Load]:
    """A copy of it."""
    return shutil.copytree(original[0], tmp_path / "folder"), original[1]


@pytest.fixture
def refusal(kind: tuple[Path, Load], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The words of the `CheckpointError` that refuses the folder; only the headers of its files may be read."""
    opened = safetensors.safe_open

    class Headers:
        def __init__(self, *given: Any, **named: Any) -> None:
            self.file = opened(*given, **named)

        def __enter__(self) -> Headers:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            assert name in ("keys", "get_slice"), f"{name} reads weights"
            return getattr(self.file, name)

    def refused() -> str:
        with pytest.raises(CheckpointError) as error:
            kind[1](kind[0])
        return str(error.value)

    monkeypatch.setattr("safetensors.safe_open", Headers)
    return refused


def test_a_folder_that_is_right_loads(kind: tuple[Path, Load]) -> None:
    kind[1](kind[0])


def layer(fields: Fields) -> Fields:
    """The keys of a folder's layers; speculators' are in a table."""
    return fields.get("transformer_layer_config", fields)


def dynamic(fields: Fields) -> None:
    for key in ("rope_theta", "rope_scaling"):
        layer(fields).pop(key, None)
    layer(fields)["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


KEYS: dict[str, tuple[Callable[[Fields], object], str]] = {
    "rope type": (dynamic, "dynamic.*rope_type|rope_type.*dynamic"),
    "quantization": (lambda fields: fields.update(quantization_config={"quant_method": "awq"}), "quantization_config"),
    "key": (lambda fields: layer(fields).update(qk_clip_factor=3.0), "qk_clip_factor"),
    "vocabulary": (lambda fields: layer(fields).update(vocab_size=65), r"vocab_size 65|embed_tokens\.weight is \[64"),
    "width": (lambda fields: layer(fields).update(hidden_size=48), r"hidden_size 48|embed_tokens\.weight is \[64, 32"),
    "own Python": (
        lambda fields: layer(fields).update(model_type="evil", auto_map={"AutoConfig": "evil.Evil"}),
        "auto_map|model_type='evil'",
    ),
}


@pytest.mark.parametrize("fault", KEYS)
def test_a_key_is_refused_by_its_name(kind: tuple[Path, Load], refusal: Callable[[], str], fault: str) -> None:
    edit, named = KEYS[fault]
    file = kind[0] / "config.json"
    fields = json.loads(file.read_text())
    edit(fields)
    file.write_text(json.dumps(fields))
    said = refusal()
    assert str(kind[0]) in said
    assert "config.json" in said
    assert re.search(named, said), said


def change_norm(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> None:
    name = norm_of(tensors)
    tensors[name] = change(tensors[name])


def norm_of(tensors: Tensors) -> str:
    """A norm that every kind of folder has; of modules behind a target's layers, theirs."""
    norms = [name for name in tensors if name.endswith("norm.weight") and "model.norm" not in name]
    return max(norms, key=lambda name: (name.startswith("mtp."), name))


WEIGHTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda tensors: tensors.pop(norm_of(tensors)), "1 missing: NORM"),
    "shape": (lambda tensors: change_norm(tensors, lambda _: torch.ones(7)), r"NORM is \[7\], not \[\d+\]"),
    "unknown": (lambda tensors: tensors.update({f"{norm_of(tensors)}.odd": torch.ones(2)}), "architecture: NORM.odd"),
    "8 bits": (lambda tensors: change_norm(tensors, lambda x: x.to(torch.float8_e4m3fn)), "NORM is stored as F8_E4M3"),
    "integers": (lambda tensors: change_norm(tensors, lambda x: x.int()), "NORM is stored as I32"),
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_tensor_is_refused_by_its_name(kind: tuple[Path, Load], refusal: Callable[[], str], fault: str) -> None:
    edit, named = WEIGHTS[fault]
    tensors = load_file(kind[0] / FILE)
    norm = heads.rename(norm_of(tensors))
    edit(tensors)
    save_file(tensors, kind[0] / FILE, metadata={"format": "pt"})
    said = refusal()
    assert str(kind[0]) in said
    assert re.search(named.replace("NORM", rf"\S*{re.escape(norm)}"), said), said


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not a JSON object"),
    "no weights": (lambda folder: (folder / FILE).unlink(), r"no model\.safetensors"),
    "cut short": (lambda folder: os.truncate(folder / FILE, 500), "model.safetensors.*read|read.*model.safetensors"),
    "outside": (lambda folder: place(folder, "../else.safetensors"), r"places \S+ in '\.\./else.*beside it"),
    "absent": (lambda folder: place(folder, "else.safetensors"), r"index\.json places \S+ in else.*the folder lacks"),
}


def place(folder: Path, shard: str) -> None:
    """An index that has all tensors in a shard."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))


@pytest.mark.parametrize("fault", FILES)
def test_a_file_is_refused_by_its_name(kind: tuple[Path, Load], refusal: Callable[[], str], fault: str) -> None:
    edit, named = FILES[fault]
    edit(kind[0])
    said = refusal()
    assert str(kind[0]) in said
    assert re.search(named, said), said
