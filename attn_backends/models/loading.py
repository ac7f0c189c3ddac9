"""Loading targets, drafts and tokenizers from local folders; nothing here touches the network.

A folder is checked before anything is computed: architecture, tensors and shapes, and that a draft fits its target.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends.models.decoder import DraftModel, Family, TargetModel
from attn_backends.models.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EMBEDDED = ("gqa", "mla", "v4")
"""Names of the checkpoints that ship with the package."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
SHOWN_TENSORS = 4
EXPERTS = "batched_mm"
"""transformers' implementation of experts whose shapes don't depend on the routing."""


def load_target(folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> TargetModel:
    """The target in a folder of transformers' format, or an embedded one by name (`EMBEDDED`).

    Raises `CheckpointError` if the folder, its architecture, its tensors or their shapes can't be used.
    """
    _require_transformers()
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    path = _checkpoint(folder, "target")
    family, config = _read_config(path, "architecture")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            experts_implementation=EXPERTS,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} has no weights that transformers can read: {error}") from error
    model, report = loaded
    shapes = [f"{name} is {list(given)}, not {list(needed)}" for name, given, needed in report["mismatched_keys"]]
    _check_tensors(path, report["missing_keys"], report["unexpected_keys"], shapes)
    return family.target(family, model.to(device))


def load_draft(folder: str | Path, target: TargetModel) -> DraftModel:
    """The draft in a folder of config.json and model.safetensors, or an embedded one by name.

    It gets the target's dtype and device. Raises `CheckpointError` as `load_target` does, and if the draft does not fit
    the target.
    """
    _require_transformers()
    path = _checkpoint(folder, "draft")
    family, config = _read_config(path, "draft_architecture")
    given = (family.draft_architecture, config.vocab_size, config.hidden_size)
    needed = (target.family.draft_architecture, target.vocab_size, target.hidden_size)
    if given != needed:
        raise CheckpointError(
            f"the draft in {path} does not fit the target: it is a {given[0]} with vocabulary {given[1]} and hidden "
            f"size {given[2]}; the target needs a {needed[0]} with {needed[1]} and {needed[2]}"
        )
    config._experts_implementation = EXPERTS
    draft = family.draft(config)
    draft.load_state_dict(_read_draft_weights(path, draft.state_dict()))
    for parameter in draft.parameters():  # the rotary frequencies are buffers, which stay float32
        parameter.data = parameter.data.to(target.dtype)
    return DraftModel(draft.to(target.device), target)


def load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a target's folder: transformers' if the folder holds its files, else bytes.

    vocab_size: of the target. Raises `CheckpointError` if the tokenizer can produce ids that the target lacks, or if
    there are no tokenizer files and the vocabulary is not that of bytes.
    """
    path = _checkpoint(folder, "target")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        if vocab_size != 256:
            raise CheckpointError(
                f"{path} holds none of {', '.join(TOKENIZER_FILES)}, and a vocabulary of {vocab_size} is not that of "
                f"bytes (256); add the tokenizer's files"
            )
        return ByteTokenizer()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if len(tokenizer) > vocab_size:
        raise CheckpointError(f"the tokenizer in {path} has {len(tokenizer)} tokens, the target {vocab_size}")
    return _HubTokenizer(tokenizer, tokenizer.bos_token_id, tokenizer.eos_token_id)


@dataclass(frozen=True, slots=True)
class _HubTokenizer:
    """A tokenizer of transformers."""

    tokenizer: Any
    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def _checkpoint(folder: str | Path, part: str) -> Path:
    """The folder of a target or draft, `part`, given as a path or an embedded name."""
    if folder in EMBEDDED:
        path = Path(str(resources.files("attn_backends.models"))) / "checkpoints" / folder / part
    else:
        path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{str(folder)!r} is neither a folder nor an embedded checkpoint ({', '.join(EMBEDDED)})")
    return path


def _require_transformers() -> None:
    try:
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{error}; loading a model needs transformers: pip install 'attn-backends[models]'"
        ) from error


def _read_config(path: Path, field: str) -> tuple[Family, PreTrainedConfig]:
    """The checkpoint's configuration and the family whose `field` (such as "architecture") it names."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from attn_backends.models.deepseek import DEEPSEEK
    from attn_backends.models.deepseek_v4 import DEEPSEEK_V4
    from attn_backends.models.llama import LLAMA

    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} has no config.json; a checkpoint is a folder in transformers' format")
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("architectures")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a JSON object: {error}") from error
    known = {getattr(family, field): family for family in (LLAMA, DEEPSEEK, DEEPSEEK_V4)}
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise CheckpointError(f"{path} has architectures {named}; supported here: {', '.join(known)}")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (StrictDataclassError, ValueError) as error:
        raise CheckpointError(f"transformers can't read {file}: {error}") from error
    _check_servable(path, config)
    return known[named[0]], config


def _check_servable(path: Path, config: PreTrainedConfig) -> None:
    if getattr(config, "quantization_config", None):
        raise CheckpointError(f"{path} holds quantized weights (quantization_config); convert them to a float type")
    rope = config.rope_parameters
    kinds = [rope] if "rope_type" in rope else rope.values()  # DeepSeek-V4 has two
    others = sorted({str(kind["rope_type"]) for kind in kinds} - set(ROPE_TYPES))
    if others:
        # the frequencies of "dynamic" and "longrope" follow the longest request of a batch: cached keys would not fit
        raise CheckpointError(
            f"{path} uses {' and '.join(others)} rotary embeddings; supported are those whose frequencies are fixed: "
            f"{', '.join(ROPE_TYPES)}"
        )


def _read_draft_weights(path: Path, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a draft's model.safetensors, of the names and shapes of `needed`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(path / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} has no model.safetensors that can be read: {error}") from error
    shapes = [
        f"{name} is {list(given[name].shape)}, not {list(needed[name].shape)}"
        for name in given.keys() & needed.keys()
        if given[name].shape != needed[name].shape
    ]
    _check_tensors(path, needed.keys() - given.keys(), given.keys() - needed.keys(), shapes)
    return given


def _check_tensors(path: Path, missing: Collection[str], unexpected: Collection[str], shapes: Collection[str]) -> None:
    problems = {"missing": missing, "not part of the architecture": unexpected, "of another shape": shapes}
    found = [f"{len(names)} {problem}: {_first(names)}" for problem, names in problems.items() if names]
    if found:
        raise CheckpointError(f"tensors in {path} don't match its config.json. {'; '.join(found)}")


def _first(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN_TENSORS])
    return f"{shown}, …" if len(names) > SHOWN_TENSORS else shown
