"""Configuration and tensors of a checkpoint's folder, checked before anything is computed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends_reference.models.config_keys import check_keys
from attn_backends_reference.models.decoder import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_FIELDS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"}
    | {"original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
)
"""What is read of `rope_parameters`."""
SAME_MODELS = {"kimi_k2": "deepseek_v3"}
"""Types of models that transformers has under another name: Kimi-K2 is DeepSeek-V3's architecture
(https://github.com/MoonshotAI/Kimi-K2/blob/main/docs/deploy_guidance.md)."""
SHOWN_TENSORS = 4
READING_AHEAD_OFF = "HF_DEACTIVATE_ASYNC_LOAD"  # documented by transformers


def find(folder: str | Path, embedded: Mapping[str, str]) -> Path:
    """The folder of a checkpoint, given as a path or as one of the names `embedded`."""
    if folder in embedded:
        path = Path(str(resources.files("attn_backends_reference.models"))) / "checkpoints" / embedded[str(folder)]
    else:
        path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{str(folder)!r} is neither a folder nor an embedded checkpoint ({', '.join(embedded)})")
    return path


def refuse_quantized(path: object, fields: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if config.json, which says `fields`, says that weights are of fewer bits."""
    for key in ("quantization_config", "compression_config"):
        if fields.get(key):
            raise CheckpointError(
                f"{path} holds quantized weights ({key} in config.json); convert them to a float type"
            )


V41 = "DeepseekV41ForCausalLM"
V41_NEEDS = "layers that attend to another layer's entries (kv_source_layer_ids, index_source_layer_ids)"
"""What is missing to serve it; docs/models.md has the rest."""


def read_architecture(
    path: Path, known: Mapping[str, Family], own: Collection[str] = ()
) -> tuple[str, PreTrainedConfig]:
    """The checkpoint's architecture, one of `known`, and its configuration, without its quantization, which
    transformers would try to apply itself. own: keys of config.json that the reader takes, beside transformers'.
    """
    fields = read_fields(path / "config.json")
    named = fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        lacks = f", which needs {V41_NEEDS}" if named == [V41] else ""
        raise CheckpointError(
            f"{path} has architectures {named}{lacks}; supported here: {', '.join(known)} (config.json)"
        )
    config = load_config(path)
    config.__dict__.pop("quantization_config", None)
    _check_servable(path, config)
    check_keys(path, {key: fields[key] for key in fields.keys() - own}, config)
    return named[0], config


def read_fields(file: Path) -> dict[str, Any]:
    """Fields of a JSON file of a checkpoint. Raises `CheckpointError` if it is missing or no JSON object."""
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} has no {file.name}; a checkpoint is a folder in transformers' format on this machine"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} is not a JSON object: it holds a {type(fields).__name__}")
    return fields


def load_config(path: Path) -> PreTrainedConfig:
    """The configuration in a local folder. Python that the folder brings along is never run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    file = path / "config.json"
    fields = read_fields(file)
    named = str(fields.get("model_type"))
    same = SAME_MODELS.get(named)
    if named not in CONFIG_MAPPING and same is None:
        refuse_own_code(file)
    try:
        if same is not None:
            return CONFIG_MAPPING[same].from_dict(fields | {"model_type": same})
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a wrong value makes transformers raise may be anything
        raise CheckpointError(f"transformers can't read {file}: {error_in_words(error)}") from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """No bar of transformers' for every folder that is loaded; whether others are shown stays as it was."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def without_reading_ahead() -> Iterator[None]:
    """transformers reads a weight when it needs it. Its threads would read all experts first and then stack copies."""
    before = os.environ.get(READING_AHEAD_OFF)
    os.environ[READING_AHEAD_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[READING_AHEAD_OFF]
        else:
            os.environ[READING_AHEAD_OFF] = before


def error_in_words(error: Exception) -> str:
    """The words of another package's error, whose kind says what many of them leave out."""
    return f"{type(error).__name__}: {error}"


def refuse_own_code(file: Path) -> None:
    """Raises `CheckpointError` if a file of a checkpoint names Python of its own folder or of a hub (``auto_map``)."""
    named = read_fields(file).get("auto_map") if file.is_file() else None
    if named:
        raise CheckpointError(
            f"{file} needs Python code that comes with the checkpoint (auto_map: {named}); such code is never run "
            f"here. Use a checkpoint whose classes are in transformers"
        )


def eos_token_ids(path: Path) -> frozenset[int]:
    """The end-of-text tokens that config.json and generation_config.json name, one or a list in each, or none."""
    found: set[int] = set()
    for file in (path / "config.json", path / "generation_config.json"):
        named = read_fields(file).get("eos_token_id") if file.is_file() else None
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int for token in ids):
            raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them, got {named!r}")
        found.update(ids)
    return frozenset(found)


def _check_servable(path: Path, config: PreTrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        raise CheckpointError(
            f"{path / 'config.json'} has model_type {config.model_type!r} without rotary embeddings (rope_parameters)"
        )
    kinds = [rope] if "rope_type" in rope else list(rope.values())  # DeepSeek-V4 has two
    others = sorted({str(kind["rope_type"]) for kind in kinds} - set(ROPE_TYPES))
    if others:
        # the frequencies of "dynamic" and "longrope" follow the longest request of a batch: cached keys would not fit
        raise CheckpointError(
            f"{path / 'config.json'} asks for {' and '.join(others)} rotary embeddings (rope_parameters.rope_type); "
            f"supported are those whose frequencies are fixed: {', '.join(ROPE_TYPES)}"
        )
    idle = {"partial_rotary_factor": kinds[0].get("partial_rotary_factor") if len(kinds) > 1 else 1}
    unknown = {
        key: kind[key]
        for kind in kinds
        for key in kind.keys() - ROPE_FIELDS
        if kind[key] is not None and kind[key] != idle.get(key)
    }
    if unknown:
        raise CheckpointError(
            f"{path / 'config.json'}: rope_parameters has keys that model_type {config.model_type!r} does not honour "
            f"here: {unknown}. Ignoring them would turn queries and keys otherwise"
        )


def locate_tensors(path: Path) -> dict[str, Path]:
    """The file of each tensor: model.safetensors, the shards that model.safetensors.index.json names, or, where neither
    is there, pytorch_model.bin.
    """
    from safetensors import SafetensorError, safe_open

    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    pickled = path / "pytorch_model.bin"
    if pickled.is_file() and not whole.is_file() and not index.is_file():
        return dict.fromkeys(unpickled(pickled), pickled)
    try:
        if whole.is_file() or not index.is_file():
            with safe_open(whole, framework="pt") as file:
                return dict.fromkeys(file.keys(), whole)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} has no model.safetensors that can be read: {error}") from error
    return _located_in(index)


def _located_in(index: Path) -> dict[str, Path]:
    """The file of each tensor, as an index names it: one beside the index."""
    placed = read_fields(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} is not an index with a weight_map: it is {placed!r}")
    for name, shard in placed.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} places {name} in {shard!r}, which is not the name of a file beside it")
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index} places {name} in {shard}, which the folder lacks")
    return {name: index.parent / shard for name, shard in placed.items()}


def read_tensors(located: Mapping[str, Path]) -> dict[str, Tensor]:
    """The tensors of `locate_tensors`, or some of them; no others are read."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in sorted(set(located.values())):
        if path.suffix == ".bin":
            found = unpickled(path)
            tensors |= {name: found[name] for name, place in located.items() if place == path}
            continue
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name, place in located.items() if place == path}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
    return tensors


def unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors that `torch.save` wrote. Reading them runs no code of the file."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError, UnpicklingError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CheckpointError(f"{path} holds something else than tensors by name; save a model's state_dict()")
    return found


def check_tensors(path: Path, missing: Collection[str], unexpected: Collection[str], shapes: Collection[str]) -> None:
    """Raises `CheckpointError` that names tensors, or says what is wrong with them."""
    problems = {"missing": missing, "not part of the architecture": unexpected, "of another shape": shapes}
    found = [f"{len(names)} {problem}: {_first(names)}" for problem, names in problems.items() if names]
    if found:
        raise CheckpointError(f"tensors in {path} don't match its config.json. {'; '.join(found)}")


def _first(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN_TENSORS])
    return f"{shown}, …" if len(names) > SHOWN_TENSORS else shown
