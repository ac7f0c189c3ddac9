"""What a worker keeps of its requests on the device: dataclasses of tables with an entry for each row."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from torch import Tensor

from attn_backends.runner import Rows
from spec_metadata.upload import upload

Table = TypeVar("Table")


def keep(table: Table, rows: Tensor, values: Table) -> None:
    """Write the entries of some rows. rows: [bs] int64."""
    for field in fields(values):  # type: ignore[arg-type]
        getattr(table, field.name)[rows] = upload(getattr(values, field.name), rows.device)


def kept(table: Table, rows: Tensor) -> Table:
    """The entries of some rows as inputs of a phase, which its runner gathers where they are read."""
    return type(table)(*(Rows(getattr(table, field.name), rows) for field in fields(table)))  # type: ignore[arg-type]
