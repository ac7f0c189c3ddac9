"""Checks of a step when it is made: types, shapes and devices of its fields, and lengths on the host."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_metadata.capacity import PACKED_KINDS
from spec_metadata.errors import INTEGERS, InvalidStepError, check_tensor, describe
from spec_metadata.paging import BlockTable, Paging, RequestTable
from spec_metadata.query import AnyQuery, BoundedQuery, UniformQuery, check_query, most_rows, packed_starts

if TYPE_CHECKING:
    from spec_metadata.layout import Step


def is_sound(step: Step) -> bool:
    """Whether a uniform step is made of what engines have, so that `check_step` has nothing to refuse. Every step pays
    for this: one pass, which does not look for what is wrong.
    """
    query, lens, paging, slots, mask = step.query, step.seq_lens, step.paging, step.out_cache_loc, step.tree_mask
    if type(query) is not UniformQuery or not isinstance(lens, Tensor):
        return False
    width, num_steps, num_real, shape, device = query.width, step.num_steps, step.num_real, lens.shape, lens.device
    if type(paging) is RequestTable:
        is_paged = paging.rows.shape == shape and paging.rows.device == device
    else:
        is_paged = type(paging) is BlockTable and paging.table.shape[:1] == shape
    if not is_paged or paging.table.device != device or lens.dtype not in INTEGERS:
        return False
    if type(width) is not int or type(num_steps) is not int or width < 1 or num_steps < 1:
        return False
    bs, known = shape[0], step.seq_lens_cpu
    is_whole = (
        (0 <= num_real <= bs if type(num_real) is int else _is_tensor(num_real, (1,), (torch.int32,), device))
        and (slots is None or _is_tensor(slots, (bs * width * num_steps,), INTEGERS, device))
        and (mask is None or _is_tensor(mask, (bs, width, width), (torch.bool,), device))
        and (known is None or len(known) <= bs)
    )
    if not is_whole or slots is not None:
        return is_whole
    bound, room = step.max_committed or 0, paging.row_tokens
    if known is None:
        return bound < room
    room -= width * num_steps - 1  # a bound that fits in it spares a look at every length
    return 0 < bound < room or max(known, default=0) < room


def _is_tensor(tensor: object, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], device: torch.device) -> bool:
    """Whether it is a tensor of this kind."""
    if not isinstance(tensor, Tensor):
        return False
    return tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device


def check_step(step: Step) -> None:
    """Refuse a step whose parts do not agree."""
    check_requests(step.query, step.num_steps, step.seq_lens, step.paging)
    slots, num_real, mask = step.out_cache_loc, step.num_real, step.tree_mask
    if isinstance(step.query, BoundedQuery):
        if step.kind not in PACKED_KINDS:
            raise InvalidStepError(
                f"a {step.kind} step has no widths of the device; verifies, draft extends and mixed steps take them"
            )
        if mask is not None:
            raise InvalidStepError(
                "tree_mask of a ragged verify: its rows are chains. Verify a tree at one width (num_draft_tokens), or "
                "draft with topk=1"
            )
        check_device(step.seq_lens, widths=step.query.widths)
    if isinstance(num_real, Tensor):
        check_tensor("num_real", num_real, (1,), (torch.int32,))
    elif not isinstance(num_real, Integral) or not 0 <= num_real <= step.bs:
        given = describe(num_real)
        raise InvalidStepError(
            f"num_real must be an integer in [0, {step.bs}], or [1] int32 on the device, got {given}"
        )
    if slots is None:
        _check_place(step)
    else:
        check_tensor(f"out_cache_loc of a {step.kind} step", slots, (step.num_writes,), INTEGERS)
    if mask is not None:
        check_tensor("tree_mask", mask, (step.bs, step.width, step.width), (torch.bool,))
    check_device(step.seq_lens, num_real=num_real, out_cache_loc=slots, tree_mask=mask)
    if step.seq_lens_cpu is not None and len(step.seq_lens_cpu) > step.bs:
        raise InvalidStepError(f"seq_lens_cpu holds {len(step.seq_lens_cpu)} lengths, seq_lens {step.bs}")


def check_requests(query: AnyQuery, num_steps: int, seq_lens: Tensor, paging: Paging) -> None:
    """Raise `InvalidStepError` unless layout, lengths, [bs] int32 or int64, and table agree on the requests."""
    check_tensor("seq_lens", seq_lens, ("bs",), INTEGERS)
    check_paging(paging)
    bs = seq_lens.shape[0]
    if paging.bs != bs:
        raise InvalidStepError(f"seq_lens holds {bs} requests but the paging {paging.bs}")
    check_query(query, num_steps, bs)
    check_device(seq_lens, table=paging.table, rows=paging.static_input(), cu_seqlens=packed_starts(query))


def check_paging(paging: Paging) -> None:
    """Refuse what is no paging."""
    if not isinstance(paging, Paging):
        raise InvalidStepError(f"paging must be a RequestTable or a BlockTable, got {describe(paging)}")


def check_lens(lens: Sequence[int], added: Sequence[int], most: int) -> None:
    """Refuse committed tokens of real requests that leave no room for what each adds, of `most` together."""
    for request, (length, num) in enumerate(zip(lens, added, strict=True)):
        if length < 0 or length + num > most:
            raise InvalidStepError(
                f"request {request} has {length} committed tokens and adds {num}; its table row and the capacity hold "
                f"{most}"
            )


def check_rows(paging: Paging, num: int) -> None:
    """Refuse leading rows outside of a request table. Reads the device back: for checking mode."""
    if isinstance(paging, RequestTable):
        num_rows, rows = paging.table.shape[0], paging.rows[:num].tolist()
        if any(not 0 <= row < num_rows for row in rows):
            raise InvalidStepError(f"rows {rows} must lie in the table's [0, {num_rows})")


def check_device(seq_lens: Tensor, **others: Tensor | int | None) -> None:
    """Raise `InvalidStepError` for a tensor on another device than seq_lens: kernels take any address for their own."""
    for name, tensor in others.items():
        if isinstance(tensor, Tensor) and tensor.device != seq_lens.device:
            raise InvalidStepError(
                f"{name} is on {tensor.device} and seq_lens on {seq_lens.device}; a step's tensors lie on one device"
            )


def check_forward(name: str, forward: int, num_forwards: int) -> None:
    """Refuse a forward that a step does not plan. name: of the step's kind."""
    if not 0 <= forward < num_forwards:
        raise InvalidStepError(f"forward {forward} of a {name} step that plans {num_forwards}")


def exact_lens(
    bs: int, max_committed: int | None = None, seq_lens_cpu: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """The lengths of `bs` real requests as the host has them, if they agree with what else it knows."""
    if max_committed is not None:
        if type(max_committed) is not int and not isinstance(max_committed, Integral):
            raise InvalidStepError(f"max_committed must be an integer of the host, got {describe(max_committed)}")
        if max_committed < 0:
            raise InvalidStepError(f"max_committed must be at least 0 tokens, got {max_committed}")
    if seq_lens_cpu is None:
        return None
    if isinstance(seq_lens_cpu, Tensor):
        raise InvalidStepError("seq_lens_cpu must be integers of the host, got a tensor; give a host mirror's tolist()")
    try:
        exact = tuple(seq_lens_cpu)
        array("Q", exact)  # one call for all of them, which takes integers from 0, and tensors
        if not isinstance(seq_lens_cpu, Sequence) or (type(sum(exact)) is not int and Tensor in map(type, exact)):
            raise TypeError  # the sum is a tensor if one of them is, and takes a fifth of the look at each
    except TypeError:
        raise InvalidStepError(f"seq_lens_cpu must be integers of the host, got {seq_lens_cpu!r}") from None
    except OverflowError:
        if (least := min(each for each in exact if isinstance(each, Integral))) < 0:
            raise InvalidStepError(f"seq_lens_cpu holds {least}; a request has at least 0 committed tokens") from None
    if len(exact) != bs:
        raise InvalidStepError(f"seq_lens_cpu holds {len(exact)} lengths, seq_lens {bs}")
    if max_committed is not None and max(exact, default=0) > max_committed:
        raise InvalidStepError(f"seq_lens_cpu holds {max(exact)}, over max_committed={max_committed}")
    return exact


def _check_place(step: Step) -> None:
    """Refuse to look up slots after the committed tokens that a row has no place for, as far as the host knows.

    Of a bound it is known that a request may have so many tokens, and not which.
    """
    if step.seq_lens_cpu is None:
        committed, num_added = step.max_committed or 0, 1
    else:
        added = most_rows(step.query) or (step.num_added_at_least,) * len(step.seq_lens_cpu)
        committed, num_added = max(zip(step.seq_lens_cpu, added, strict=False), key=sum, default=(0, 0))
    if committed + num_added > step.paging.row_tokens:
        raise InvalidStepError(
            f"a table row holds {step.paging.row_tokens} tokens: {committed} committed ones leave no place for "
            f"{num_added} more. Make the table wider"
        )
