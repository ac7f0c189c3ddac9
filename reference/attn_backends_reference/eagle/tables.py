"""Tables of a worker's requests on the device: dataclasses of tensors with an entry for each row.

Phases gather what they need of it in their regions, so a graph reads the tables where they lie.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from attn_backends.planning.metadata import Metadata
from spec_metadata.upload import upload


class Dataclass(Protocol):
    """An instance of any dataclass, as `dataclasses.fields` knows one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Table = TypeVar("Table", bound=Dataclass)


def keep(table: Table, rows: Tensor, values: Table) -> None:
    """Write the entries of some rows. rows: [bs] int64."""
    for field in fields(values):
        getattr(table, field.name)[rows] = upload(getattr(values, field.name), rows.device)


def kept(table: Table, rows: Tensor) -> Table:
    """The entries of some rows. rows: [bs] int64."""
    return type(table)(*(getattr(table, field.name)[rows] for field in fields(table)))


def rows_of(meta: Metadata) -> Tensor:
    """[bs] int64, the rows of a step's requests, of padded ones the reserved row."""
    return meta.step.paging.static_input()
