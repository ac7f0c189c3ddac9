"""Folders in 8-bit blocks, as DeepSeek-V3 publishes them: their values to the bit, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import load_draft, load_mtp, load_target, open_target
from attn_backends_reference.models.decoder import TargetModel
from attn_backends_reference.models.quantization import EXCLUSIONS, SERVED, quantization_of
from tests import mtp_models
from tests import reference_models as rm

BLOCK = (20, 12)  # 32 rows are a block and three fifths, 32 columns two blocks and two thirds
KEPT = ["lm_head", "model.layers.1.mlp.gate", "model.layers.0.self_attn.o_proj"]
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": KEPT,
}
Tensors = dict[str, Tensor]


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether DeepSeek-V3 publishes a tensor in blocks: linear layers but for the router, the head and what is kept."""
    kept = any(name.startswith(f"{module}.") for module in KEPT)
    return tensor.ndim == 2 and "embed_tokens" not in name and not kept


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit floats, and a scale for each block, found one by one."""
    rows, columns = -(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1])
    stored, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1]))
            scales[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return stored, scales


def exact(stored: Tensor, scales: Tensor) -> Tensor:
    """In float64, element by element, rounded to bfloat16."""
    values = torch.empty(stored.shape, dtype=torch.float64)
    for row in range(stored.shape[0]):
        for column in range(stored.shape[1]):
            scale = scales[row // BLOCK[0], column // BLOCK[1]].double()
            values[row, column] = stored[row, column].double() * scale
    return values.bfloat16()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny DeepSeek-V3 in blocks; its MTP module, too, is stored so."""
    rm.tiny_target("mla_experts").bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    module = {f"model.layers.2.{name}": tensors[f"model.layers.1.{name}"] for name in ("self_attn.q_proj.weight",)}
    tensors |= module | {"model.layers.2.eh_proj.weight": torch.ones(rm.HIDDEN, 2 * rm.HIDDEN, dtype=torch.bfloat16)}
    for name in [name for name, tensor in tensors.items() if is_quantized(name, tensor)]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name].float())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config=QUANTIZATION, num_nextn_predict_layers=1)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def twin(folder: Path, into: Path) -> Path:
    """The same folder with its blocks dequantized by the test."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scales = tensors.pop(name)
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = exact(tensors[weight], scales)
    into.mkdir()
    (into / "config.json").write_text((folder / "config.json").read_text())
    edit_config(into, quantization_config=None)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def states(target: TargetModel) -> Tensors:
    return target._decoder.state_dict() | {"head": target.head.weight}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_dequantized_to_the_bit(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    eights = [name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn]
    assert {stored[name].shape[0] % BLOCK[0] for name in eights} > {0}
    assert {stored[name].shape[1] % BLOCK[1] for name in eights} > {0}
    given, expected = (states(load_target(path, dtype)) for path in (folder, twin(folder, tmp_path / "twin")))
    assert given.keys() == expected.keys()
    assert [name for name in given if not torch.equal(given[name], expected[name])] == []
    assert given["head"].dtype is dtype


def test_the_bytes_are_told_before_anything_is_read(folder: Path, tmp_path: Path) -> None:
    """What they will take in memory, and what is read of the files: without the MTP module."""
    found = open_target(folder)
    loaded = found.load(torch.bfloat16, "cpu", (read := []).append)
    assert found.num_bytes(torch.bfloat16) == sum(2 * tensor.numel() for tensor in states(loaded).values())
    assert sum(read) == found.weights.num_bytes
    assert found.weights.num_bytes < open_target(twin(folder, tmp_path / "twin")).weights.num_bytes


LOADING = """
import re, sys, threading, time, torch
from attn_backends_reference.models import load_target, open_target

def taken():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

load_target("mla", torch.bfloat16)  # what is imported and allocated once
found = open_target(sys.argv[1])
before, seen, done = taken(), [], threading.Event()
watch = threading.Thread(target=lambda: [seen.append(taken()) or time.sleep(0.001) for _ in iter(done.is_set, True)])
watch.start()
target = found.load(torch.bfloat16, "cpu")
done.set()
watch.join()
print((max(seen) - before) / found.num_bytes(torch.bfloat16))
"""


@pytest.mark.full
def test_the_bytes_told_are_within_a_tenth_of_the_peak(tmp_path: Path) -> None:
    """In a process of its own: of 8-bit blocks, most of them experts, which are stacked layer by layer."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 192, "n_routed_experts": 16, "num_hidden_layers": 30}
    save_in_blocks(AutoModelForCausalLM.from_config(rm.tiny_config("mla_experts", **sizes)), tmp_path)
    ran = subprocess.run([sys.executable, "-c", LOADING, tmp_path], capture_output=True, text=True, check=True)
    assert 0.95 < float(ran.stdout) < 1.1


def save_in_blocks(model: PreTrainedModel, folder: Path) -> None:
    """A target whose layers' weights are 8-bit blocks of 128, with scales of one."""
    model.bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name, each in tensors.items() if is_quantized(name, each) and "gate.weight" not in name]:
        blocks = [-(-size // 128) for size in tensors[name].shape]
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(blocks)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=QUANTIZATION | {"weight_block_size": [128, 128]})


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, r"quantization_config\.quant_method = 'awq' is not served"),
        ({"quant_method": None}, r"quantization_config\.quant_method = None is not served"),
        ({"activation_scheme": "static"}, r"quantization_config\.activation_scheme = 'static' is not served"),
        ({"fmt": "e5m2"}, r"quantization_config\.fmt = 'e5m2' is not served"),
        ({"bits": 4}, r"quantization_config\.bits = 4 is not served"),
        ({"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert and ignored_layers must be lists"),
        ({"modules_to_not_convert": [*KEPT, "q_proj"]}, f"{Q_PROJ} is stored as F8_E4M3, but .* not converted"),
        ({"weight_block_size": [8, 12]}, r"_scale_inv is \[\d+, \d+\], which does not fit a weight .* of \[8, 12\]"),
    ],
)
def test_other_quantizations_are_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, quantization_config=QUANTIZATION | changes)
    with pytest.raises(CheckpointError, match=message):
        open_target(folder)


@pytest.mark.parametrize(
    ("method", "key", "served"),
    [(method, key, value) for method, table in SERVED.items() for key, values in table.items() for value in values],
)
def test_every_key_of_a_quantization_has_the_values_that_are_served(method: str, key: str, served: object) -> None:
    size = {"weight_block_size": list(BLOCK)} if method == "fp8" else {}
    fields = {"quant_method": method, key: served} | size
    quantization_of(Path("here"), {"quantization_config": fields})
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{key} = 'odd' is not served"):
        quantization_of(Path("here"), {"quantization_config": fields | {key: "odd"}})


@pytest.mark.parametrize("key", EXCLUSIONS)
@pytest.mark.parametrize(
    ("named", "is_kept"),
    [("q_proj", True), ("model.layers.0", True), ("model.*.self_attn", True), ("proj", False), ("layer.*.mlp", False)],
)
def test_modules_that_are_not_converted(folder: Path, key: str, named: str, is_kept: bool) -> None:
    """By a part of their names, of which an asterisk is any."""
    edit_config(folder, quantization_config=QUANTIZATION | {"modules_to_not_convert": None, key: [*KEPT, named]})
    refused = pytest.raises(CheckpointError, match=r"is stored as F8_E4M3, but config\.json names its module")
    with refused if is_kept else nullcontext():
        open_target(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}_scale_inv"), f"safetensors: {Q_PROJ} is stored as F8_E4M3 without its scales"),
        (lambda t: t.update({f"{Q_PROJ}_scale_inv": torch.ones(2)}), r"_scale_inv is \[2\], which does not fit a"),
        (lambda t: t.update({Q_PROJ: torch.ones(112, 32).to(torch.float8_e5m2)}), f"{Q_PROJ} is stored as F8_E5M2"),
        (lambda t: t.update({Q_PROJ: torch.ones(112, 32)}), f"not part of the architecture: {Q_PROJ}_scale_inv"),
    ],
    ids=["no scales", "shape", "type", "scales of floats"],
)
def test_blocks_that_do_not_fit_are_refused_by_name(
    folder: Path, edit: Callable[[Tensors], object], message: str
) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        open_target(folder)


def test_blocks_that_the_configuration_says_nothing_of(folder: Path) -> None:
    edit_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"is stored as F8_E4M3, which config\.json says nothing of"):
        open_target(folder)


def test_modules_behind_the_layers_are_dequantized_too(tmp_path: Path) -> None:
    """As NEXTN's are stored in DeepSeek-V3's folder, in shards and with experts."""
    eights, plain, kept = (
        tmp_path / "eights",
        tmp_path / "plain",
        ["gate", "lm_head", "embed_tokens", "shared_head.head"],
    )
    for folder in (eights, plain):
        mtp_models.publish(folder, mtp_models.deep_model("mla_experts"))
    index = json.loads((eights / "model.safetensors.index.json").read_text())
    for shard in sorted(eights.glob("*.safetensors")):
        stored, values = load_file(shard), load_file(shard)
        for name, weight in load_file(shard).items():
            if weight.ndim == 2 and not any(f".{module}." in f".{name}" for module in kept):
                stored[name], stored[f"{name}_scale_inv"] = quantize(weight)
                values[name] = exact(stored[name], stored[f"{name}_scale_inv"])
        save_file(stored, shard, metadata={"format": "pt"})
        save_file(values, plain / shard.name, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(stored, shard.name)
    (eights / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_config(eights, quantization_config=QUANTIZATION | {"modules_to_not_convert": kept})
    target = load_target(plain, torch.float32)
    given, expected = (
        [each._draft.state_dict() for each in (*load_mtp(folder, target), load_draft(folder, target))]
        for folder in (eights, plain)
    )
    for ours, theirs in zip(given, expected, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
