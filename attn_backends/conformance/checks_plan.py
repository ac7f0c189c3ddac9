"""Metadata: what a plan declares is what it makes, and planning is a function of the step alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical
from attn_backends.conformance.exercise import Captured, batch_of, scene_of, setup_of, world_of
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import (
    any_graph,
    around_pages,
    eager,
    graph,
    joined,
    one_page_size,
    padded,
    shrinking,
    situations,
)
from attn_backends.planning.metadata import Metadata
from spec_metadata import InvalidStepError, PackedQuery, Step, StepKind, token_positions
from spec_metadata.buffers import allocate, out_of_range


def _prefill(subject: Subject) -> list[Case]:
    cases = []
    for case in situations(subject, StepKind.PREFILL):
        edge, less, more, _ = around_pages(case)
        cases.append(replace(case, lens=(less, 0, more), widths=(2, edge, 1)))
    return cases


def _planned(subject: Subject, case: Case) -> tuple[Scene, Metadata]:
    """The metadata of the case's batch on its path."""
    world = world_of(setup_of(subject, case))
    if case.path == "eager":
        scene = scene_of(world, batch_of(case), case.seed)
        return scene, world.backend.init_forward_metadata(scene.step())
    captured = Captured(world, case)
    scene = scene_of(world, batch_of(case), case.seed + 1)
    captured.load(scene)
    return scene, captured.meta


@check("plan.write_slots", joined(eager(), graph(), _prefill))
def write_slots(subject: Subject, case: Case) -> Measured:
    """Each forward writes its own slots of the flat out_cache_loc, as dense int64. One after the last is refused."""
    scene, meta = _planned(subject, case)
    for forward in range(scene.num_forwards):
        expected = torch.tensor(scene.slots_of(forward), dtype=torch.int64)
        got = meta.at(forward, scene.inputs(case.bs or None)[forward].ancestors).write_slots
        compare_identical(f"write slots of forward {forward}", got[: len(expected)].cpu(), expected)
        if not got.is_contiguous():
            raise CheckFailure(f"write slots of forward {forward}", "not dense", None, "stride 1", str(got.stride()))
    try:
        meta.at(scene.num_forwards)
    except InvalidStepError:
        return Measured()
    raise CheckFailure("metadata", f"gave forward {scene.num_forwards} of {scene.num_forwards}, counted from 0")


@check("plan.token_positions", joined(eager(), graph(), _prefill))
def positions_of_tokens(subject: Subject, case: Case) -> Measured:
    """A row of a chain or block stands at its token, a node of a tree at its depth after the committed ones."""
    scene, meta = _planned(subject, case)
    for forward, rows in enumerate(scene.rows):
        expected = [row.token if isinstance(row.token, int) else len(row.visible) - 1 for row in rows]
        given = (forward,) if forward else ()  # the first is the default
        got = token_positions(meta.step, *given)[: len(rows)]
        compare_identical(f"positions of forward {forward}", got.cpu(), torch.tensor(expected, dtype=torch.int64))
    return Measured()


@check("plan.declared_buffers", joined(eager(), graph(), _prefill))
def declared_buffers(subject: Subject, case: Case) -> Measured:
    """Every declared buffer is there, in its declared type and range; its padding is in that range, too."""
    scene, meta = _planned(subject, case)
    specs = scene.world.backend.buffers(scene.batch.kind)
    for spec in specs:
        if spec.name not in meta.buffers:
            raise CheckFailure(spec.name, "declared, and not among the metadata's buffers")
        if meta.buffers[spec.name].dtype is not spec.dtype:
            got = str(meta.buffers[spec.name].dtype)
            raise CheckFailure(spec.name, "another type than declared", None, str(spec.dtype), got)
    allocated = allocate(specs, meta.buffers.extent, torch.device("cpu"))
    for when, buffers in (("before it is planned", allocated), ("planned", meta.buffers)):
        if problems := out_of_range(specs, buffers):
            name = problems[0].split()[0]
            raise CheckFailure(name, f"{when}, it is outside its declared range: {'; '.join(problems)}")
    return Measured()


@check("plan.padding", one_page_size(joined(any_graph(shrinking), graph(padded))))
def padding(subject: Subject, case: Case) -> Measured:
    """Planned for a full batch and then for fewer requests in the same buffers, a graph's metadata keeps nothing of
    those that are gone. It counts those that are real. What it says of each request and row is what fresh buffers say.

    Buffers that grow with the context are left out: a planner may leave pages that no row sees.
    """
    captured = Captured(world_of(setup_of(subject, case)), case)
    assert captured.meta.captured is not None, "it was captured"
    full = replace(case, lens=(case.captured_lens * case.bs)[: case.bs], widths=case.captured_widths)
    for num_real in (len(case.lens), 1, 0):
        captured.load(scene_of(captured.world, batch_of(full), case.seed + 1))
        few = replace(case, lens=case.lens[:num_real], widths=case.widths[:num_real])
        scene = scene_of(captured.world, batch_of(few), case.seed + 2)
        captured.load(scene)
        told = torch.as_tensor(captured.meta.step.num_real).cpu()
        compare_identical("number of real requests", told, torch.tensor([num_real], dtype=torch.int32))
        found = {name: tensor.clone() for name, tensor in _of_requests(captured).items()}
        captured.meta.captured.phase.reset()
        captured.load(scene)
        for name, fresh in _of_requests(captured).items():
            compare_identical(name, found[name], fresh)
    return Measured()


def _of_requests(captured: Captured) -> dict[str, Tensor]:
    """Committed tokens, and declared buffers that do not grow with the context."""
    meta, extent = captured.meta, captured.meta.buffers.extent
    longer = extent._replace(max_pages=extent.max_pages + 1)
    specs = [
        spec for spec in captured.world.backend.buffers(meta.step.kind) if spec.sizes(longer) == spec.sizes(extent)
    ]
    return {"committed tokens": meta.step.seq_lens} | {spec.name: meta.buffers[spec.name] for spec in specs}


@check("plan.leaves_the_step_alone", joined(eager(), _prefill))
def leaves_the_step_alone(subject: Subject, case: Case) -> Measured:
    """Planning changes none of the step's tensors, and planning twice gives the same metadata."""
    world = world_of(setup_of(subject, case))
    step = scene_of(world, batch_of(case), case.seed).step()
    before = {name: tensor.clone() for name, tensor in _tensors(step).items()}
    table = world.table.clone()
    first, second = (world.backend.init_forward_metadata(step) for _ in range(2))
    for name, tensor in _tensors(step).items():
        compare_identical(f"the step's {name} after planning", tensor, before[name])
    compare_identical("the request-to-token table after planning", world.table, table)
    for name, tensor in first.buffers.items():
        compare_identical(f"{name}, planned twice", second.buffers[name], tensor)
    return Measured()


def _tensors(step: Step) -> dict[str, Tensor]:
    given = {
        "seq_lens": step.seq_lens,
        "out_cache_loc": step.out_cache_loc,
        "num_real": step.num_real,
        "paging": step.paging.static_input(),
        "tree_mask": step.tree_mask,
    }
    found = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if isinstance(step.query, PackedQuery):
        found["cu_seqlens"] = step.query.cu_seqlens
    return found
