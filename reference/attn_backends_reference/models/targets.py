"""Targets in local folders: everything that their files say is checked before a weight is read.

Nothing here touches the network, and Python that a folder brings along is never run (``trust_remote_code``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attn_backends.errors import CheckpointError, MemoryLimitError
from attn_backends.kernels.device_memory import room_for
from attn_backends_reference.models import folders, quantization, weights
from attn_backends_reference.models.decoder import Family, TargetModel
from attn_backends_reference.models.families import served_families

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

EMBEDDED_TARGETS = {name: f"{name}/target" for name in ("gqa", "mla", "v4")}
"""The targets that ship with the package, by name, and their folders."""


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """A folder whose target can be loaded. weights: those of the target, without MTP modules after its layers."""

    path: Path
    family: Family
    config: PreTrainedConfig
    weights: weights.Weights

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the weights, once loaded; those of fewer bits are dequantized."""
        return self.weights.num_elements * dtype.itemsize

    def load(
        self, dtype: torch.dtype, device: torch.device | str, on_bytes: Callable[[int], None] = lambda _: None
    ) -> TargetModel:
        """The target. on_bytes: gets the bytes of the files that were read, which in all are `weights.num_bytes`.

        Weights of fewer bits become bfloat16, then dtype. Raises `MemoryLimitError` before anything is read where the
        weights do not fit, and `CheckpointError` if transformers can't make a model of them.
        """
        with self._room(dtype, torch.device(device)):
            target = self.family.target(self.family, self._read(dtype, on_bytes).to(device))
        target.eos_token_ids = folders.eos_token_ids(self.path)
        return target

    def empty(self) -> TargetModel:
        """The target without memory, on torch's meta device: its layers and their caches' sizes, without weights."""
        return self.family.target(self.family, _empty_model(self.path, self.config))

    def _read(self, dtype: torch.dtype, on_bytes: Callable[[int], None]) -> PreTrainedModel:
        import transformers

        class_ = getattr(transformers, self.family.architecture)
        has_experts = any(".experts." in name for name in self.weights.tensors)
        ahead = folders.without_reading_ahead() if has_experts else nullcontext()
        with folders.without_progress_bars(), ahead, self.weights.opened(on_bytes) as unread:
            loaded: Any = class_.from_pretrained(
                None,
                config=self.config,
                state_dict=unread,
                dtype=dtype,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        model, report = loaded
        shapes = [f"{name} is {list(given)}, not {list(needed)}" for name, given, needed in report["mismatched_keys"]]
        folders.check_tensors(self.path, report["missing_keys"], report["unexpected_keys"], shapes)
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        if self.config.tie_word_embeddings and not is_tied:
            raise CheckpointError(
                f"{self.path} says tie_word_embeddings and has an lm_head.weight that is not its embedding; say false, "
                f"or leave the tensor out"
            )
        return model

    @contextmanager
    def _room(self, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
        """Inside, there is room for the weights on the host, where they are read, and on the device."""
        needed = self.num_bytes(dtype)

        def refusal(found: str) -> MemoryLimitError:
            return MemoryLimitError(
                f"the weights in {self.path} need {needed:,} bytes as {dtype} and {found}; take a smaller type or model"
            )

        with ExitStack() as rooms:
            for place in {torch.device("cpu"), device}:
                rooms.enter_context(room_for(needed, place, refusal))
            yield


def load_target(folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> TargetModel:
    """The target in a folder of transformers' format, or an embedded one by name (`EMBEDDED_TARGETS`).

    The folder may hold MTP modules too, which `load_mtp` reads. Raises `CheckpointError` if the folder, its
    architecture, its tensors or their shapes can't be used, and `MemoryLimitError` if they do not fit.
    """
    return open_target(folder).load(dtype, device)


def open_target(folder: str | Path) -> TargetFolder:
    """The target in a folder, or an embedded one by name, with everything checked but what its weights are.

    Raises `CheckpointError` that names the file, and the key or tensor. The reason is an architecture, rotary
    embedding, quantization or key that is not supported; shards that are missing, cut short or outside the folder;
    tensors that are missing, of another shape, or unknown.
    """
    families = {family.architecture: family for family in served_families()}
    path = folders.find(folder, EMBEDDED_TARGETS)
    fields = folders.read_fields(path / "config.json")
    quantized = quantization.quantization_of(path, fields)
    architecture, config = folders.read_architecture(path, families)
    family, stored = families[architecture], weights.read_headers(path, quantized)
    behind = _mtp_prefixes(config, stored)
    found = stored.chosen(lambda name: not name.startswith(behind))
    if not family.renamed:
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        empty = _empty_model(path, config).state_dict()
        expected = {name: tuple(tensor.shape) for name, tensor in empty.items()}
        weights.check_shapes(
            found, weights.experts_apart(expected, family.experts) if family.experts else expected, tied
        )
    return TargetFolder(path, family, config, found)


def _empty_model(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model that a configuration describes, without memory."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    except Exception as error:  # what a wrong size or name in a configuration makes of a model may be anything
        words = folders.error_in_words(error)
        raise CheckpointError(
            f"transformers can't make the model that {path}/config.json describes: {words}"
        ) from error


def _mtp_prefixes(config: PreTrainedConfig, stored: weights.Weights) -> tuple[str, ...]:
    """How the names of MTP modules begin that a target's folder keeps after its layers."""
    first = config.num_hidden_layers
    behind = range(first, first + (getattr(config, "num_nextn_predict_layers", 0) or 0))
    prefixes = [f"model.layers.{layer}." for layer in behind]
    of_v4 = ("mtp.",) if config.model_type == "deepseek_v4" else ()
    return (*of_v4, *(prefix for prefix in prefixes if f"{prefix}eh_proj.weight" in stored.tensors))
