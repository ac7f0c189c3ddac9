"""Weights in 8-bit blocks, as DeepSeek-V3 publishes them: what a configuration says of them, and their values.

A weight ``[rows, columns]`` of float8_e4m3fn has a scale for each block of ``weight_block_size``, in the tensor of the
same name with ``_scale_inv`` behind it, ``[ceil(rows / m), ceil(columns / n)]``; value = stored * scale
(https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md). Blocks at the ends may be cut off: the 576
rows of ``kv_a_proj_with_mqa`` are four and a half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_backends.errors import CheckpointError

SCALE = "_scale_inv"
SERVED = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
}
"""The keys of quantization_config beside those of `Fp8Blocks`, and their values that are served."""
EXCLUSIONS = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """size: rows and columns of a block. kept: names of modules whose weights are stored as they are."""

    size: tuple[int, int]
    kept: tuple[str, ...]

    def keeps(self, name: str) -> bool:
        """Whether a tensor belongs to a module that is named, or is within one."""
        return any(f".{module}." in f".{name}." for module in self.kept)

    def num_scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight [rows, columns]."""
        return tuple(-(-length // step) for length, step in zip(shape, self.size, strict=True))

    def dequantized(self, stored: Tensor, scales: Tensor) -> Tensor:
        """[rows, columns] bfloat16, rounded from the float32 products. Takes no more beside it than a row of blocks."""
        values, (height, width) = torch.empty(stored.shape, dtype=torch.bfloat16), self.size
        for rows, into, row_scales in zip(stored.split(height), values.split(height), scales.float(), strict=True):
            into.copy_(rows.float() * row_scales.repeat_interleave(width)[: rows.shape[1]])
        return values


def blocks_of(path: Path, fields: Mapping[str, Any]) -> Fp8Blocks | None:
    """What the fields of config.json say of its weights; None if they are stored as they are.

    Raises `CheckpointError` that names the key of a quantization that is not served.
    """
    named = fields.get("quantization_config")
    if not named:
        return None
    where = f"{path / 'config.json'}: quantization_config"
    if not isinstance(named, dict):
        raise CheckpointError(f"{where} is {named!r}; it must be a table")
    for key, value in named.items():
        if key in (*EXCLUSIONS, "weight_block_size") or value in (None, False):
            continue
        if value not in SERVED.get(key, ()):
            raise CheckpointError(
                f"{where}.{key} = {value!r} is not served; 8-bit blocks as DeepSeek-V3's are (quant_method 'fp8', fmt "
                f"'e4m3'). Convert the weights to a float type"
            )
    size: Any = named.get("weight_block_size")
    kept = [named.get(key) or [] for key in EXCLUSIONS]
    if named.get("quant_method") is None or not _is_size(size):
        raise CheckpointError(
            f"{where} has quant_method {named.get('quant_method')!r} and weight_block_size {size!r}; served are 'fp8' "
            f"and two numbers, such as [128, 128]. Convert the weights to a float type"
        )
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in kept):
        raise CheckpointError(f"{where}: {' and '.join(EXCLUSIONS)} must be lists of names, got {kept}")
    return Fp8Blocks((size[0], size[1]), tuple(name for names in kept for name in names))


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(length) is int and length > 0 for length in value)
