"""The raw inputs of a captured step: static copies of a step's tensors, with one padding policy (rule R6).

Real requests come first. Padded ones have no committed tokens, read the reserved page and write to it. Among
uniform rows they have as many rows as the others. Among packed rows they have none, except the last one, which owns the
rows that are left over. Where the device decides the number of rows per request, they are packed here (`fit_widths`).

A graph reads a step from static buffers. `static_step` builds a step over them with safe contents (all rows padding),
`copy_step` fills it from a real step before a replay. `pad_step` makes the same padded layout from fresh tensors, for
an eager step that must equal a replay bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_PAGES, NUM_TOKENS, NUM_WRITES, ONE, WIDTH, Buffers, BufferSpec, allocate
from spec_metadata.capacity import AnyBucket, Bucket, Capacity, Extent, StepKind, TokenBucket, check_bucket
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import Step, check_is_step
from spec_metadata.paging import BlockTable, Paging, RequestTable
from spec_metadata.query import BoundedQuery, PackedQuery, PaddedQuery, UniformQuery, packed_rows, packed_starts
from spec_metadata.widths import fit_widths


def input_specs(bucket: AnyBucket, paging: Paging) -> tuple[BufferSpec, ...]:
    """The declared static inputs of a captured step."""
    specs = [
        BufferSpec("num_real", torch.int32, (ONE,), "leading rows that are real requests"),
        BufferSpec("seq_lens", torch.int32, (BS,), "committed tokens of each request; 0 in padded rows"),
        BufferSpec("out_cache_loc", torch.int64, (NUM_WRITES,), "write slots, flat as the step has them"),
    ]
    if isinstance(paging, RequestTable):
        specs.append(BufferSpec("paging", torch.int64, (BS,), "row of each request in the table", pad=paging.padding))
    else:
        doc = "pages of each request, at least as many as it has tokens in"
        specs.append(BufferSpec("paging", torch.int32, (BS, MAX_PAGES), doc, pad=paging.padding, shared=True))
    if isinstance(bucket, TokenBucket):
        doc = "first query row of each request, and the end"
        specs.append(BufferSpec("cu_seqlens", torch.int32, (BS + 1,), doc, high=NUM_TOKENS + 1))
    elif bucket.tree and bucket.kind is StepKind.TARGET_VERIFY:
        specs.append(BufferSpec("tree_mask", torch.bool, (BS, WIDTH, WIDTH), "tree node that a node sees"))
    return tuple(specs)


def static_step(bucket: AnyBucket, paging: Paging, buffers: Buffers) -> Step:
    """A step over static buffers, every row of it padding; what a graph is captured on.

    paging: the engine's table. A request-to-token table is read in place, at the address that it has now.
    """
    if isinstance(bucket, TokenBucket):
        query: PaddedQuery | UniformQuery = PaddedQuery(buffers["cu_seqlens"], bucket.num_tokens, buffers.extent.width)
    else:
        query = UniformQuery(bucket.width)
    static = Step(
        kind=bucket.kind,
        query=query,
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
    """Reasons why a captured step can't take this one; empty if it can. Reads shapes and addresses only."""
    if step.kind is StepKind.IDLE:
        return []
    reasons = _query_misfit(static, step)
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


def _query_misfit(static: Step, step: Step) -> list[str]:
    """What of kind, layout and size does not fit."""
    captured: AnyBucket
    given: AnyBucket
    if not isinstance(static.query, PaddedQuery):
        if not isinstance(step.query, UniformQuery):
            lens = f" (lengths {step.query.lens_cpu})" if isinstance(step.query, PackedQuery) else ""
            return [f"a packed query{lens} fits no graph of one uniform width"]
        captured, given = static.bucket(), step.bucket()
        wrong = step.bucket(static.bs) != captured
    else:
        if isinstance(step.query, UniformQuery):
            return [f"a uniform width of {step.width} fits no graph of packed rows"]
        if isinstance(step.query, PaddedQuery):
            return [f"rows padded to {step.num_tokens} fit no graph, which pads them itself; give a PackedQuery"]
        captured = TokenBucket(static.kind, static.max_real, static.num_tokens)
        given = TokenBucket(step.kind, step.bs, step.num_tokens)
        wrong = step.kind is not static.kind or step.num_tokens > static.num_tokens
        if min(step.width, step.num_tokens) > static.width:
            return [f"{step.width} rows of one request fit no graph of up to {static.width}"]
    reasons = [f"captured for ({captured}), the step is ({given})"] if wrong else []
    if step.bs > static.max_real:
        reasons.append(f"captured for {static.max_real} requests, the step has {step.bs}")
    return reasons


def copy_step(static: Step, step: Step) -> None:
    """Fill a static step from a real one: real rows first, then padding. Copies on the device, reads nothing back.

    Raises `InvalidStepError` for a step that does not fit.
    """
    if reasons := misfit(static, step):
        raise InvalidStepError(f"a {step.kind} step does not fit: {'; '.join(reasons)}")
    _fill(static, None if step.kind is StepKind.IDLE else step)


def padding_step(bucket: AnyBucket, paging: Paging, capacity: Capacity) -> Step:
    """A step of padding only, on fresh tensors. paging: the engine's table."""
    check_bucket(bucket)
    extent = Extent.of_bucket(bucket, capacity, paging.geometry.num_pages)
    return static_step(bucket, paging, allocate(input_specs(bucket, paging), extent, paging.static_input().device))


def idle_step(bucket: AnyBucket, paging: Paging, capacity: Capacity) -> Step:
    """A step of padding only that the host knows in full, of packed rows one request, to run eagerly."""
    if isinstance(bucket, Bucket):
        return replace(padding_step(bucket, paging, capacity), max_committed=0, seq_lens_cpu=())
    geometry, given = paging.geometry, paging.static_input()
    return Step(
        kind=bucket.kind,
        query=PackedQuery.of([bucket.num_tokens], given.device),
        seq_lens=torch.zeros(1, dtype=torch.int32, device=given.device),
        paging=paging.on_static(given.new_full((1, *given.shape[1:]), paging.padding)),
        out_cache_loc=geometry.reserved_slots(bucket.num_tokens, given.device),
        num_real=0,
        max_committed=0,
        seq_lens_cpu=(),
    )


def pad_step(step: Step, bucket: AnyBucket, capacity: Capacity) -> Step:
    """The step in a bucket, padded as a replay pads it, on fresh tensors. Of packed rows the host then knows no exact
    lengths any more. It keeps `max_committed`; without it an eager plan has a replay's extent, and so its bits. Raises
    `InvalidStepError` for a step that does not fit the bucket.
    """
    check_is_step(step)
    padded = padding_step(bucket, step.paging, capacity)
    copy_step(padded, step)
    exact = step.seq_lens_cpu if isinstance(bucket, Bucket) else None
    return replace(padded, max_committed=step.max_committed, seq_lens_cpu=exact)


def closed(step: Step, capacity: Capacity) -> Step:
    """The step as it is planned eagerly: one whose rows the device decides packed and padded, any other as it is."""
    if not isinstance(step.query, BoundedQuery):
        return step
    return pad_step(step, TokenBucket(step.kind, step.bs, step.num_tokens), capacity)


def _fill(static: Step, step: Step | None) -> None:
    """Write real requests, then padded ones."""
    bs, num_writes, given = (0, 0, 0) if step is None else (step.bs, step.num_writes, step.num_real)
    slots, num_real = static.flat_slots(), static.num_real
    assert isinstance(num_real, Tensor), "a graph reads it from a buffer"
    num_real.copy_(given) if isinstance(given, Tensor) else num_real.fill_(given)
    static.seq_lens[bs:].zero_()
    _fill_paging(static, step, bs)
    if step is not None and isinstance(step.query, BoundedQuery):
        _fill_bounded(static, step, step.query)
        return
    if step is not None:
        static.seq_lens[:bs].copy_(step.seq_lens)
        slots[:num_writes].copy_(step.flat_slots())
    slots[num_writes:].copy_(static.paging.geometry.reserved_slots(static.num_writes, static.device)[num_writes:])
    if isinstance(static.query, PaddedQuery):
        _fill_starts(static.query, None if step is None else packed_starts(step.query))
    if static.tree_mask is not None:
        if step is not None and step.tree_mask is not None:
            static.tree_mask[:bs].copy_(step.tree_mask)
        static.tree_mask[bs:] = torch.eye(static.width, dtype=torch.bool, device=static.device)


def _fill_paging(static: Step, step: Step | None, bs: int) -> None:
    """Write the rows or pages of the first `bs` requests, and reserved ones after them."""
    table = static.paging.static_input()
    if step is not None:
        given = step.paging.static_input()
        if isinstance(step.paging, BlockTable):
            columns = min(given.shape[1], table.shape[1])
            table[:bs, :columns].copy_(given[:, :columns])
        else:
            table[:bs].copy_(given)
    table[bs:] = static.paging.padding


def _fill_bounded(static: Step, step: Step, query: BoundedQuery) -> None:
    """Write lengths and rows of a step whose rows the device decides: of real requests as many as fit, then padding."""
    assert isinstance(static.query, PaddedQuery), "a misfit was refused"
    real = torch.arange(step.bs, device=static.device) < static.num_real
    fill_rows(static, static.query, fit_widths(query, real), step.flat_slots())
    static.seq_lens[: step.bs].copy_(torch.where(real, step.seq_lens, 0))


def fill_rows(static: Step, query: PaddedQuery, widths: Tensor, slots: Tensor) -> None:
    """Write where requests start and their rows write. widths: [bs] int64, rows of each request that may be real.
    slots: [bs * n], those that each has, of which rows take the first.
    """
    bs, geometry = widths.shape[0], static.paging.geometry
    starts = torch.nn.functional.pad(widths.cumsum(0), (1, 0))
    _fill_starts(query, starts.int())
    request, row = packed_rows(query)
    of_each = slots.view(bs, -1)
    own = of_each[request.clamp(max=bs - 1), row.clamp(max=of_each.shape[1] - 1)].long()
    is_real = torch.arange(static.num_tokens, device=static.device) < starts[-1]
    static.flat_slots().copy_(torch.where(is_real, own, geometry.reserved_slots(static.num_tokens, static.device)))


def _fill_starts(query: PaddedQuery, given: Tensor | None) -> None:
    """Write where requests start: the given ones, then requests without a row, then those that have what is left."""
    starts, bs = query.cu_seqlens, 0
    if given is None:
        starts[:1].zero_()
    else:
        bs = given.shape[0] - 1
        starts[: bs + 1].copy_(given)
    place = torch.arange(bs + 1, starts.shape[0], dtype=torch.int32, device=starts.device)
    left_over = (place - (starts.shape[0] - 1 - query.num_padding)).clamp_min(0) * query.width
    starts[bs + 1 :].copy_((starts[bs] + left_over).clamp(max=query.num_tokens))
