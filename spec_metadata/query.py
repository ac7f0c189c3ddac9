"""The query layouts of a step, which are types: a uniform width, packed lengths, and widths of the device in bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Self

import torch
from torch import Tensor

from spec_metadata.capacity import ceil_div
from spec_metadata.errors import INTEGERS, InvalidStepError, check_tensor, describe
from spec_metadata.upload import to_device


@dataclass(frozen=True, slots=True)
class UniformQuery:
    """Every request has `width` query rows."""

    width: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedQuery:
    """Request i has `lens_cpu[i]` query rows, packed one after the other.

    cu_seqlens: [bs + 1] int32, exclusive prefix sums of the lengths, on the step's device.
    """

    cu_seqlens: Tensor
    lens_cpu: tuple[int, ...]

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device | str = "cpu") -> Self:
        """The layout of host lengths. Does not wait for what runs on the device. Raises `InvalidStepError` for lengths
        that are no integers of the host.
        """
        _check_lens(lens)
        sums = list(accumulate(lens, initial=0))
        return cls(to_device(sums, torch.int32, torch.device(device)), tuple(lens))

    @property
    def num_tokens(self) -> int:
        """Query rows of all requests."""
        return sum(self.lens_cpu)

    @property
    def width(self) -> int:
        """Query rows of the longest request."""
        return max(self.lens_cpu, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class BoundedQuery:
    """Rows of each request, of a width that the device alone knows: a ragged step, which is the verify of a chain, a
    draft extend over accepted tokens, or a mixed step. The host has bounds.

    widths: [bs] int32 or int64, 1 to `width`, on the step's device. num_tokens: bound on their sum, at least bs. width:
    bound on each. most: of a mixed step the host's bound on the rows of each request, for which its slots and its table
    row have room; None for `width` of each, as the others have. Whoever plans the step brings widths within the bounds
    (`spec_metadata.fit_widths`) and packs the rows, as a `PaddedQuery`.
    """

    widths: Tensor
    num_tokens: int
    width: int
    most: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PaddedQuery:
    """Packed rows whose lengths the device alone knows: those of a graph, or of a step padded like one.

    cu_seqlens: [bs + 1] int32, as in `PackedQuery`; a request may have no row. num_tokens: query rows of all requests.
    width: bound on those of one. The last `num_padding` requests own the padded rows.
    """

    cu_seqlens: Tensor
    num_tokens: int
    width: int

    @property
    def num_padding(self) -> int:
        """Requests that own padded rows: enough to own all of them."""
        return ceil_div(self.num_tokens, self.width)


AnyPacked = PackedQuery | PaddedQuery
AnyQuery = UniformQuery | AnyPacked | BoundedQuery


def packed_starts(query: AnyQuery) -> Tensor | None:
    """[bs + 1] int32: first query row of each request, and the end; None where rows are not packed."""
    return query.cu_seqlens if isinstance(query, AnyPacked) else None


def most_rows(query: AnyQuery) -> tuple[int, ...] | None:
    """Bounds of the host on the rows of each request; None where one number says all that it knows."""
    if isinstance(query, PackedQuery):
        return query.lens_cpu
    return query.most if isinstance(query, BoundedQuery) else None


def check_room(num_tokens: int, bs: int) -> None:
    """Refuse a bound on the rows of `bs` requests that does not hold one of each."""
    if not isinstance(num_tokens, Integral) or num_tokens < max(bs, 1):
        raise InvalidStepError(
            f"num_tokens bounds the rows of a ragged step, so it must be at least {max(bs, 1)}, a row of each of {bs} "
            f"requests; got {num_tokens!r}"
        )


def as_packed(query: AnyQuery) -> AnyPacked:
    """The query, whose rows are packed; refuses one that was not planned yet."""
    if isinstance(query, AnyPacked):
        return query
    raise InvalidStepError("a ragged step has rows once it is planned: take them of the metadata's step (meta.step)")


def packed_rows(packed: AnyQuery) -> tuple[Tensor, Tensor]:
    """The request of each query row and the row's number in it, both [num_tokens] int64."""
    query = as_packed(packed)
    row = torch.arange(query.num_tokens, device=query.cu_seqlens.device)
    starts = query.cu_seqlens.long()
    request = torch.searchsorted(starts[1:], row, right=True)
    return request, row - starts[request]


def _check_lens(lens: Sequence[int]) -> None:
    """Refuse lengths of a packed query that are no integers of the host. Were one none, their sum would be none, which
    takes a tenth of the time.
    """
    try:
        are_integers = isinstance(lens, Sequence) and (
            type(sum(lens)) is int or all(isinstance(length, Integral) for length in lens)
        )
    except TypeError:
        are_integers = False
    if not are_integers:
        raise InvalidStepError(f"lengths of a packed query must be integers of the host, got {describe(lens)}")


def check_query(query: AnyQuery, num_steps: int, bs: int) -> None:
    """Refuse a layout that is none, or not one of `bs` requests."""
    if isinstance(query, UniformQuery):
        for name, size in {"num_steps": num_steps, "width": query.width}.items():
            if not isinstance(size, Integral):
                raise InvalidStepError(f"{name} must be a whole number, got {size!r}")
        if num_steps < 1 or query.width < 1:
            raise InvalidStepError(f"num_steps and width must be at least 1, got {num_steps} and {query.width}")
    elif isinstance(query, BoundedQuery):
        _check_bounds(query, bs)
    elif isinstance(query, AnyPacked):
        if isinstance(query, PackedQuery):
            _check_packed(query.lens_cpu, bs)
        check_tensor("cu_seqlens, which PackedQuery.of makes,", query.cu_seqlens, (bs + 1,), (torch.int32,))
    else:
        raise InvalidStepError(f"query is {query!r}; it must be UniformQuery(width) or PackedQuery.of(lengths, device)")


def _check_packed(lens: tuple[int, ...], bs: int) -> None:
    _check_lens(lens)
    if min(lens, default=1) < 1:
        raise InvalidStepError(f"every request needs at least one query row, got lengths {lens}")
    if len(lens) != bs:
        raise InvalidStepError(f"the packed query holds {len(lens)} requests, seq_lens {bs}")


def _check_bounds(query: BoundedQuery, bs: int) -> None:
    check_tensor(f"widths of {bs} requests", query.widths, (bs,), INTEGERS)
    if not isinstance(query.width, Integral) or query.width < 1:
        raise InvalidStepError(f"width bounds the rows of a request and must be at least 1, got {query.width!r}")
    if query.most is not None and (len(query.most) != bs or max(query.most, default=0) > query.width):
        raise InvalidStepError(
            f"most bounds the rows of each of {bs} requests by up to {query.width}, got {describe(query.most)}"
        )
    check_room(query.num_tokens, bs)
