"""The weights of a target's folder: what its files hold, told by their headers, and reading it weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any

from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders
from attn_backends_reference.models.quantization import Quantization
from attn_backends_reference.models.stored import FLOATS, TYPES, Stored, Weight, reader, stored_tensors

OLD_BUFFERS = "rotary_emb.inv_freq"  # in folders that transformers 4.30 and earlier saved; computed since
INTEGERS = ("tid2eid", "d2t", "t2d")
"""How the names of tensors end that are integers or Booleans: maps of tokens."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a folder, none of them read. tensors: by name."""

    path: Path
    tensors: Mapping[str, Weight]

    @property
    def is_quantized(self) -> bool:
        """Whether any of them is."""
        return any(weight.dequantized is not None for weight in self.tensors.values())

    @property
    def parts(self) -> list[Stored]:
        """The tensors of the files."""
        return [part for weight in self.tensors.values() for part in weight.parts]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_elements(self) -> int:
        """Elements of all weights."""
        return sum(prod(weight.shape) for weight in self.tensors.values())

    def chosen(self, keep: Callable[[str], bool]) -> Weights:
        """The weights whose names `keep` accepts."""
        return replace(self, tensors={name: weight for name, weight in self.tensors.items() if keep(name)})

    def read(self) -> dict[str, Tensor]:
        """All of them, dequantized."""
        with self.opened(lambda _: None) as unread:
            return {name: each[...] for name, each in unread.items()}

    @contextmanager
    def opened(self, on_bytes: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """By name what reads a weight when it is sliced, as transformers takes a `state_dict`. on_bytes: gets the bytes
        of the file that were read.
        """
        with reader(self.parts) as read:
            yield {name: _Unread(weight, read, on_bytes) for name, weight in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class _Unread:
    """A weight that is read, and dequantized, by ``weight[...]``."""

    weight: Weight
    read: Callable[[Stored], Tensor]
    on_bytes: Callable[[int], None]

    def __getitem__(self, index: EllipsisType) -> Tensor:
        tensor = self.weight.read(self.read)
        self.on_bytes(sum(part.num_bytes for part in self.weight.parts))
        return tensor


def read_headers(path: Path, quantization: Quantization | None) -> Weights:
    """The weights of a folder. Raises `CheckpointError` that names the file, and the tensor or its scales, of what is
    missing, cut short, outside the folder, or of a type that is not served.
    """
    tensors = {name: each for name, each in stored_tensors(path).items() if not name.endswith(OLD_BUFFERS)}
    found = {} if quantization is None else quantization.weights_of(tensors)
    in_parts = {part.name for weight in found.values() for part in weight.parts}
    for name, stored in tensors.items():
        if name in in_parts:
            continue
        served = TYPES if name.endswith(INTEGERS) else FLOATS
        if stored.dtype not in served:
            raise CheckpointError(
                f"{stored.file}: {name} is stored as {stored.dtype}, which config.json says nothing of "
                f"(quantization_config); served are {', '.join(served)}"
            )
        found[name] = Weight(stored.shape, (stored,))
    return Weights(path, found)


def experts_apart(
    shapes: Mapping[str, tuple[int, ...]], names: tuple[str, str, str, str]
) -> dict[str, tuple[int, ...]]:
    """The same with each expert's projections apart, as most folders publish them. names: of `Family.experts`."""
    inside, gate, up, down = names
    apart: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        prefix, _, last = name.rpartition("mlp.experts.")
        if last not in ("gate_up_proj", "down_proj"):
            apart[name.replace(".mlp.", f".{inside}.")] = shape
            continue
        experts, rows, columns = shape
        projections, rows = ([down], rows) if last == "down_proj" else ([gate, up], rows // 2)
        for expert in range(experts):
            apart |= {f"{prefix}{inside}.experts.{expert}.{each}.weight": (rows, columns) for each in projections}
    return apart


def check_shapes(weights: Weights, expected: Mapping[str, tuple[int, ...]], optional: Iterable[str]) -> None:
    """Raises `CheckpointError` unless the folder holds what is expected. optional: names that may be missing."""
    given = {name: weight.shape for name, weight in weights.tensors.items()}
    shapes = [
        f"{name} is {list(given[name])}, not {list(expected[name])}"
        for name in given.keys() & expected.keys()
        if given[name] != expected[name]
    ]
    missing, unexpected = expected.keys() - given.keys() - set(optional), given.keys() - expected.keys()
    folders.check_tensors(weights.path, missing, unexpected, shapes)


def read_checked(weights: Weights, needed: Mapping[str, Tensor], optional: Collection[str] = ()) -> dict[str, Tensor]:
    """The weights of a draft's folder, by name. Raises `CheckpointError`, before any is read, unless their names and
    shapes are those of `needed`. optional: names that may be missing.
    """
    check_shapes(weights, {name: tuple(tensor.shape) for name, tensor in needed.items()}, optional)
    return weights.read()
