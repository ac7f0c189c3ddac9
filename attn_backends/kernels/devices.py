"""Launches on the device of their tensors: Triton launches on the current one, whatever device a pointer is of."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

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
