"""Graphs that are planned from an engine's own buffers, without a copy (`BoundInputs`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import (
    compare_identical,
    compare_memory,
    compare_outputs,
    nearest,
    why_invalid,
)
from attn_backends.conformance.exercise import Captured, batch_of, bucket_of, scene_of, setup_of, world_of
from attn_backends.conformance.situations import (
    RAGGED_KINDS,
    graph,
    growing,
    idle,
    joined,
    one_page_size,
    padded,
    ragged_steps,
)
from attn_backends.errors import CaptureError
from attn_backends.planning.metadata import WRITE_SLOTS, Metadata
from spec_metadata import (
    BlockTable,
    BoundedQuery,
    BoundInputs,
    Bucket,
    Paging,
    Step,
    StepKind,
    TokenBucket,
)
from spec_metadata.bound_inputs import check_bound
from spec_metadata.query import packed_starts

INPUTS = "bound inputs"
ANYTHING = 2**30  # in padding, where an engine says how many requests are real


class BoundGraph(Captured):
    """A graph whose metadata reads an engine's buffers. By the case's seed the engine counts its real requests and
    leaves anything after them, or fills padding by a convention and leaves slots to be found in the table.
    """

    def capture(self, bucket: Bucket | TokenBucket) -> Metadata:
        """Buffers of the bucket's size, of padding alone."""
        assert isinstance(bucket, Bucket), "its inputs are of a uniform step"
        world, index, device = self.world, self.world.setup.index, self.world.device
        is_table, geometry = world.setup.block_table, world.geometry
        self.counts = self.case.seed % 2 == 0 or (is_table and bucket.num_steps > 1)
        include, has_mask = is_table and not self.counts, bucket.tree and bucket.kind is StepKind.TARGET_VERIFY
        self.paging: Paging
        if is_table:
            pages = torch.zeros(bucket.bs, world.max_pages + 1, dtype=index, device=device)  # wider than the capacity
            self.paging = BlockTable(pages, geometry)
        else:
            rows = torch.full((bucket.bs,), geometry.reserved_row, dtype=torch.int64, device=device)
            self.paging = world.paging(rows)
        shape = bucket.bs, bucket.width, bucket.width
        slots = torch.full((bucket.num_tokens * bucket.num_steps,), -1, dtype=torch.int64, device=device)
        self.inputs = BoundInputs(
            seq_lens=torch.zeros(bucket.bs, dtype=index, device=device),
            out_cache_loc=slots if self.counts or bucket.tree else None,
            num_real=torch.zeros(1, dtype=torch.int32, device=device) if self.counts else None,
            tree_mask=torch.ones(shape, dtype=torch.bool, device=device) if has_mask else None,
        )
        self.inputs = replace(self.inputs, lens_include_rows=True) if include else self.inputs  # else as by default
        return world.backend.capture(bucket, self.paging, self.inputs)

    def plan(self, step: Step) -> None:
        """Write a step into the buffers, and plan from there."""
        self.bring(step)
        self.world.backend.refresh(self.meta)

    def bring(self, step: Step) -> None:
        """Write a step into the buffers, and the engine's padding after it."""
        bs = 0 if step.kind is StepKind.IDLE else step.bs
        given, geometry, inputs = step.paging.static_input(), self.world.geometry, self.inputs
        fill = 0 if isinstance(self.paging, BlockTable) else 1
        added = step.width if inputs.lens_include_rows else 0
        self._fill(inputs.seq_lens, step.seq_lens + added, bs, ANYTHING if self.counts else fill)
        reserved = ANYTHING if self.counts else geometry.reserved_row
        if isinstance(self.paging, BlockTable):
            reserved = int(given[0, 0]) if bs else -ANYTHING  # a page of a real request
        self._fill(self.paging.static_input(), given, bs, reserved)
        if inputs.out_cache_loc is not None:
            behind = int(step.flat_slots()[0]) if self.counts and bs else -1  # a real request's
            self._fill(inputs.out_cache_loc, step.flat_slots(), step.num_writes if bs else 0, behind)
        if inputs.num_real is not None:
            inputs.num_real.fill_(bs)
        if inputs.tree_mask is not None:
            mask = inputs.tree_mask if step.tree_mask is None else step.tree_mask
            self._fill(inputs.tree_mask, mask, bs, 1)

    def _fill(self, buffer: Tensor, given: Tensor, num: int, behind: int) -> None:
        buffer.fill_(behind)
        if num:
            buffer[:num, ..., : given.shape[-1]].copy_(given) if buffer.ndim == 2 else buffer[:num].copy_(given)


def bindable(subject: Subject) -> list[Case]:
    """Graphs that can be planned from bound inputs, of every kind, padded and idle."""
    cases = joined(graph(growing), one_page_size(joined(graph(padded), graph(idle))))(subject)
    return [
        replace(case, refresh=True, seed=case.seed + number)
        for number, case in enumerate(cases)
        if is_bindable(subject, case)
    ]


def is_bindable(subject: Subject, case: Case) -> bool:
    """Whether a case's graph can be planned from an engine's buffers, which tell the host no lengths."""
    return not subject.capabilities[StepKind(case.kind)].needs_host_lens


@check("graph.bound_inputs", bindable)
def bound_inputs(subject: Subject, case: Case) -> Measured:
    """A graph that is planned from an engine's own buffers computes and writes for what they hold at its replay. Slots
    outside the pool write to the reserved page; pages and rows outside of it and the table are reserved ones.
    """
    world = world_of(setup_of(subject, case))
    captured = BoundGraph(world, case)
    ran = captured.run(scene_of(world, batch_of(case), case.seed + 1), case)
    compare_memory(ran.scene, ran.before, padded=True)
    found = compare_outputs(ran.scene, ran.inputs, ran.outputs)
    _values_outside(captured)
    return found


def _values_outside(captured: BoundGraph | BoundRaggedGraph) -> None:
    """Plan again with slots and pages, or rows, right before and after the pool and the table, for real requests that
    have no token yet; then with slots inside, for no request.
    """
    geometry, meta, inputs, paging = captured.world.geometry, captured.meta, captured.inputs, captured.paging
    assigned, slots = paging.static_input(), inputs.out_cache_loc
    num_places = geometry.num_pages if isinstance(paging, BlockTable) else paging.table.shape[0]
    for buffer, end in ((assigned, num_places), (slots, geometry.num_slots)):
        if buffer is not None:
            buffer.fill_(-1)
            buffer[1::2] = end
    inputs.seq_lens.fill_(meta.step.width if inputs.lens_include_rows else 0)
    _check_reserved(captured, "given ones are outside the pool")
    if inputs.num_real is None:
        counted, every = torch.as_tensor(meta.step.num_real).cpu(), torch.tensor([paging.bs], dtype=torch.int32)
        compare_identical("number of real requests", counted, every)
    elif slots is not None:
        inputs.num_real.zero_()
        slots.fill_((geometry.reserved_slot + geometry.page_size) % geometry.num_slots)
        _check_reserved(captured, "no request is real")


def _check_reserved(captured: BoundGraph | BoundRaggedGraph, why: str) -> None:
    """Plan again, for the reserved page alone."""
    geometry, meta = captured.world.geometry, captured.meta
    captured.world.backend.refresh(meta)
    written, paging = meta.buffers[WRITE_SLOTS.name], meta.step.paging
    if wrong := written[written // geometry.page_size != geometry.reserved_page].tolist():
        raise CheckFailure("write slots", why, None, "of the reserved page", str(wrong))
    read = paging.static_input()
    if isinstance(paging, BlockTable):  # no form reads what comes after the pages of a request's tokens
        starts, first = packed_starts(meta.step.query), torch.arange(read.shape[1], device=read.device)
        tokens = torch.as_tensor([meta.step.num_writes // paging.bs]) if starts is None else starts.diff()
        read = read[(first * geometry.page_size < tokens.to(read.device).unsqueeze(1)).expand_as(read)]
    if wrong := read[read != paging.padding].tolist():
        raise CheckFailure("pages or rows of requests", why, None, "reserved", str(wrong))
    compare_identical("committed tokens", meta.step.seq_lens, torch.zeros_like(meta.step.seq_lens))


class BoundRaggedGraph(Captured):
    """A graph of ragged steps whose metadata reads an engine's buffers: widths, lengths, slots and rows or pages,
    with anything after the real requests. By the case's seed slots are given or found, and lengths include the rows.
    """

    def capture(self, bucket: Bucket | TokenBucket) -> Metadata:
        """Buffers of the bucket's size, of padding alone."""
        world, index, device = self.world, self.world.setup.index, self.world.device
        self.width = self.scene.most_rows
        pages = torch.zeros(bucket.bs, world.max_pages, dtype=index, device=device)
        rows = torch.full((bucket.bs,), world.geometry.reserved_row, dtype=torch.int64, device=device)
        is_table = world.setup.block_table
        self.paging: Paging = BlockTable(pages, world.geometry) if is_table else world.paging(rows)
        has_slots = self.case.seed % 2 == 0
        self.inputs = BoundInputs(
            seq_lens=torch.zeros(bucket.bs, dtype=index, device=device),
            out_cache_loc=torch.full((bucket.bs * self.width,), -1, device=device) if has_slots else None,
            num_real=torch.zeros(1, dtype=torch.int32, device=device),
            widths=torch.zeros(bucket.bs, dtype=index, device=device),
            lens_include_rows=self.case.seed % 4 > 1,
        )
        return world.backend.capture(bucket, self.paging, self.inputs)

    def plan(self, step: Step) -> None:
        """Write a step into the buffers, and plan from there."""
        self.bring(step)
        self.world.backend.refresh(self.meta)

    def bring(self, step: Step) -> None:
        """Write a step into the buffers."""
        inputs, bs, assigned = self.inputs, step.bs, step.paging.static_input()
        assert inputs.num_real is not None, "the engine counts its requests"
        inputs.num_real.fill_(bs)
        lens = step.seq_lens + _widths(step) if inputs.lens_include_rows else step.seq_lens
        for buffer, given in ((inputs.seq_lens, lens), (inputs.widths, _widths(step))):
            assert buffer is not None, "both are bound"
            buffer.fill_(ANYTHING)
            buffer[:bs].copy_(given)
        place = self.paging.static_input()[:bs]
        (place if assigned.ndim == 1 else place[:, : assigned.shape[1]]).copy_(assigned)
        if inputs.out_cache_loc is not None:
            inputs.out_cache_loc.fill_(int(step.flat_slots()[0]))  # also of padding
            inputs.out_cache_loc[: bs * self.width].copy_(step.flat_slots())


def _widths(step: Step) -> Tensor:
    assert isinstance(step.query, BoundedQuery), "its widths are the device's"
    return step.query.widths


def _bindable_ragged(subject: Subject) -> list[Case]:
    found = [case for case in ragged_steps(*RAGGED_KINDS)(subject) if case.path == "graph"]
    return [replace(case, seed=number) for number, case in enumerate(found)]  # of three transitions, each with each


@check("graph.bound_ragged", _bindable_ragged)
def bound_ragged(subject: Subject, case: Case) -> Measured:
    """A ragged step that is planned from an engine's own buffers has the widths that they hold at its replay. Padded
    requests take no row from real ones that ask for all rows of the graph. Slots outside the pool write to the reserved
    page.
    """
    world, found = world_of(setup_of(subject, case)), []
    captured = BoundRaggedGraph(world, replace(case, refresh=True))
    for turn, (widths, asked) in enumerate(((case.widths, ()), (case.widths[::-1], ()), _most(case, captured.width))):
        batch = replace(batch_of(case), widths=widths, asked=asked)
        ran = captured.run(scene_of(world, batch, case.seed + turn), case)
        compare_memory(ran.scene, ran.before, padded=True)
        found.append(compare_outputs(ran.scene, ran.inputs, ran.outputs))
    _values_outside(captured)
    return nearest(found)


def _most(case: Case, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows that requests get which all ask for the most, and what they ask for."""
    whole, further = divmod(case.num_tokens, len(case.lens))
    kept = tuple(min(width, whole + (request < further)) for request in range(len(case.lens)))
    return kept, (width,) * len(kept)


def _checked(subject: Subject) -> list[Case]:
    """Of each kind one graph whose requests the engine counts, uniform and ragged."""
    uniform = [replace(case, seed=0) for case in one_page_size(graph(growing))(subject) if is_bindable(subject, case)]
    return uniform + [case for case in _bindable_ragged(subject) if case.seed % 4 == 0]


@check("refusals.bound_values", _checked)
def bound_values(subject: Subject, case: Case) -> Measured:
    """Buffers of an engine that do not fit a graph; in checking mode also lengths, slots, pages, widths and numbers of
    requests that the capacity or the pool does not hold. Padding may hold others. What was to be planned from them is
    refused, too.
    """
    world = world_of(replace(setup_of(subject, case), checking=True))
    captured = (BoundRaggedGraph if case.widths else BoundGraph)(world, case)
    scene, inputs, meta = scene_of(world, batch_of(case), case.seed + 1), captured.inputs, captured.meta
    bucket, ran = bucket_of(world, case), captured.run(scene, case)
    compare_outputs(ran.scene, ran.inputs, ran.outputs)
    found = [
        why_invalid(INPUTS, partial(world.backend.capture, bucket, captured.paging, wrong))
        for wrong in _misfits(inputs, meta)
    ]
    if isinstance(bucket, Bucket) and bucket.num_steps > 1:
        wrong = replace(inputs, out_cache_loc=None, lens_include_rows=True)
        shortest = replace(bucket, num_steps=2)
        found.append(why_invalid(INPUTS, partial(check_bound, wrong, shortest, captured.paging, world.capacity)))
    step, slots, assigned = scene.step(), inputs.out_cache_loc, captured.paging.static_input()
    places = [(buffer, 0) for buffer in (inputs.seq_lens, slots, inputs.num_real, inputs.widths, assigned)]
    for buffer, place in [*places, (slots, len(step.flat_slots()) - 1)]:
        if buffer is not None:
            captured.bring(step)
            buffer[place] = ANYTHING
            found.append(why_invalid(INPUTS, partial(world.backend.refresh, meta)))
            _stale(meta, captured.static[0].ancestors)
    captured.bring(step)
    if inputs.num_real is not None:
        inputs.num_real.sub_(1)
    for buffer in (inputs.seq_lens, slots, inputs.widths, assigned):
        if buffer is not None:
            buffer[-1] = ANYTHING  # of padding
    world.backend.refresh(meta)
    return Measured(refusal=found[-1])


def _stale(meta: Metadata, ancestors: Tensor | None) -> None:
    """Metadata whose plan failed can be printed, and not be used."""
    told = str(meta)
    try:
        meta.at(0, ancestors)
    except CaptureError:
        return
    raise CheckFailure("metadata", f"taken after a plan that failed: {told}")


def _misfits(inputs: BoundInputs, meta: Metadata) -> list[BoundInputs]:
    """Lengths of too few requests, a mask and widths where there are none or none where there are, and lengths with
    the rows of a loop.
    """
    has_mask, has_widths = inputs.tree_mask is not None, inputs.widths is not None
    loop = [replace(inputs, lens_include_rows=True)] if meta.step.num_steps > 1 else []
    return [
        replace(inputs, seq_lens=inputs.seq_lens[1:]),
        replace(inputs, tree_mask=None if has_mask else meta.step.seq_lens.bool()),
        replace(inputs, widths=None if has_widths else inputs.seq_lens),
        *loop,
    ]
