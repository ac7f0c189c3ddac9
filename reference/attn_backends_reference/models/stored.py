"""The tensors in the files of a folder: what their headers tell, and reading them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
TYPES = FLOATS | {"I64": 8, "I32": 4, "BOOL": 1}
"""The types of safetensors that weights are read from as they are, and bytes of an element. All others take one here:
of such weights only 8-bit types are read."""
_PICKLED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PICKLED |= {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file. dtype: as safetensors calls it. num_bytes: in the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a model. shape: once it is read. parts: the tensors that hold it: its values, and their scales if it
    is quantized. dequantized: what makes a bfloat16 weight of these two, None if it is stored as it is.
    """

    shape: tuple[int, ...]
    parts: tuple[Stored, ...]
    dequantized: Callable[[Tensor, Tensor], Tensor] | None = None

    def read(self, read: Callable[[Stored], Tensor]) -> Tensor:
        """The weight. read: of a tensor."""
        parts = [read(part) for part in self.parts]
        return parts[0] if self.dequantized is None else self.dequantized(*parts)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Tensors in the files of a folder, by name, of any type. Raises `CheckpointError` that names the file of what is
    missing, cut short, or outside the folder.
    """
    return {stored.name: stored for stored in _headers(folders.locate_tensors(path))}


@contextmanager
def reader(stored: Iterable[Stored]) -> Iterator[Callable[[Stored], Tensor]]:
    """A context with a function that reads a stored tensor; files are open inside."""
    from safetensors import safe_open

    paths = {each.file for each in stored}
    pickled = {path: folders.unpickled(path) for path in paths if path.suffix == ".bin"}
    with ExitStack() as files:
        opened = {path: files.enter_context(safe_open(path, framework="pt")) for path in paths - pickled.keys()}
        yield (
            lambda each: (
                opened[each.file].get_tensor(each.name) if each.file in opened else pickled[each.file][each.name]
            )
        )


def _headers(located: Mapping[str, Path]) -> Iterator[Stored]:
    from safetensors import SafetensorError, safe_open

    for path in sorted(set(located.values())):
        names = [name for name, place in located.items() if place == path]
        if path.suffix == ".bin":
            for name, tensor in folders.read_tensors(dict.fromkeys(names, path)).items():
                dtype = _PICKLED.get(tensor.dtype, str(tensor.dtype))
                yield Stored(name, path, tuple(tensor.shape), dtype, tensor.nbytes)
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    found = file.get_slice(name)
                    shape, dtype = tuple(found.get_shape()), found.get_dtype()
                    yield Stored(name, path, shape, dtype, prod(shape) * TYPES.get(dtype, 1))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}, where {names[0]} should be, can't be read: {error}") from error
