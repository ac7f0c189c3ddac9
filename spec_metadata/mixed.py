"""Mixed batches: steps of several kinds as one step of packed rows.

A row of a chunk of a prompt, of a decode and of the verify of a chain sees the same: the committed tokens, the rows of
its request before it, and itself. So a decode is a chunk of one token, a verify one of its chain, and a mixed step is a
prefill, which every kernel of packed rows takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_metadata.capacity import StepKind
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import Step, check_is_step
from spec_metadata.paging import Paging, RequestTable
from spec_metadata.query import BoundedQuery, PackedQuery, PaddedQuery, UniformQuery, most_rows, packed_rows
from spec_metadata.widths import fit_widths

CAUSAL = (StepKind.PREFILL, StepKind.DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)


def mixed_step(parts: Sequence[Step]) -> Step:
    """One step of packed rows from prefills, decodes, verifies of chains and draft extends of one model, whose rows
    stand in the order of the parts. It is a prefill: its kernel and its buckets are those of `StepKind.PREFILL`.

    A ragged part is the last one, so that the host knows where the rows of all others stand; it is cut to its own
    bound before, and never takes rows of another part. All parts have slots, or none. Raises `InvalidStepError` for
    parts whose rows see other keys (a tree, a draft), and for parts that do not share a table.
    """
    if reasons := mixed_reasons(parts):
        raise InvalidStepError(
            f"these steps can't be mixed: {'; '.join(reasons)}. Run such a part as a step of its own"
        )
    slots = [part.out_cache_loc for part in parts]
    known = [part.seq_lens_cpu for part in parts]
    bounds = [part.max_committed for part in parts]
    return Step(
        StepKind.PREFILL,
        _joined_query(parts),
        torch.cat([part.seq_lens.to(parts[0].seq_lens.dtype) for part in parts]),
        _joined_paging([part.paging for part in parts]),
        None if slots[0] is None else _joined_slots(parts),
        sum(part.bs for part in parts),
        max_committed=None if None in bounds else max(each for each in bounds if each is not None),
        seq_lens_cpu=None if None in known else tuple(n for each in known if each is not None for n in each),
    )


def mixed_reasons(parts: Sequence[Step]) -> list[str]:
    """Reasons why steps can't be mixed; empty if they can. Reads no values on the device."""
    for part in parts:
        check_is_step(part)
    if not parts:
        return ["there are none"]
    reasons = [reason for part in parts for reason in _part_reasons(part)]
    if any(isinstance(part.query, BoundedQuery) for part in parts[:-1]):
        reasons.append("a ragged step stands before another part (it comes last)")
    if len({part.out_cache_loc is None for part in parts}) > 1:
        reasons.append("some parts have out_cache_loc and some leave it out")
    first = parts[0].paging
    for paging in (part.paging for part in parts[1:]):
        if type(paging) is not type(first) or paging.geometry != first.geometry:
            reasons.append("parts have tables of different forms or caches")
        elif isinstance(first, RequestTable) and paging.table.data_ptr() != first.table.data_ptr():
            reasons.append("parts read different request-to-token tables")
        elif paging.row_tokens != first.row_tokens:
            reasons.append(f"tables of {first.row_tokens} and {paging.row_tokens} tokens per request")
    return reasons


def _part_reasons(part: Step) -> list[str]:
    reasons = []
    if part.is_tree:
        reasons.append(f"a {part.kind} of a tree, whose rows see their ancestors alone")
    elif part.kind not in CAUSAL:
        reasons.append(f"a {part.kind} step (prefills, decodes, verifies of chains and draft extends can)")
    if isinstance(part.query, PaddedQuery) or isinstance(part.num_real, Tensor) or part.num_real != part.bs:
        reasons.append(f"a {part.kind} step with padded requests (a graph pads the whole)")
    return reasons


def _widths(part: Step) -> list[int]:
    """Rows of each request, of a ragged step its bound on them."""
    return list(most_rows(part.query) or [part.width] * part.bs)


def _joined_query(parts: Sequence[Step]) -> PackedQuery | BoundedQuery:
    *others, last = parts
    device = last.device
    if not isinstance(last.query, BoundedQuery):
        return PackedQuery.of([width for part in parts for width in _widths(part)], device)
    known = PackedQuery.of([width for part in others for width in _widths(part)], device)
    fitted = fit_widths(last.query, torch.ones(last.bs, dtype=torch.bool, device=device))
    widths = torch.cat((known.cu_seqlens.diff(), fitted.int()))
    num_tokens, width = known.num_tokens + last.query.num_tokens, max(known.width, last.width)
    return BoundedQuery(widths, num_tokens, width, (*known.lens_cpu, *_widths(last)))


def _joined_paging(tables: Sequence[Paging]) -> Paging:
    given = [each.static_input() for each in tables]
    return tables[0].on_static(torch.cat([each.to(given[0].dtype) for each in given]))


def _joined_slots(parts: Sequence[Step]) -> Tensor:
    """The slots of all rows; beside a ragged part those of `width` rows of each request, as it needs them."""
    if not isinstance(parts[-1].query, BoundedQuery):
        return torch.cat([part.flat_slots().long() for part in parts])
    width, found = max(part.width for part in parts), []
    for part in parts:
        slots, reserved = part.flat_slots().long(), part.paging.geometry.reserved_slot
        of_each = slots.new_full((part.bs, width), reserved)
        if isinstance(part.query, UniformQuery | BoundedQuery):
            of_each[:, : part.width] = slots.view(part.bs, -1)
        else:
            of_each[packed_rows(part.query)] = slots
        found.append(of_each)
    return torch.cat(found).flatten()
