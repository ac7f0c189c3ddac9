"""The weights of a target's folder: what its files hold, told by their headers, and reading it tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders
from attn_backends_reference.models.quantization import SCALE, Fp8Blocks

TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8}
"""The types of safetensors that weights are read from, and bytes of an element."""
FP8 = "F8_E4M3"
OLD_BUFFERS = "rotary_emb.inv_freq"  # in folders that transformers 4.30 and earlier saved; computed since


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file. dtype: as safetensors calls it. num_bytes: in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a folder, none of them read. tensors: by name, scales of 8-bit blocks apart. blocks: of those."""

    path: Path
    tensors: Mapping[str, Stored]
    scales: Mapping[str, Stored]
    blocks: Fp8Blocks | None

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return sum(stored.num_bytes for stored in (*self.tensors.values(), *self.scales.values()))

    @property
    def num_elements(self) -> int:
        """Of all weights."""
        return sum(prod(stored.shape) for stored in self.tensors.values())

    def chosen(self, keep: Callable[[str], bool]) -> Weights:
        """Those of the names that are kept, which of a weight and its scales are alike."""
        of_tensors, of_scales = (
            {name: stored for name, stored in part.items() if keep(name)} for part in (self.tensors, self.scales)
        )
        return Weights(self.path, of_tensors, of_scales, self.blocks)

    def read(self) -> dict[str, Tensor]:
        """All of them, blocks dequantized."""
        with self.opened(lambda _: None) as unread:
            return {name: each[...] for name, each in unread.items()}

    @contextmanager
    def opened(self, on_bytes: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """By name what reads a tensor when it is sliced, as transformers takes a `state_dict`. on_bytes: gets the bytes
        of the file that were read.
        """
        with ExitStack() as files:
            read = _reader(files, (*self.tensors.values(), *self.scales.values()))
            yield {name: _Unread(self, name, read, on_bytes) for name in self.tensors}


@dataclass(frozen=True, slots=True)
class _Unread:
    """A tensor that is read, and its blocks dequantized, by ``tensor[...]``."""

    weights: Weights
    name: str
    read: Callable[[Stored, str], Tensor]
    on_bytes: Callable[[int], None]

    def __getitem__(self, index: EllipsisType) -> Tensor:
        stored, scales = self.weights.tensors[self.name], self.weights.scales.get(self.name + SCALE)
        tensor = self.read(stored, self.name)
        if scales is not None:
            assert self.weights.blocks is not None
            tensor = self.weights.blocks.dequantized(tensor, self.read(scales, self.name + SCALE))
        self.on_bytes(stored.num_bytes + (0 if scales is None else scales.num_bytes))
        return tensor


def read_headers(path: Path, blocks: Fp8Blocks | None) -> Weights:
    """The weights of a folder. Raises `CheckpointError` that names the file, and the tensor or its scales, of what is
    missing, cut short, outside the folder, or of a type that is not served.
    """
    tensors = stored_tensors(path)
    tensors = {name: stored for name, stored in tensors.items() if not name.endswith(OLD_BUFFERS)}
    scales = {}
    for name, stored in [(name, stored) for name, stored in tensors.items() if stored.dtype not in TYPES]:
        if stored.dtype != FP8 or blocks is None:
            raise CheckpointError(
                f"{stored.file}: {name} is stored as {stored.dtype}, which config.json says nothing of "
                f"(quantization_config); served are {', '.join(TYPES)}, and {FP8} in blocks"
            )
        scales[name + SCALE] = _scales_of(name, tensors, blocks)
        del tensors[name + SCALE]
    return Weights(path, tensors, scales, blocks)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """What the files of a folder hold, by name, of any type. Raises `CheckpointError` as `read_headers` does."""
    return dict(_headers(folders.locate_tensors(path)))


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names of a transformers model's tensors, of experts each one's projections as published, and their shapes."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition("mlp.experts.")
        if last not in ("gate_up_proj", "down_proj"):
            expected[name] = tuple(tensor.shape)
            continue
        names, sizes = (["down_proj"], tensor.shape[1:]) if last == "down_proj" else (["gate_proj", "up_proj"], None)
        shape = tuple(sizes or (tensor.shape[1] // 2, tensor.shape[2]))
        experts = range(tensor.shape[0])
        expected |= {f"{prefix}mlp.experts.{expert}.{each}.weight": shape for expert in experts for each in names}
    return expected


def check_shapes(weights: Weights, expected: Mapping[str, tuple[int, ...]], optional: Iterable[str]) -> None:
    """Raises `CheckpointError` unless the folder holds what is expected. optional: names that may be missing."""
    given = {name: stored.shape for name, stored in weights.tensors.items()}
    shapes = [
        f"{name} is {list(given[name])}, not {list(expected[name])}"
        for name in given.keys() & expected.keys()
        if given[name] != expected[name]
    ]
    missing, unexpected = expected.keys() - given.keys() - set(optional), given.keys() - expected.keys()
    folders.check_tensors(weights.path, missing, unexpected, shapes)


def _headers(located: Mapping[str, Path]) -> Iterator[tuple[str, Stored]]:
    from safetensors import SafetensorError, safe_open

    for path in sorted(set(located.values())):
        names = [name for name, place in located.items() if place == path]
        if path.suffix == ".bin":
            for name, tensor in folders.read_tensors(dict.fromkeys(names, path)).items():
                yield (
                    name,
                    Stored(path, tuple(tensor.shape), _PICKLED.get(tensor.dtype, str(tensor.dtype)), tensor.nbytes),
                )
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    found = file.get_slice(name)
                    shape, dtype = tuple(found.get_shape()), found.get_dtype()
                    yield name, Stored(path, shape, dtype, prod(shape) * TYPES.get(dtype, 1))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}, where {names[0]} should be, can't be read: {error}") from error


def _scales_of(name: str, tensors: Mapping[str, Stored], blocks: Fp8Blocks) -> Stored:
    stored, scales = tensors[name], tensors.get(name + SCALE)
    if blocks.keeps(name):
        raise CheckpointError(
            f"{stored.file}: {name} is stored as {FP8}, but config.json names its module among those that are not "
            f"converted (quantization_config)"
        )
    if scales is None:
        raise CheckpointError(f"{stored.file}: {name} is stored as {FP8} without its scales, {name + SCALE}")
    if len(stored.shape) != 2 or scales.shape != blocks.num_scales(stored.shape):
        raise CheckpointError(
            f"{scales.file}: {name + SCALE} is {list(scales.shape)}, which does not fit a weight {list(stored.shape)} "
            f"in blocks of {list(blocks.size)}"
        )
    return scales


def _reader(files: ExitStack, stored: Iterable[Stored]) -> Callable[[Stored, str], Tensor]:
    """What reads a tensor of one of the files, each of which is open until `files` is closed."""
    from safetensors import safe_open

    paths = {each.file for each in stored}
    opened = {path: files.enter_context(safe_open(path, framework="pt")) for path in paths if path.suffix != ".bin"}
    pickled = {path: folders.unpickled(path) for path in paths if path.suffix == ".bin"}
    return lambda each, name: opened[each.file].get_tensor(name) if each.file in opened else pickled[each.file][name]


_PICKLED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
