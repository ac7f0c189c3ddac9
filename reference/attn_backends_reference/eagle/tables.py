"""What a worker keeps of its requests on the device: dataclasses of tables with an entry for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor

Table = TypeVar("Table")


def keep(table: Table, rows: Tensor, values: Table) -> None:
    """Write the entries of some rows. rows: [bs] int64."""
    for field in fields(values):  # type: ignore[arg-type]
        getattr(table, field.name)[rows] = upload(getattr(values, field.name), rows.device)


def kept(table: Table, rows: Tensor) -> Table:
    """The entries of some rows, in memory of their own."""
    return type(table)(*(getattr(table, field.name)[rows] for field in fields(table)))  # type: ignore[arg-type]


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host values."""
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; to a GPU through pinned memory, so that the host does not wait for what runs there."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
