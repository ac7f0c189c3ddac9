"""Loading drafts, MTP modules and tokenizers from local folders; nothing here touches the network.

A folder is checked before anything is computed: architecture, tensors and shapes, and that a draft fits its target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders, quantization, weights
from attn_backends_reference.models.decoder import DraftModel, Family, TargetModel
from attn_backends_reference.models.families import served_families
from attn_backends_reference.models.fit import cast, check_fit, check_shared
from attn_backends_reference.models.targets import EMBEDDED_TARGETS
from attn_backends_reference.models.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from attn_backends_reference.models.draft import DraftHead
    from attn_backends_reference.models.mtp import MtpModule
    from attn_backends_reference.models.peagle import PEagleModel

EMBEDDED_DRAFTS = {name: f"{name}/draft" for name in EMBEDDED_TARGETS} | {
    "gqa-eagle3": "gqa/eagle3",
    "mla-mtp": "mla/mtp",
}
"""Their drafts; one of the target's name for each, the EAGLE-3 draft of ``gqa`` and the MTP modules of ``mla``."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def load_draft(folder: str | Path, target: TargetModel) -> DraftModel:
    """The draft in a folder of config.json and tensors (`folders.locate_tensors`), or an embedded one by name
    (`EMBEDDED_DRAFTS`).

    It gets the target's dtype and device. Of a folder that `load_mtp` reads, or of DeepSeek-V4's own
    (`models.deepseek_v4_mtp`), it is the first module, which then runs every drafted step; published EAGLE and EAGLE-3
    heads are as `models.heads` describes them. Raises `CheckpointError` as `load_target` does, and if the draft does
    not fit the target.
    """
    path = folders.find(folder, EMBEDDED_DRAFTS)
    families = {family.draft_architecture: family for family in served_families() if family.draft_architecture}
    with_modules = _mtp_families()
    from attn_backends_reference.models import deepseek_v4_mtp, head_config, heads

    fields = folders.read_fields(path / "config.json")
    if head_config.is_eagle3(fields):
        return heads.load_eagle3(path, fields, target)
    folders.load_config(path)  # before tensors are looked at, so that a folder's own Python is refused by its name
    located = folders.locate_tensors(path)
    if any(name.startswith(deepseek_v4_mtp.PREFIX) for name in located):
        return deepseek_v4_mtp.load_v4_mtp(path, target)
    if heads.is_eagle(located):
        return heads.load_eagle(path, fields, target)
    architecture, config = folders.read_architecture(path, families | with_modules)
    if architecture in with_modules:
        return load_mtp(path, target)[0]
    from attn_backends_reference.models.interface import IMPLEMENTATION

    folders.refuse_quantized(path, fields)
    check_fit(path, _sizes(families[architecture], config), _sizes_of(target))
    config._experts_implementation = IMPLEMENTATION
    draft = families[architecture].draft(config)
    draft.load_state_dict(weights.read_checked(weights.read_headers(path, None), draft.state_dict()))
    return _serve(draft, target)


def load_parallel(folder: str | Path, target: TargetModel) -> PEagleModel:
    """The published P-EAGLE head in a folder (`models.peagle`), in the target's dtype and on its device. Raises
    `CheckpointError` as `load_draft` does.
    """
    from attn_backends_reference.models import peagle

    path = folders.find(folder, EMBEDDED_DRAFTS)
    return peagle.load_peagle(path, folders.read_fields(path / "config.json"), target)


def load_mtp(folder: str | Path, target: TargetModel) -> tuple[DraftModel, ...]:
    """The MTP modules in a folder, or of an embedded name (`EMBEDDED_DRAFTS`), the first drafted step's first.

    A folder of modules alone (architectures such as DeepseekV3ForCausalLMMTP), or a target's own folder which keeps
    them after its layers, as DeepSeek-V3's does, in 8-bit blocks or floats. `models.mtp` has the names of their tensors
    and where they were published. The embedding and the output head are the target's; a module's embed_tokens and
    shared_head.head may be absent, and if they are there and not the same, the folder is refused.

    The modules get the target's dtype and device. Raises `CheckpointError` as `load_draft` does, and unless the folder
    holds as many modules as its num_nextn_predict_layers says.
    """
    path, families = folders.find(folder, EMBEDDED_DRAFTS), _mtp_families()
    quantized = quantization.quantization_of(path, folders.read_fields(path / "config.json"))
    architecture, config = folders.read_architecture(path, families)
    family = families[architecture]
    given = _sizes(family, config) | {"num_hidden_layers": config.num_hidden_layers}
    check_fit(path, given, _sizes_of(target) | {"num_hidden_layers": len(target.layers)})
    stored = weights.read_headers(path, quantized)
    count = _count_modules(path, config, stored.tensors)
    in_modules = stored.chosen(lambda name: _layer_of(name) >= config.num_hidden_layers)
    if architecture == family.mtp_architecture:
        folders.check_tensors(path, (), stored.tensors.keys() - in_modules.tensors.keys(), ())
    modules = _new_modules(config, count)
    _fill(path, modules, config.num_hidden_layers, in_modules, target)
    return tuple(_serve(module, target) for module in modules)


def load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a target's folder: transformers' if the folder holds its files, else bytes.

    vocab_size: of the target. Raises `CheckpointError` if the files can't be read or need their own Python code, or if
    the tokenizer has ids that the target lacks. It also does if there are no files and the vocabulary is not that of
    bytes.
    """
    path = folders.find(folder, EMBEDDED_TARGETS)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        if vocab_size != 256:
            raise CheckpointError(
                f"{path} holds none of {', '.join(TOKENIZER_FILES)}, and a vocabulary of {vocab_size} is not that of "
                f"bytes (256); add the tokenizer's files"
            )
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises no narrower class
        if isinstance(error, ValueError):
            folders.refuse_own_code(path / "tokenizer_config.json")
        found = ", ".join(name for name in TOKENIZER_FILES if (path / name).is_file())
        raise CheckpointError(f"transformers can't read the tokenizer in {path} ({found}): {error}") from error
    if len(tokenizer) > vocab_size:
        raise CheckpointError(f"the tokenizer in {path} has {len(tokenizer)} tokens, the target {vocab_size}")
    return _HubTokenizer(path, tokenizer, tokenizer.bos_token_id, tokenizer.eos_token_id)


@dataclass(frozen=True, slots=True)
class _HubTokenizer:
    """A tokenizer of transformers."""

    path: Path
    tokenizer: Any
    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_chat(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        try:
            whole = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise anything
            words = folders.error_in_words(error)
            raise CheckpointError(f"the tokenizer in {self.path} has no chat template that works: {words}") from error
        return self.tokenizer.encode(whole, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def _mtp_families() -> dict[str, Family]:
    """By the architectures of folders that may hold MTP modules: of them alone, and of a target."""
    found: dict[str, Family] = {}
    for family in served_families():
        if family.mtp_architecture is not None:
            found |= {family.mtp_architecture: family, family.architecture: family}
    return found


def _sizes(family: Family, config: PreTrainedConfig) -> dict[str, object]:
    return {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "architectures": family.architecture}


def _sizes_of(target: TargetModel) -> dict[str, object]:
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    return sizes | {"architectures": target.family.architecture}


def _layer_of(name: str) -> int:
    """The layer whose tensor it is; -1 if it is none's."""
    found = LAYER.fullmatch(name)
    return int(found[1]) if found else -1


def _count_modules(path: Path, config: PreTrainedConfig, names: Collection[str]) -> int:
    """How many MTP modules a folder has, which its tensors and its configuration must agree on."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0) or 0
    expected = list(range(first, first + count))
    found = sorted({layer for name in names if (layer := _layer_of(name)) >= first})
    if found != expected:
        raise CheckpointError(
            f"{path} should hold {count} MTP modules (num_nextn_predict_layers), the layers {expected} after the "
            f"target's {first}; it has tensors of {found}"
        )
    if not expected:
        raise CheckpointError(f"{path} has no MTP modules (num_nextn_predict_layers is 0)")
    return count


def _new_modules(config: PreTrainedConfig, count: int) -> list[MtpModule]:
    from attn_backends_reference.models.interface import IMPLEMENTATION
    from attn_backends_reference.models.mtp import MtpModule, module_config

    config._experts_implementation = IMPLEMENTATION
    return [MtpModule(module_config(config, index)) for index in range(count)]


def _fill(path: Path, modules: Sequence[MtpModule], first: int, stored: weights.Weights, target: TargetModel) -> None:
    """Reads the weights of a folder, the first module's being those of layer `first`, into the modules."""
    needed: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    for layer, module in enumerate(modules, first):
        prefix = f"model.layers.{layer}."
        needed |= {prefix + name: tensor for name, tensor in module.published().items()}
        shared |= {f"{prefix}embed_tokens.weight": target.embedding.weight}
        shared |= {f"{prefix}shared_head.head.weight": target.head.weight}
    given = weights.read_checked(stored, needed | shared, shared)
    check_shared(path, given, shared, target)
    for name, tensor in needed.items():
        tensor.copy_(given[name])


def _serve(draft: DraftHead, target: TargetModel) -> DraftModel:
    return DraftModel(cast(draft, target), target)
