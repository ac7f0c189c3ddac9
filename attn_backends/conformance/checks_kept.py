"""Rows that are stored without attention, the context of a block draft, and rows that attend without a store, those of
a frozen-KV draft, which reads the target's cache.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.checks_refusals import refused
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs, nearest
from attn_backends.conformance.compressed_worlds import BLOCK_LAYER
from attn_backends.conformance.exercise import (
    batch_of,
    bucket_of,
    fill,
    new_graph,
    prepare_memory,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.inputs import ForwardInputs
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import eager, graph, growing, idle, joined, padded, shrinking
from attn_backends.conformance.worlds import World
from attn_backends.layer import AttentionOutput
from attn_backends.planning.metadata import Metadata
from spec_metadata import Step, StepKind

KINDS = (StepKind.DRAFT_BLOCK, StepKind.DRAFT_EXTEND)
ANYTHING = 2**30  # what padded requests are said to have


def _store(world: World, meta: Metadata, given: ForwardInputs, counts: Tensor, num_rows: int) -> None:
    """Store the first rows of each request, and nothing else."""
    at = meta.keeping(counts, num_rows)
    assert at.kept is not None, "it says which rows"
    world.store(given.take(at.kept, at.kept[:0]), at)


def _counts(scene: Scene, case: Case) -> list[int]:
    """How many rows of each request are kept: none of one of the first two and all of the other, any of the others."""
    rng, least = Random(case.seed), [0, scene.width]
    first = least if case.seed % 2 else least[::-1]
    return [*first, *(rng.randint(0, scene.width) for _ in case.lens)][: len(case.lens)]


def _within(counts: list[int], bound: int) -> list[int]:
    """Counts whose last rows beyond a bound are left out."""
    return [max(min(count, bound - sum(counts[:i])), 0) for i, count in enumerate(counts)]


def _check(scene: Scene, before: Tensor, counts: list[int]) -> Measured:
    """The memory must be that of a scene with those rows alone."""
    kept, width = scene.rows[0], scene.width
    scene.rows = [[row for number, row in enumerate(kept) if number % width < counts[row.request]]]
    compare_memory(scene, before, padded=True)
    return Measured()


def _without_entries(subject: Subject) -> list[Case]:
    """Entries are made of all rows that a forward processes."""
    graphs = (graph(change, KINDS) for change in (growing, shrinking, padded, idle))
    return [case for case in joined(eager(KINDS), *graphs)(subject) if case.layer in ("", BLOCK_LAYER)]


@check("cache.keeps_first_rows", _without_entries)
def keeps_first_rows(subject: Subject, case: Case) -> Measured:
    """Stored without attention, the first rows of each request, as many as the device counts, go to their slots,
    packed. The others change nothing, nor do those beyond the bound, nor those of padding, whatever is counted of it.
    """
    world = world_of(setup_of(subject, case))
    if case.path == "eager":
        scene = scene_of(world, batch_of(case), case.seed)
        counts, before = _counts(scene, case), prepare_memory(scene, case)
        meta = world.backend.init_forward_metadata(scene.step())
        bound = sum(counts) - case.seed % 2
        _store(world, meta, scene.inputs()[0], _tensor(counts, case, world), bound)
        nothing = meta.keeping(_tensor([0] * len(counts), case, world), 1).kept
        assert nothing is not None, "it says which rows"
        compare_identical("rows where none is kept", nothing.cpu(), torch.zeros(1, dtype=torch.int64))
        return _check(scene, before, _within(counts, bound))
    captured = scene_of(world, batch_of(replace(case, lens=case.captured_lens)), case.seed)
    scene = scene_of(world, batch_of(case), case.seed + 1)
    before, meta = prepare_memory(scene, case), world.backend.capture(bucket_of(world, case), world.paging())
    counts, static = _counts(scene, case) if case.lens else [], captured.inputs(case.bs)
    given = _tensor([captured.width] * case.bs, case, world)
    recorded = new_graph(world.device)
    recorded.capture(lambda: _store(world, meta, static[0], given, case.bs * captured.width - 1))
    world.backend.replay(meta, scene.step())
    given.copy_(_tensor(counts + [ANYTHING] * (case.bs - len(counts)), case, world))
    if case.lens:
        fill(static, scene.inputs(case.bs))
    else:
        scene.rows = [[]]
    recorded.replay()
    return _check(scene, before, counts)


def _tensor(counts: list[int], case: Case, world: World) -> Tensor:
    return torch.tensor(counts, dtype=getattr(torch, case.index), device=world.device)


def _decodes(subject: Subject) -> list[Case]:
    kinds = (StepKind.DECODE,)
    return joined(eager(kinds), *(graph(change, kinds) for change in (growing, padded)))(subject)


@check("cache.reads_alone", _decodes)
def reads_alone(subject: Subject, case: Case) -> Measured:
    """A frozen draft, whose own token is committed already, attends without a store and changes no byte. All forwards
    share its metadata, branches of a request stand at one token, and a store is refused.
    """
    world = world_of(replace(setup_of(subject, case), checking=True))
    if case.path == "eager":
        scene = _branched(scene_of(world, batch_of(case), case.seed))
        meta, inputs = world.backend.init_forward_metadata(_frozen(scene)), scene.inputs()
        before, at = _filled(scene, case), meta.at()
        found = [world.attend(inputs[0], meta.reading()) for _ in range(2)]
    else:
        captured = _branched(scene_of(world, batch_of(replace(case, lens=case.captured_lens)), case.seed))
        bs = world.capacity.max_bs
        meta = world.backend.capture(bucket_of(world, replace(case, bs=bs)), world.paging())
        inputs, at = captured.inputs(bs), meta.reading()
        if world.backend.kernel_of(StepKind.DECODE).schedule is not None:
            world.attend(inputs[0], at)  # a vendor's schedules are made by the first forward
        recorded = new_graph(world.device)
        found = recorded.capture(lambda: [world.attend(inputs[0], meta.reading()) for _ in range(2)])
        scene = _branched(scene_of(world, batch_of(case), case.seed + 1))
        world.backend.replay(meta, _frozen(scene))
        fill(inputs, scene.inputs(bs))
        before = _filled(scene, case)
        recorded.replay()
        found = [AttentionOutput(out.clone(), lse.clone()) for out, lse in found]
    compare_identical("cache", world.memory, before)
    refused("a store of rows that read alone", scene, lambda: world.store(inputs[0], at))
    return nearest([compare_outputs(scene, inputs, [output]) for output in found])


def _frozen(scene: Scene) -> Step:
    """A step that writes nothing, as the scene's would."""
    step = scene.step()
    return Step.frozen_draft(step.seq_lens, step.paging, seq_lens_cpu=step.seq_lens_cpu)


def _branched(scene: Scene) -> Scene:
    """Two rows for each request, as far as a step has room."""
    return scene.select(sorted([*range(len(scene.requests))] * 2)[: scene.world.capacity.max_bs])[0]


def _filled(scene: Scene, case: Case) -> Tensor:
    """Memory in which the rows' own tokens are committed. Returns a copy."""
    scene.world.memory.copy_(scene.expected_memory(prepare_memory(scene, case)))
    return scene.world.memory.clone()
