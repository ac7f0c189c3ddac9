"""Mixed batches: chunks of prompts, decodes and verifies of chains, uniform and ragged, as one step of packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from attn_backends.cache import CacheFormat
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.checks_math import extra_world_of
from attn_backends.conformance.comparisons import compare_memory, compare_outputs, nearest, why_invalid
from attn_backends.conformance.exercise import (
    Captured,
    Ran,
    batch_of,
    prepare_memory,
    run_forwards,
    scene_of,
)
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import around_pages, in_8_bits, joined, one_page_size, situations
from spec_metadata import (
    BoundedQuery,
    HostBounds,
    PackedQuery,
    RequestTable,
    Step,
    StepKind,
    mixed_step,
)

WIDTHS = (5, 1, 3, 2, 1)  # of a chunk, a decode, a verify, and two that are ragged
SPARE = 8  # rows of a graph that no batch fills, more than any part has


def _kinds_of(widths: Sequence[int]) -> list[tuple[StepKind | None, int, int]]:
    """The parts of a batch: kind, None for a ragged verify, first request, and the one after its last."""
    parts = [(StepKind.PREFILL, 0, 1), (StepKind.DECODE, 1, 2), (StepKind.TARGET_VERIFY, 2, 3), (None, 3, 5)]
    return [part for part in parts if part[2] <= len(widths)]


def _parts_of(scene: Scene) -> list[Step]:
    """The steps that make the batch of a scene: a chunk, a decode, a verify of three rows, and a ragged one."""
    whole, widths, parts, row = scene.step(), scene.batch.widths, [], 0
    slots, known = whole.flat_slots(), whole.seq_lens_cpu
    assert known is not None, "the suite knows its lengths"
    for kind, first, end in _kinds_of(widths):
        own, num_rows = widths[first:end], sum(widths[first:end])
        paging = whole.paging.on_static(whole.paging.static_input()[first:end])
        host: HostBounds = {"max_committed": max(known[first:end]), "seq_lens_cpu": known[first:end]}
        place = whole.seq_lens[first:end], paging
        written, row = slots[row : row + num_rows], row + num_rows
        match kind:
            case StepKind.PREFILL:
                parts.append(Step.prefill(PackedQuery.of(own, whole.device), *place, written, **host))
            case StepKind.DECODE:
                parts.append(Step.decode(*place, written, **host))
            case StepKind.TARGET_VERIFY:
                parts.append(Step.target_verify(own[0], *place, written, **host))
            case _:
                asked = torch.full((len(own),), max(own), device=whole.device)  # over the bound, which cuts the last
                query = BoundedQuery(asked, num_rows, max(own))
                rows = written.new_full((len(own), query.width), scene.world.geometry.reserved_slot)
                for number, (start, width) in enumerate(zip((0, own[0]), own, strict=True)):
                    rows[number, :width] = written[start : start + width]
                parts.append(Step.target_verify(query, *place, rows.flatten(), **host))
    return parts


def _mixed_step(scene: Scene) -> Step:
    """The parts of a scene as one step, of which the first was mixed before, alone."""
    first, *others = _parts_of(scene)
    return mixed_step([mixed_step([first]), *others])


def _captures(subject: Subject) -> bool:
    declared = subject.capabilities.get(StepKind.PREFILL)
    return declared is not None and declared.captures_packed


def _mixed(subject: Subject) -> list[Case]:
    """With a ragged part where the kernel takes widths of the device, eagerly and through a graph; without else. Plain
    layers, and such with what is declared of windows and sinks.
    """
    found, declared = [], subject.capabilities.get(StepKind.PREFILL)
    extras = [name for name in ("window", "sinks") if getattr(declared, name, False)]
    for case in one_page_size(lambda each: situations(each, StepKind.PREFILL, topks=(1,)))(subject):
        edge, less, more, context = around_pages(case)
        widths = WIDTHS if _captures(subject) else WIDTHS[:3]
        lens = (0, context, less, edge, more)[: len(widths)]
        mixed = replace(case, lens=lens, widths=widths)
        found.append(mixed)
        if _captures(subject):
            rows = sum(widths) + SPARE
            through = replace(mixed, path="graph", captured_lens=(2, 1), captured_widths=(4, 1))
            found.append(replace(through, bs=len(widths), num_tokens=rows))
    able = [case for case in found if extras and not case.layer and case.format == CacheFormat.KV]
    return found + [replace(case, feature="+".join(extras)) for case in able]


class _Mixing(Captured):
    """A graph of prefills that is replayed on mixed batches."""

    def fill(self, scene: Scene) -> Step:
        """Make what the model hands in that of a scene. Returns the step."""
        super().fill(scene)
        return _mixed_step(scene)


@check("math.mixed", joined(_mixed, in_8_bits(_mixed)))
def mixed(subject: Subject, case: Case) -> Measured:
    """Rows of a chunk, a decode, a verify and a ragged verify in one step see what they see in steps of their own."""
    world = extra_world_of(subject, case)
    if case.path == "graph":
        captured = _Mixing(world, case)
        return nearest([_measured(captured.run(scene_of(world, batch_of(case), case.seed + i), case)) for i in (1, 2)])
    scene = scene_of(world, batch_of(case), case.seed)
    before, step = prepare_memory(scene, case), _mixed_step(scene)
    inputs = scene.inputs(num_tokens=step.num_tokens)
    meta = world.backend.init_forward_metadata(step)
    return _measured(Ran(scene, inputs, run_forwards(world, meta, inputs), before, meta))


def _measured(ran: Ran) -> Measured:
    compare_memory(ran.scene, ran.before, padded=True)
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


@check(
    "refusals.mixed", lambda subject: [case for case in _mixed(subject) if case.path == "eager" and not case.feature]
)
def unmixable(subject: Subject, case: Case) -> Measured:
    """Parts of other tables or caches, some with slots and some without, padded ones, a ragged one before another, and
    kinds whose rows see other keys.
    """
    world, other = (extra_world_of(subject, case) for _ in range(2))
    parts, others = (_parts_of(scene_of(each, batch_of(case), case.seed)) for each in (world, other))
    (first, second), larger = parts[:2], replace(world.geometry, num_pages=world.geometry.num_pages + 1)
    pairs = [
        (first, replace(second, out_cache_loc=None)),
        (first, replace(second, num_real=0)),
        (first, replace(second, num_real=torch.tensor([second.bs], dtype=torch.int32, device=second.device))),
        (replace(second, kind=StepKind.DRAFT_BLOCK), first),
        (first, replace(second, paging=replace(second.paging, table=second.paging.table[:, :-1]))),
        (first, replace(second, paging=replace(second.paging, geometry=larger))),
    ]
    if isinstance(second.paging, RequestTable):
        pairs.append((first, others[1]))
    if isinstance(parts[-1].query, BoundedQuery):
        pairs.append((parts[-1], first))
    names = [f"a mixed step of {' and '.join(part.kind for part in pair)} steps" for pair in pairs]
    calls = [partial(mixed_step, pair) for pair in pairs]
    return Measured(refusal=[why_invalid(*each) for each in zip(names, calls, strict=True)][-1])
