"""Checks of a worker between steps: it drafts a tree, accepts a path of it, and moves the accepted KV.

The laws (`worker_laws`) hold for any implementation of acceptance, beams and compaction.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from itertools import product
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_backends.conformance.cases import CACHE_DTYPES, Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical, why_invalid
from attn_backends.conformance.exercise import batch_of, new_graph, prepare_memory, scene_of, setup_of, world_of
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import eager, situations
from attn_backends.conformance.sizes import size_of
from attn_backends.conformance.worker_laws import (
    VOCAB,
    Draft,
    check_acceptance,
    check_tree,
    check_widths,
    draw_choices,
    draw_tree,
    grow,
    grown_again,
    token_ids,
    walked,
)
from attn_backends.conformance.worlds import World, capacity_of
from spec_metadata import Acceptance, DraftTree, StepKind, accept, compaction_moves, confident_widths

NUM_REQUESTS = 16
TOPKS = (1, 2, 4, 8)
DRAFTED = {"steps5": TOPKS, "steps17": (1,), "steps8.nodes29": (2,)}
"""Numbers of branches by the size of a world: also a long chain, and a tree of eight levels."""
Fields = TypeVar("Fields", DraftTree, Acceptance)
LEVELS = (None, 1, 2, 3)  # of log-probabilities of a request's draft


def _drafted(subject: Subject) -> list[Case]:
    """A verify of each number of branches and size."""
    verifies = (situations(subject, StepKind.TARGET_VERIFY, topks, size) for size, topks in DRAFTED.items())
    return list({(case.size, case.topk): case for cases in verifies for case in reversed(cases)}.values())


@check("worker.accepts", _drafted)
def accepts(subject: Subject, case: Case) -> Measured:
    """`accept` takes the path along the target's own choices, and then its next token: what a walk over lists takes,
    eagerly and by a graph that was captured on other trees.
    """
    capacity, rng = capacity_of(case.page_size, case.topk, case.size), Random(case.seed)
    num_nodes, max_depth = capacity.num_draft_tokens, capacity.num_steps
    on_lists = [draw_tree(rng, NUM_REQUESTS, num_nodes, max_depth, case.topk) for _ in range(2)]
    choices = [draw_choices(rng, tree).to(subject.device) for tree in on_lists]
    drawn = [_on(tree, torch.device(subject.device)) for tree in on_lists]
    for tree, chosen in zip(drawn, choices, strict=True):
        check_acceptance(accept(tree, chosen, capacity.max_accepted), tree, chosen)
    graph = new_graph(torch.device(subject.device))
    got = graph.capture(lambda: accept(drawn[0], choices[0], capacity.max_accepted))
    _copy(drawn[0], drawn[1])
    choices[0].copy_(choices[1])
    graph.replay()
    check_acceptance(got, drawn[1], choices[1])
    return Measured()


@check("worker.beams", _drafted)
def beams(subject: Subject, case: Case) -> Measured:
    """`DraftBeams` keep the best children of each level, and their tree the best of all nodes, by cumulative scores and
    under their parents, with ties and without: as EAGLE-2 on lists does. A graph gives the same.
    """
    capacity, device = capacity_of(case.page_size, case.topk, case.size), torch.device(subject.device)
    roots, num_nodes = token_ids(torch.arange(len(LEVELS), device=device) + VOCAB), capacity.num_draft_tokens
    growths = []
    for turn in range(2):
        drafts = [Draft(case.topk, levels, case.seed + 10 * turn + i) for i, levels in enumerate(LEVELS)]
        growths.append(grow(drafts, capacity.num_steps, device))
        tree = growths[-1].beams.tree(roots, num_nodes)
        check_tree(tree, roots, drafts, growths[-1])
    given, other = (growth.given for growth in growths)
    graph = new_graph(device)
    replayed = graph.capture(lambda: grown_again(given).tree(roots, num_nodes))
    for static, level in zip(given, other, strict=True):
        for destination, source in zip(static, level, strict=True):
            destination.copy_(source)
    graph.replay()
    check_tree(replayed, roots, drafts, growths[-1])
    return Measured()


@check("worker.widths", lambda subject: [case for case in _drafted(subject) if case.topk == 1])
def widths(subject: Subject, case: Case) -> Measured:
    """`confident_widths` cuts chains by what their drafts think of them: what is below the threshold, and over the
    bound the least probable, with ties and paths that are impossible. A graph that was captured on others does so, too.
    Scores that are no matrix of floats are refused, and thresholds that are no probability.
    """
    steps, generator = size_of(case.size).num_steps, torch.Generator().manual_seed(case.seed)
    drawn = torch.randint(3, (2, NUM_REQUESTS, steps), generator=generator).mul(-0.5).cumsum(-1).to(subject.device)
    drawn[:, ::4, -1] = torch.nan
    num_real = NUM_REQUESTS - 2
    real = torch.arange(NUM_REQUESTS, device=drawn.device) < num_real
    for threshold, drafted in product((0.0, 0.25, 1.0), (3, num_real, num_real * steps)):  # as many fit the bound
        scores, given = drawn[0].clone(), (threshold, num_real + drafted)
        check_widths(confident_widths(scores, *given, real), scores, *given, num_real)
        graph = new_graph(drawn.device)
        got = graph.capture(partial(confident_widths, scores, *given, real))
        scores.copy_(drawn[1])
        graph.replay()
        check_widths(got, scores, *given, num_real)
    wrong: Any = ((drawn[0].long(), 0), (drawn[0, 0], 0), (drawn.tolist(), 0), (drawn[0], 1.5), (drawn[0], "1"))
    calls = [partial(confident_widths, one, limit, NUM_REQUESTS * steps, real) for one, limit in wrong]
    return Measured(refusal=[why_invalid("scores or a threshold", call) for call in calls][-1])


def _copy(static: Fields, other: Fields) -> None:
    """Make what a graph reads another."""
    for field in fields(static):
        getattr(static, field.name).copy_(getattr(other, field.name))


def _on(given: Fields, device: torch.device) -> Fields:
    """A copy on the device."""
    return type(given)(*(getattr(given, field.name).to(device, copy=True) for field in fields(given)))


def _verifies(subject: Subject) -> list[Case]:
    """A verify of every page size and dense format."""
    return [case for case in eager((StepKind.TARGET_VERIFY,), poison="finite")(subject) if not case.layer]


@check("worker.compacts", _verifies)
def compacts(subject: Subject, case: Case) -> Measured:
    """The moves of `compaction_moves` bring accepted tokens to the table's slots after the committed ones,
    from wherever they were written, eagerly and by a graph that was captured on other paths. Nothing else
    changes.
    """
    world, rng = world_of(setup_of(subject, case)), Random(case.seed)
    scene = scene_of(world, batch_of(case), case.seed)
    tree = _tree_of(scene)
    accepted = [walked(tree, draw_choices(rng, tree), scene.width) for _ in range(2)]
    _compact(scene, case, *accepted)
    _shuffle_drafts(scene, rng)
    _compact(scene, case, *accepted)
    return Measured()


def _compact(scene: Scene, case: Case, captured: Acceptance, replayed: Acceptance) -> None:
    """Move what was accepted, eagerly and by a graph that was captured on another acceptance."""
    world = scene.world
    before, step = _after_a_verify(scene, case), scene.step()
    static, other = (_on(each, world.device) for each in (captured, replayed))
    world.cache.move(*compaction_moves(static, step))
    _compare_moved(world, case, before, *_expected_moves(scene, captured))
    graph = new_graph(world.device)
    graph.capture(lambda: world.cache.move(*compaction_moves(static, step)))
    world.memory.copy_(before)
    _copy(static, other)
    graph.replay()
    _compare_moved(world, case, before, *_expected_moves(scene, replayed))


def _tree_of(scene: Scene) -> DraftTree:
    """What a scene verifies. No two nodes hold the same token."""
    width = scene.width
    chain = [max(node - 1, 0) for node in range(width)]
    parents = [[path[-2] if len(path) > 1 else 0 for path in paths[0]] if paths else chain for paths in scene.paths]
    return DraftTree.from_parents(torch.arange(width).expand(len(parents), -1), torch.tensor(parents), width)


def _shuffle_drafts(scene: Scene, rng: Random) -> None:
    """Give drafted tokens each other's slots, whatever request they are of."""
    slots = scene.write_order()
    rng.shuffle(slots)
    for request in scene.requests:
        for name in list(request.slots)[request.length :]:
            request.slots[name] = slots.pop()


def _after_a_verify(scene: Scene, case: Case) -> Tensor:
    """Memory with the drafted tokens in it. Returns a copy."""
    prepare_memory(scene, case)
    for request in scene.requests:
        drafted = list(request.slots)[request.length :]
        slots = torch.tensor([request.slots[name] for name in drafted])
        scene.world.write(scene.world.memory, slots, torch.stack([request.vectors[name] for name in drafted]))
    return scene.world.memory.clone()


def _expected_moves(scene: Scene, accepted: Acceptance) -> tuple[list[int], list[int]]:
    """(sources, destinations) of the accepted nodes alone."""
    sources, destinations, page_size = list[int](), list[int](), scene.world.geometry.page_size
    for i, (request, row) in enumerate(zip(scene.requests, scene.table_rows, strict=True)):
        written, pages = list(request.slots.values())[request.length :], scene.pages[row].tolist()
        for depth in range(int(accepted.num_accepted[i])):
            position = request.length + depth
            sources.append(written[int(accepted.path[i, depth])])
            destinations.append(pages[position // page_size] * page_size + position % page_size)
    return sources, destinations


def _dense(subject: Subject) -> list[Case]:
    """Those, and one of every declared type of an 8-bit cache."""
    found, kind = _verifies(subject), StepKind.TARGET_VERIFY
    declared = subject.capabilities[kind].cache_dtypes if found else ()
    eight_bit = [name for name, dtype in CACHE_DTYPES.items() if dtype in declared]
    return found + [replace(case, cache_dtype=name) for case in found if not case.cache_dtype for name in eight_bit]


@check("worker.moves", _dense)
def moves(subject: Subject, case: Case) -> Measured:
    """`cache.move` copies whole tokens, keys and values alike, inside pages and across them, as if all were read before
    any is written: onto each other's places too. Nothing else changes.
    """
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    before = prepare_memory(scene, case)
    slots = [slot for request in scene.requests for slot in request.slots.values()]
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(case.seed)).tolist()
    destinations = [slots[place] for place in order]
    world.cache.move(*(torch.tensor(each, device=world.device) for each in (slots, destinations)))
    _compare_moved(world, case, before, slots, destinations)
    return Measured()


def _compare_moved(world: World, case: Case, before: Tensor, sources: list[int], destinations: list[int]) -> None:
    """The memory is what it was before, with what sources held in destinations, to the byte."""
    tokens = before.flatten(0, 1).contiguous().view(torch.uint8)
    expected = tokens.clone()
    expected[destinations] = tokens[sources]
    planes = 2 if case.format == "kv" else 1
    actual = world.memory.flatten(0, 1).view(torch.uint8)
    compare_identical("cache", actual[:, :planes], expected[:, :planes])
