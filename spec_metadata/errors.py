"""The errors of this package, and how the check of a tensor words one."""

from collections.abc import Sequence
from reprlib import repr as shortened
from typing import Any

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
"""Types of lengths, slots, rows and tokens."""


class InvalidStepError(ValueError):
    """A step, tree, table or capacity whose values cannot be right: what was wrong, with the values."""


def describe(value: object) -> str:
    """A value in an error's text: shape and dtype of a tensor, the repr of anything else, cut short."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else shortened(value)


def check_tensor(name: str, tensor: Any, shape: Sequence[int | str], dtypes: Sequence[torch.dtype]) -> None:
    """Refuse what is no tensor, or has another shape or type than these. shape: sizes, or names of what may be any."""
    if isinstance(tensor, Tensor) and tensor.dtype in dtypes and (tensor.shape == shape or _fits(tensor.shape, shape)):
        return
    sizes, types = ", ".join(map(str, shape)), " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise InvalidStepError(f"{name} must be [{sizes}] {types}, got {describe(tensor)}")


def _fits(given: Sequence[int], shape: Sequence[int | str]) -> bool:
    return len(given) == len(shape) and all(isinstance(b, str) or a == b for a, b in zip(given, shape, strict=True))
