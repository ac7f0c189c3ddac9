"""The raw inputs of a captured step: static copies of a step's tensors, with one padding policy (rule R6).

A graph reads a step from static buffers. `static_step` builds a step over them with safe contents (all rows padding),
`copy_step` fills it from a real step before a replay, and `pad_step` makes the same padded layout from fresh tensors,
for an eager step that must equal a replay bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_PAGES, NUM_WRITES, ONE, WIDTH, BufferSpec, allocate
from spec_metadata.capacity import Bucket, Capacity, Extent, StepKind, TokenBucket
from spec_metadata.layout import PackedQuery, Step, UniformQuery
from spec_metadata.paging import BlockTable, Paging, RequestTable


def input_specs(bucket: Bucket, paging: Paging) -> tuple[BufferSpec, ...]:
    """The declared static inputs of a captured step."""
    geometry = paging.geometry
    specs = [
        BufferSpec("num_real", torch.int32, (ONE,), "leading rows that are real requests"),
        BufferSpec("seq_lens", torch.int32, (BS,), "committed tokens of each request; 0 in padded rows"),
        BufferSpec("out_cache_loc", torch.int64, (NUM_WRITES,), "write slots, flat as the step has them"),
    ]
    if isinstance(paging, RequestTable):
        pad = geometry.reserved_row
        specs.append(BufferSpec("paging", torch.int64, (BS,), "row of each request in the table", pad=pad))
    else:
        pad = geometry.reserved_page
        specs.append(BufferSpec("paging", torch.int64, (BS, MAX_PAGES), "pages of each request", pad=pad))
    if bucket.tree and bucket.kind is StepKind.TARGET_VERIFY:
        specs.append(BufferSpec("tree_mask", torch.bool, (BS, WIDTH, WIDTH), "tree node that a node sees"))
    return tuple(specs)


def static_step(bucket: Bucket, paging: Paging, buffers: Mapping[str, Tensor]) -> Step:
    """A step over static buffers, every row of it padding; what a graph is captured on.

    paging: the engine's table. A request-to-token table is read in place, at the address that it has now.
    """
    static = Step(
        kind=bucket.kind,
        query=UniformQuery(bucket.width),
        seq_lens=buffers["seq_lens"],
        paging=paging.on_static(buffers["paging"]),
        out_cache_loc=buffers["out_cache_loc"],
        num_real=buffers["num_real"],
        num_steps=bucket.num_steps,
        tree_mask=buffers.get("tree_mask"),
    )
    _fill(static, None)
    return static


def misfit(static: Step, step: Step) -> list[str]:
    """Why a captured step can't take this one; empty if it can. Reads shapes and addresses only."""
    if step.kind is StepKind.IDLE:
        return []
    if isinstance(step.query, PackedQuery):
        return [f"a packed query (lengths {step.query.lens_cpu}) fits no captured graph, which has one uniform width"]
    captured, given = static.bucket(), step.bucket()
    reasons = []
    if step.bucket(static.bs) != captured:
        reasons.append(f"captured for ({captured}), the step is ({given})")
    if step.bs > static.bs:
        reasons.append(f"captured for {static.bs} requests, the step has {step.bs}")
    if type(step.paging) is not type(static.paging):
        reasons.append(f"captured on a {type(static.paging).__name__}, the step has a {type(step.paging).__name__}")
    elif isinstance(static.paging, RequestTable) and isinstance(step.paging, RequestTable):
        old, new = static.paging.table, step.paging.table
        if (old.data_ptr(), old.shape, old.stride()) != (new.data_ptr(), new.shape, new.stride()):
            reasons.append(
                f"the graph reads the request-to-token table {list(old.shape)} of its capture in place and the step "
                f"brings another one, {list(new.shape)} at another address or with other strides (write into the first)"
            )
    return reasons


def copy_step(static: Step, step: Step) -> None:
    """Fill a static step from a real one: real rows first, then padding. Copies on the device, reads nothing back."""
    assert not misfit(static, step), misfit(static, step)
    _fill(static, None if step.kind is StepKind.IDLE else step)


def padding_step(bucket: Bucket | TokenBucket, paging: Paging, capacity: Capacity) -> Step:
    """A step of padding only, on fresh tensors; of packed rows, one padded request has them all. paging: the engine's
    table.
    """
    if isinstance(bucket, TokenBucket):
        return _packed_padding(bucket, paging)
    extent = Extent.of_bucket(bucket, capacity, paging.geometry.num_pages)
    return static_step(bucket, paging, allocate(input_specs(bucket, paging), extent, paging.static_input().device))


def _packed_padding(bucket: TokenBucket, paging: Paging) -> Step:
    geometry, given = paging.geometry, paging.static_input()
    pad = geometry.reserved_row if isinstance(paging, RequestTable) else geometry.reserved_page
    return Step(
        kind=bucket.kind,
        query=PackedQuery.of([bucket.num_tokens], given.device),
        seq_lens=torch.zeros(1, dtype=torch.int32, device=given.device),
        paging=paging.on_static(given.new_full((1, *given.shape[1:]), pad)),
        out_cache_loc=geometry.reserved_slots(bucket.num_tokens, given.device),
        num_real=torch.zeros(1, dtype=torch.int32, device=given.device),
        seq_lens_cpu=(),
    )


def pad_step(step: Step, bs: int, capacity: Capacity) -> Step:
    """The step at batch size `bs`, padded as a replay pads it, on fresh tensors."""
    padded = padding_step(step.bucket(bs), step.paging, capacity)
    copy_step(padded, step)
    return replace(padded, seq_lens_cpu=step.seq_lens_cpu)


def _fill(static: Step, step: Step | None) -> None:
    """Write real rows, then padding: no committed tokens, the reserved row or page, writes to the reserved page."""
    bs, num_writes = (step.bs, step.num_writes) if step is not None else (0, 0)
    geometry = static.paging.geometry
    table = static.paging.static_input()
    if step is None:
        static.num_real.zero_()
    else:
        static.num_real.copy_(step.num_real)
        static.seq_lens[:bs].copy_(step.seq_lens)
        static.out_cache_loc[:num_writes].copy_(step.out_cache_loc)
        given = step.paging.static_input()
        if isinstance(step.paging, BlockTable):
            columns = min(given.shape[1], table.shape[1])
            table[:bs, :columns].copy_(given[:, :columns])
            table[:bs, columns:] = geometry.reserved_page
        else:
            table[:bs].copy_(given)
    static.seq_lens[bs:].zero_()
    static.out_cache_loc[num_writes:].copy_(geometry.reserved_slots(static.num_writes - num_writes, static.device))
    is_table = isinstance(static.paging, BlockTable)
    table[bs:] = geometry.reserved_page if is_table else geometry.reserved_row
    if static.tree_mask is not None:
        if step is not None and step.tree_mask is not None:
            static.tree_mask[:bs].copy_(step.tree_mask)
        static.tree_mask[bs:] = torch.eye(static.width, dtype=torch.bool, device=static.device)
