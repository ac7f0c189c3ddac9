"""Copies from the host to a device without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host values."""
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; to a GPU through pinned memory, so that the host does not wait for what runs there.

    The caller need not keep the pinned memory: torch's allocator does not reuse it until the copy has run.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
