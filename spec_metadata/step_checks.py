"""What a step is refused for when it is made: types, shapes and devices of what it is made of, and host lengths."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from spec_metadata.errors import InvalidStepError, describe
from spec_metadata.paging import Paging
from spec_metadata.query import AnyQuery, PackedQuery, check_query, min_added, packed_starts

_INDEX = (torch.int32, torch.int64)


def check_requests(query: AnyQuery, num_steps: int, seq_lens: Tensor, paging: Paging) -> None:
    """Layout, lengths and table agree on the requests; asked before slots are looked up."""
    if not isinstance(seq_lens, Tensor) or seq_lens.dtype not in _INDEX or seq_lens.ndim != 1:
        raise InvalidStepError(f"seq_lens must be [bs] int32 or int64, got {describe(seq_lens)}")
    check_paging(paging)
    bs = seq_lens.shape[0]
    if paging.bs != bs:
        raise InvalidStepError(f"seq_lens holds {bs} requests but the paging {paging.bs}")
    check_query(query, num_steps, bs)
    if isinstance(query, PackedQuery) and len(query.lens_cpu) != bs:
        raise InvalidStepError(f"the packed query holds {len(query.lens_cpu)} requests, seq_lens {bs}")
    check_device(seq_lens, table=paging.table, rows=paging.static_input(), cu_seqlens=packed_starts(query))


def check_paging(paging: Paging) -> None:
    """Refuse what is no paging."""
    if not isinstance(paging, Paging):
        raise InvalidStepError(f"paging must be a RequestTable or a BlockTable, got {describe(paging)}")


def check_device(seq_lens: Tensor, **others: Tensor | None) -> None:
    """Kernels follow addresses, and would take those of another device for their own."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != seq_lens.device:
            raise InvalidStepError(
                f"{name} is on {tensor.device} and seq_lens on {seq_lens.device}; a step's tensors lie on one device"
            )


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a tensor that is none, or has another shape or type than these."""
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype not in dtypes:
        types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidStepError(f"{name} must be {list(shape)} {types}, got {describe(tensor)}")


def check_forward(name: str, forward: int, num_forwards: int) -> None:
    """Refuse a forward that a step does not plan. name: of the step's kind."""
    if not 0 <= forward < num_forwards:
        raise InvalidStepError(f"forward {forward} of a {name} step that plans {num_forwards}")


def exact_lens(
    bs: int, max_committed: int | None = None, seq_lens_cpu: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """The lengths of `bs` real requests as the host has them, if they agree with what else it knows."""
    if max_committed is not None and not isinstance(max_committed, Integral):
        raise InvalidStepError(f"max_committed must be an integer of the host, got {describe(max_committed)}")
    if max_committed is not None and max_committed < 0:
        raise InvalidStepError(f"max_committed must be at least 0 tokens, got {max_committed}")
    if seq_lens_cpu is None:
        return None
    if isinstance(seq_lens_cpu, Tensor):
        raise InvalidStepError("seq_lens_cpu must be integers of the host, got a tensor; give a host mirror's tolist()")
    if not isinstance(seq_lens_cpu, Sequence) or not all(isinstance(length, Integral) for length in seq_lens_cpu):
        raise InvalidStepError(f"seq_lens_cpu must be integers of the host, got {seq_lens_cpu!r}")
    if len(seq_lens_cpu) != bs:
        raise InvalidStepError(f"seq_lens_cpu holds {len(seq_lens_cpu)} lengths, seq_lens {bs}")
    if min(seq_lens_cpu, default=0) < 0:
        raise InvalidStepError(f"seq_lens_cpu holds {min(seq_lens_cpu)}; a request has at least 0 committed tokens")
    if max_committed is not None and max(seq_lens_cpu, default=0) > max_committed:
        raise InvalidStepError(f"seq_lens_cpu holds {max(seq_lens_cpu)}, over max_committed={max_committed}")
    return tuple(seq_lens_cpu)


def check_place(
    query: AnyQuery, num_steps: int, paging: Paging, exact: tuple[int, ...] | None, max_committed: int | None
) -> None:
    """Refuse to look up slots behind the committed tokens that a row has no place for, as far as the host knows.

    Of a bound it is known that a request may have so many tokens, and not which.
    """
    if exact is None:
        committed, num_added = max_committed or 0, 1
    else:
        added = query.lens_cpu if isinstance(query, PackedQuery) else (min_added(query, num_steps),) * len(exact)
        committed, num_added = max(zip(exact, added, strict=True), key=sum, default=(0, 0))
    if committed + num_added > paging.row_tokens:
        raise InvalidStepError(
            f"a table row holds {paging.row_tokens} tokens: {committed} committed ones leave no place for {num_added} "
            "more. Make the table wider"
        )
