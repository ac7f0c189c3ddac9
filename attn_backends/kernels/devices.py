"""The GPU that tensors are on: what kernels are chosen by, and launches there.

Triton launches on the current device, whatever device a pointer is of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

_PLAIN = (Tensor, Parameter)  # and no class with a dispatch of its own
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def on_its_device(launch: Callable[Concatenate[Tensor, Rest], Result]) -> Callable[Concatenate[Tensor, Rest], Result]:
    """An operator's CUDA implementation with its first tensor's device as the current one."""

    @wraps(launch)
    def launched(first: Tensor, /, *rest: Rest.args, **options: Rest.kwargs) -> Result:
        with torch.cuda.device_of(first):
            return launch(first, *rest, **options)

    return launched


def is_watched() -> bool:
    """Whether operators are being watched: a compiler that traces, or a dispatch mode such as a recording."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def undispatched(operator: Callable[..., Result], on_cuda: Callable[..., Result]) -> Callable[..., Result]:
    """An operator, called without torch's dispatcher, on CUDA tensors as they are, unless operators are being watched.

    on_cuda: what the dispatcher would call.
    """

    def call(first: Tensor, *rest: Any) -> Result:
        is_direct = first.is_cuda and type(first) in _PLAIN and not is_watched()
        return (on_cuda if is_direct else operator)(first, *rest)

    return call


class Gpu(NamedTuple):
    """num_processors: multiprocessors. shared: bytes of shared memory that a program may take. tensor_memory: products
    of 64 rows add up in a memory of their own (SM100). has_e4m3: it converts 8-bit floats itself.
    """

    num_processors: int
    shared: int
    tensor_memory: bool = False
    has_e4m3: bool = False


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; for Triton's interpreter an H200 that does not know 8-bit floats."""
    if device.type != "cuda":
        return Gpu(132, 227 * 1024)
    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(found.multi_processor_count, shared, found.major == 10, (found.major, found.minor) >= (8, 9))
