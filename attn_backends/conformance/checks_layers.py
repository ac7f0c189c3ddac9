"""Several layers in one step: of other windows, scales and heads on its metadata, and in other groups of caches."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.checks_bound import BoundGraph, bindable
from attn_backends.conformance.checks_math import packed_extend, prompts
from attn_backends.conformance.comparisons import compare_memory, compare_outputs, nearest
from attn_backends.conformance.compressed_worlds import is_compressed
from attn_backends.conformance.exercise import (
    Captured,
    Ran,
    batch_of,
    fill,
    new_graph,
    prepare_memory,
    run_forward,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.inputs import ForwardInputs
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import Cases, any_graph, eager, joined, one_page_size
from attn_backends.conformance.worlds import World, with_extra
from attn_backends.layer import AttentionOutput
from attn_backends.planning.metadata import Metadata
from spec_metadata import StepKind

WINDOW = 5


def _dense(cases: Cases) -> Cases:
    """The cases of plain layers; those of compressed ones have a check of their own."""
    return lambda subject: [] if is_compressed(subject.backend) else cases(subject)


def _worlds(subject: Subject, case: Case) -> list[World]:
    """Worlds of one layer each over one backend: with a window where that is declared, plain, of half the scale and
    with scaled keys and values where these are declared, and of more heads where any number is declared. Each has a
    cache of its own.
    """
    worlds = [world_of(setup_of(subject, case)) for _ in range(4)]
    windowed, plain, flat, headed = worlds
    declared = subject.capabilities[StepKind(case.kind)]
    if declared.window and (case.topk == 1 or declared.tree_window):
        windowed.layer = with_extra(windowed.layer, f"window={WINDOW}", windowed.setup)
    flat.layer = replace(flat.layer, scale=flat.layer.scale / 2)
    if declared.kv_scales:
        flat.layer = with_extra(flat.layer, "kv_scales", flat.setup)
    if declared.query_heads is None:
        headed.layer = replace(headed.layer, num_heads=2 * headed.layer.num_heads)
    for number, world in enumerate(worlds):
        world.backend, world.layer = plain.backend, replace(world.layer, id=number)
    return worlds


def _scenes(worlds: list[World], case: Case, seed: int) -> list[Scene]:
    """A batch on the same pages of each world, whose caches hold what their layers may see."""
    scenes = [scene_of(world, batch_of(case), seed) for world in worlds]
    for scene in scenes:
        prepare_memory(scene, case)
    return scenes


def _forwards(
    worlds: list[World], metas: list[Metadata], inputs: list[list[ForwardInputs]]
) -> list[list[AttentionOutput]]:
    """What each layer gives, forward after forward, as a model runs: all layers of one before the next."""
    found: list[list[AttentionOutput]] = [[] for _ in worlds]
    for forward in range(len(inputs[0])):
        for layer, world in enumerate(worlds):
            found[layer].append(run_forward(world, metas[layer], forward, inputs[layer][forward]))
    return found


def _compared(ran: list[Ran], *, padded: bool = False) -> Measured:
    for each in ran:
        compare_memory(each.scene, each.before, padded=padded)
    return nearest([compare_outputs(each.scene, each.inputs, each.outputs) for each in ran])


def _every_kind(subject: Subject) -> list[Case]:
    """Every kind at one page size, eagerly."""
    found = one_page_size(joined(eager(), prompts, packed_extend))(subject)
    return [case for case in found if case.path == "eager"]


@check("api.layers_of_one_step", _dense(_every_kind))
def layers_of_one_step(subject: Subject, case: Case) -> Measured:
    """Layers of other windows, scales and numbers of heads share a step's metadata and don't disturb each other, also
    where each of them attends again after the others.
    """
    worlds = _worlds(subject, case)
    scenes = _scenes(worlds, case, case.seed)
    before = [scene.world.memory.clone() for scene in scenes]
    inputs = [scene.inputs() for scene in scenes]
    meta = worlds[0].backend.init_forward_metadata(scenes[0].step())
    found = []
    for _ in range(2):
        outputs = _forwards(worlds, [meta] * len(worlds), inputs)
        found.append(_compared([Ran(*each, meta) for each in zip(scenes, inputs, outputs, before, strict=True)]))
    return nearest(found)


@check("graph.layers_of_one_step", _dense(one_page_size(any_graph())))
def captured_layers_of_one_step(subject: Subject, case: Case) -> Measured:
    """A replay plans for all layers of a graph, also where they differ in window, scales and number of heads."""
    worlds = _worlds(subject, case)
    captured = Captured(worlds[0], case)
    batch = replace(case, lens=case.captured_lens, widths=case.captured_widths)
    metas = [captured.meta] * len(worlds)
    static = [scene.inputs(case.bs, case.num_tokens) for scene in _scenes(worlds, batch, case.seed)]
    captured.plan(scene_of(worlds[0], batch_of(batch), case.seed).step())
    _forwards(worlds, metas, static)  # a vendor's schedules are made by the first forward, which a graph may not hold
    graph = new_graph(worlds[0].device)
    outputs = graph.capture(lambda: _forwards(worlds, metas, static))
    scenes = _scenes(worlds, case, case.seed + 1)
    before = [scene.world.memory.clone() for scene in scenes]
    for given, scene in zip(static, scenes, strict=True):
        fill(given, scene.inputs(case.bs, case.num_tokens))
    captured.plan(scenes[0].step())
    graph.replay()
    return _compared(
        [Ran(*each, captured.meta) for each in zip(scenes, static, outputs, before, strict=True)], padded=True
    )


def _groups(subject: Subject, case: Case) -> list[World]:
    """Worlds of two groups over one backend, each with a table and a cache of its own; the second one's layers have a
    window where that is declared.
    """
    full, windowed = (world_of(setup_of(subject, case)) for _ in range(2))
    declared = subject.capabilities[StepKind(case.kind)]
    if declared.window and not is_compressed(subject.backend) and (case.topk == 1 or declared.tree_window):
        windowed.layer = with_extra(windowed.layer, f"window={WINDOW}", windowed.setup)
    windowed.backend, windowed.layer = full.backend, replace(windowed.layer, id=1)
    return [full, windowed]


def _scenes_of_groups(worlds: list[World], case: Case, seed: int) -> list[Scene]:
    """A batch, on other pages in each group."""
    return [scene_of(world, batch_of(case), seed, seed + group) for group, world in enumerate(worlds)]


@check("api.cache_groups", _every_kind)
def cache_groups(subject: Subject, case: Case) -> Measured:
    """Two groups of layers, the second windowed where that is declared, have caches with pages of their own. The step
    is planned once for each, both before any forward, and their layers run in turn.
    """
    worlds = _groups(subject, case)
    scenes = _scenes_of_groups(worlds, case, case.seed)
    metas = [scene.world.backend.init_forward_metadata(scene.step()) for scene in scenes]
    before = [prepare_memory(scene, case) for scene in scenes]
    inputs = [scene.inputs() for scene in scenes]
    outputs = _forwards(worlds, metas, inputs)
    return _compared([Ran(*each) for each in zip(scenes, inputs, outputs, before, metas, strict=True)])


def _read_in_place(subject: Subject) -> list[Case]:
    """Tables of slots, and page tables that an engine has bound. Those that are copied are copied once for a phase of a
    backend: each group has a backend of its own.
    """
    slots = [case for case in _dense(one_page_size(any_graph()))(subject) if case.table == "request"]
    return slots + [case for case in _dense(one_page_size(bindable))(subject) if case.table == "block" and case.lens]


@check("graph.cache_groups", _read_in_place)
def captured_cache_groups(subject: Subject, case: Case) -> Measured:
    """The layers of both groups are in one graph, and a replay plans for each on its own table, one after the other.
    Where tables are bound, the graph plans for both.
    """
    worlds = _groups(subject, case)
    groups = [(BoundGraph if case.table == "block" else Captured)(world, case) for world in worlds]
    metas, static = [group.meta for group in groups], [group.static for group in groups]

    def region() -> list[list[AttentionOutput]]:
        for meta in metas if case.refresh else ():
            worlds[0].backend.refresh(meta)
        return _forwards(worlds, metas, static)

    graph = new_graph(worlds[0].device)
    outputs = graph.capture(region)
    scenes = _scenes_of_groups(worlds, case, case.seed + 1)
    before = [prepare_memory(scene, case) for scene in scenes]
    for group, scene in zip(groups, scenes, strict=True):
        group.load(scene)
    graph.replay()
    return _compared([Ran(*each) for each in zip(scenes, static, outputs, before, metas, strict=True)], padded=True)
