"""The GPU that tensors are on: what kernels are chosen by, and launches there.

Triton launches on the current device, whatever device a pointer is of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def on_its_device(launch: Callable[Concatenate[Tensor, Rest], Result]) -> Callable[Concatenate[Tensor, Rest], Result]:
    """An operator's CUDA implementation with its first tensor's device as the current one."""

    @wraps(launch)
    def launched(first: Tensor, /, *rest: Rest.args, **options: Rest.kwargs) -> Result:
        with torch.cuda.device_of(first):
            return launch(first, *rest, **options)

    return launched


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
