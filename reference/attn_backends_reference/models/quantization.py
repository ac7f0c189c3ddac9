"""Weights of fewer bits: what a configuration says of them, which tensors hold them, and their values.

`Fp8Blocks`, as DeepSeek-V3 publishes weights: one ``[rows, columns]`` of float8_e4m3fn has a scale for each block of
``weight_block_size``, in the tensor of the same name with ``_scale_inv`` after it, ``[ceil(rows / m), ceil(columns /
n)]``. The value is stored * scale (https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md). Blocks at
the ends may be cut off: the 576 rows of ``kv_a_proj_with_mqa`` are four and a half. DeepSeek-V4's have powers of two as
scales (E8M0), which are called ``scale``. Its experts ``[rows, K]`` are int8 ``[rows, K / 2]``, bytes of two 4-bit
floats as below, with ``scale`` ``[rows, K / 32]`` (inference/convert.py of deepseek-ai/DeepSeek-V4-Flash).

`Mxfp4`, as gpt-oss publishes its experts. A weight ``[experts, K, N]`` is stored transposed, as ``NAME_blocks``
``[experts, N, K / 32, 16]``, bytes of two 4-bit floats (E2M1) each, the lower half first. ``NAME_scales`` ``[experts,
N, K / 32]``, the power of two of each block (E8M0), both uint8 (OCP Microscaling Formats v1.0;
https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/weights.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends_reference.models.stored import Stored, Weight

FP8, E8M0, INT8, BYTES = "F8_E4M3", "F8_E8M0", "I8", "U8"
SCALE = "_scale_inv"
EXCLUSIONS = ("modules_to_not_convert", "ignored_layers")
SERVED: Mapping[str, Mapping[str, Collection[Any]]] = {
    "fp8": {"fmt": ("e4m3",), "activation_scheme": ("dynamic",), "scale_fmt": ("float", "ue8m0")},
    "mxfp4": {"dequantize": (True,)},
}
"""By quant_method, the keys of quantization_config beside those that are read, and their values that are served."""
HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a 4-bit float without its sign."""
MX_BLOCK = 32
"""Values of an MX block; two to a byte."""


class Quantization(Protocol):
    """Weights in two tensors each."""

    def weights_of(self, tensors: Mapping[str, Stored]) -> dict[str, Weight]:
        """The weights that are stored so, by name. Raises `CheckpointError` that names a tensor which does not fit."""


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """size: rows and columns of a block. kept: names of modules whose weights are stored as they are."""

    size: tuple[int, int]
    kept: tuple[str, ...]

    def weights_of(self, tensors: Mapping[str, Stored]) -> dict[str, Weight]:
        """See `Quantization`."""
        eights = [stored for stored in tensors.values() if stored.dtype == FP8]
        fours = [stored for stored in tensors.values() if stored.dtype == INT8]
        weights = [self._eight_bits(stored, tensors) for stored in eights]
        weights += [self._four_bits(stored, tensors) for stored in fours]
        return {weight.parts[0].name: weight for weight in weights}

    def dequantized(self, stored: Tensor, scales: Tensor) -> Tensor:
        """[rows, columns], rounded from the float32 products. Takes no more beside it than a row of blocks."""
        values, (height, width) = torch.empty(stored.shape, dtype=torch.bfloat16), self.size
        for rows, into, row_scales in zip(stored.split(height), values.split(height), scales.float(), strict=True):
            into.copy_(rows.float() * row_scales.repeat_interleave(width)[: rows.shape[1]])
        return values

    def _eight_bits(self, stored: Stored, tensors: Mapping[str, Stored]) -> Weight:
        scales = self._scales(stored, tensors)
        fits = len(stored.shape) == 2 and scales.shape == tuple(
            -(-length // step) for length, step in zip(stored.shape, self.size, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{scales.file}: {scales.name} is {list(scales.shape)}, which does not fit a weight "
                f"{list(stored.shape)} in blocks of {list(self.size)}"
            )
        return Weight(stored.shape, (stored, scales), self.dequantized)

    def _four_bits(self, stored: Stored, tensors: Mapping[str, Stored]) -> Weight:
        scales = self._scales(stored, tensors)
        rows, *columns = stored.shape
        if scales.dtype != E8M0 or len(columns) != 1 or 16 * scales.shape[-1] != columns[0] or scales.shape[0] != rows:
            raise CheckpointError(
                f"{stored.file}: {stored.name} is {list(stored.shape)} and {scales.name} {list(scales.shape)} "
                f"{scales.dtype}; 4-bit experts are [rows, K / 2] {INT8} and [rows, K / {MX_BLOCK}] {E8M0}"
            )
        return Weight((rows, 2 * columns[0]), (stored, scales), four_bits)

    def _scales(self, stored: Stored, tensors: Mapping[str, Stored]) -> Stored:
        """Of a weight, by DeepSeek-V3's name or V4's."""
        _refuse_kept(stored, stored.name, self.kept)
        of_v4 = stored.name.removesuffix("weight") + "scale"
        return _partner(stored, of_v4 if of_v4 in tensors else stored.name + SCALE, tensors)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """kept: as of `Fp8Blocks`."""

    kept: tuple[str, ...]

    def weights_of(self, tensors: Mapping[str, Stored]) -> dict[str, Weight]:
        """See `Quantization`."""
        found = [stored for stored in tensors.values() if stored.dtype == BYTES and stored.name.endswith("_blocks")]
        return {stored.name.removesuffix("_blocks"): self._weight(stored, tensors) for stored in found}

    def dequantized(self, stored: Tensor, scales: Tensor) -> Tensor:
        """[experts, K, N], exact but for what bfloat16 can't reach. Takes beside it what one expert's floats take."""
        experts, columns, blocks, _ = stored.shape
        values = torch.empty(experts, MX_BLOCK * blocks, columns, dtype=torch.bfloat16)
        for into, of_expert, powers in zip(values, stored.flatten(2), scales.view(torch.float8_e8m0fnu), strict=True):
            into.copy_(four_bits(of_expert, powers).T)
        return values

    def _weight(self, stored: Stored, tensors: Mapping[str, Stored]) -> Weight:
        name, shape = stored.name.removesuffix("_blocks"), stored.shape
        _refuse_kept(stored, name, self.kept)
        scales = _partner(stored, f"{name}_scales", tensors)
        if len(shape) != 4 or shape[3] != MX_BLOCK // 2 or scales.shape != shape[:3] or scales.dtype != BYTES:
            raise CheckpointError(
                f"{stored.file}: {stored.name} is {list(shape)} and {scales.name} {list(scales.shape)} {scales.dtype}; "
                f"MXFP4 is [experts, N, K / {MX_BLOCK}, {MX_BLOCK // 2}] and [experts, N, K / {MX_BLOCK}] {BYTES}"
            )
        return Weight((shape[0], MX_BLOCK * shape[2], shape[1]), (stored, scales), self.dequantized)


def four_bits(stored: Tensor, powers: Tensor) -> Tensor:
    """[rows, K] bfloat16, exact within its range. stored: bytes [rows, K / 2]. powers: of two, [rows, K / 32]."""
    halves = torch.tensor([*HALVES, *(-half for half in HALVES)])
    pairs = torch.stack([halves.repeat(16), halves.repeat_interleave(16)], dim=1)  # of each byte
    values = pairs[stored.view(torch.uint8).int()].view(*powers.shape, MX_BLOCK)
    return (values * powers.float().unsqueeze(2)).flatten(1).bfloat16()


def quantization_of(path: Path, fields: Mapping[str, Any]) -> Quantization | None:
    """Quantization of a checkpoint's weights, from the fields of its config.json; None if they are not quantized.

    Raises `CheckpointError` that names the key of a quantization that is not served.
    """
    named = fields.get("quantization_config")
    if not named:
        return None
    where = f"{path / 'config.json'}: quantization_config"
    if not isinstance(named, dict):
        raise CheckpointError(f"{where} is {named!r}; it must be a table")
    method = named.get("quant_method")
    served, make = SERVED.get(str(method), {}), _MAKE.get(str(method))
    read = {"quant_method", "weight_block_size", *EXCLUSIONS}
    others = [key for key in named.keys() - read if named[key] not in (None, False, *served.get(key, ()))]
    if make is None or others:
        key = sorted(others)[0] if make else "quant_method"
        raise CheckpointError(
            f"{where}.{key} = {named.get(key)!r} is not served; 8-bit blocks as DeepSeek-V3's are (quant_method 'fp8', "
            f"fmt 'e4m3'), and 4-bit ones as gpt-oss's ('mxfp4'). Convert the weights to a float type"
        )
    kept = [named.get(key) or [] for key in EXCLUSIONS]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in kept):
        raise CheckpointError(f"{where}: {' and '.join(EXCLUSIONS)} must be lists of names, got {kept}")
    return make(where, named.get("weight_block_size"), tuple(name for names in kept for name in names))


def _fp8_blocks(where: str, size: Any, kept: tuple[str, ...]) -> Fp8Blocks:
    if not (isinstance(size, list) and len(size) == 2 and all(type(length) is int and length > 0 for length in size)):
        raise CheckpointError(
            f"{where} has weight_block_size {size!r}; served are two numbers, such as [128, 128]. Convert the weights "
            f"to a float type"
        )
    return Fp8Blocks((size[0], size[1]), kept)


def _mxfp4(where: str, size: Any, kept: tuple[str, ...]) -> Mxfp4:
    if size is not None:
        raise CheckpointError(f"{where} has weight_block_size {size!r}; blocks of quant_method 'mxfp4' are {MX_BLOCK}")
    return Mxfp4(kept)


_MAKE: Mapping[str, Callable[[str, Any, tuple[str, ...]], Quantization]] = {"fp8": _fp8_blocks, "mxfp4": _mxfp4}


def _refuse_kept(stored: Stored, name: str, kept: tuple[str, ...]) -> None:
    """Raises `CheckpointError` if a weight belongs to a module that is named, or is within one. Of a name, ``*`` is
    any part.
    """
    patterns = [re.escape(module).replace(r"\*", ".*") for module in kept]
    if any(re.search(rf"(^|\.){pattern}(\.|$)", name) for pattern in patterns):
        raise CheckpointError(
            f"{stored.file}: {stored.name} is stored as {stored.dtype}, but config.json names its module among those "
            f"that are not converted (quantization_config)"
        )


def _partner(stored: Stored, name: str, tensors: Mapping[str, Stored]) -> Stored:
    """The scales of a weight."""
    if name not in tensors:
        raise CheckpointError(f"{stored.file}: {stored.name} is stored as {stored.dtype} without its scales, {name}")
    return tensors[name]
