"""Checks of compressed keys alone: rollbacks, states, blocks and their edges, and layers of several kinds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from attn_backends.conformance.cases import CACHE_DTYPES, Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs, nearest
from attn_backends.conformance.compressed_scenes import CompressedScene
from attn_backends.conformance.compressed_worlds import (
    LAYERS,
    REAL_PAGE,
    SHORT_LAYERS,
    CompressedWorld,
    is_compressed,
)
from attn_backends.conformance.exercise import (
    Captured,
    Ran,
    batch_of,
    fill,
    new_graph,
    prepare_memory,
    run_case,
    run_forward,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.inputs import ForwardInputs
from attn_backends.conformance.requests import Batch
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import (
    Cases,
    around_pages,
    eager,
    graphable,
    in_every_dtype,
    joined,
    one_page_size,
    situations,
)
from attn_backends.conformance.sizes import MAX_BS, NUM_STEPS
from attn_backends.conformance.worlds import World
from attn_backends.layer import AttentionOutput
from attn_backends.planning.metadata import Metadata
from spec_metadata import StepKind

VERIFY, EXTEND, DRAFT = StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND, StepKind.DRAFT_DECODE
WIDTH = NUM_STEPS + 1  # of a verify and of a draft extend
LONG_DRAFT = "steps5.nodes2"  # four forwards of a draft, two rows of a verify
LISTS = ("state_", "input_rows", "entry_slots", "num_entries", "window_")  # of plans, each of one ratio
SHORT_PAGE = 4  # tokens of a page that keeps the states of all of them
CYCLES = 8
MANY = 512  # entries that DeepSeek-V4's indexer selects, more than these requests have room for
CHUNKS = ((1, 3), (2, 1), (1, 4), (3, 1), (1, 7), (8, 2), (9, 3), (1, 6))  # prompt tokens of two requests


def _compressed(cases: Cases) -> Cases:
    """The cases, of a backend with compressed keys."""
    return lambda subject: cases(subject) if is_compressed(subject.backend) else []


def _both_paths(kind: StepKind, **changes: Any) -> Cases:
    """Situations of a kind with some lengths, eagerly and through graphs that are captured on others."""

    def cases(subject: Subject) -> list[Case]:
        found = [replace(case, **changes) for case in situations(subject, kind, topks=(1,))]
        captured = [replace(case, path="graph", captured_lens=(5, 1), bs=len(case.lens)) for case in found]
        return found + (captured if graphable(subject, kind) else [])

    return cases


class Life:
    """Requests that live through many steps on one cache, in which nothing is ever written but by those steps."""

    def __init__(self, subject: Subject, case: Case, first: Batch, kinds: tuple[StepKind, ...] = ()) -> None:
        """kinds: those that run through graphs, if the case does."""
        world = world_of(setup_of(subject, case))
        assert isinstance(world, CompressedWorld)
        self.world, self.graphs = world, {}
        if case.path == "graph":
            self.graphs = {kind: Captured(world, replace(case, kind=str(kind))) for kind in kinds}
        self.scene = CompressedScene(world, first, case.seed, room=world.table.shape[1])
        prepare_memory(self.scene, case)
        self.found: list[Measured] = []

    def go_on(self, kind: StepKind, accepted: tuple[int, ...], widths: tuple[int, ...] = ()) -> None:
        """Commit tokens of the last step, as far as it has them, then run another, whose tokens are others."""
        accepted = tuple(min(number, width) for number, width in zip(accepted, self.scene.widths, strict=True))
        self.scene = self.scene.continued(kind, accepted, widths)
        self.run()

    def run(self) -> None:
        """Run the step of the scene; every row and every byte of the cache is checked."""
        scene, before = self.scene, self.world.memory.clone()
        if scene.batch.kind in self.graphs:
            captured = self.graphs[scene.batch.kind]
            captured.load(scene)
            ran = captured.replay(scene, before)
        else:
            meta, inputs = self.world.backend.init_forward_metadata(scene.step()), scene.inputs()
            ran = Ran(scene, inputs, run_forwards(self.world, meta, inputs), before, meta)
        compare_memory(scene, before, padded=bool(self.graphs))
        for forward, rows in enumerate(scene.rows):
            _check_lists(ran.meta, forward, len(rows))
        self.found.append(compare_outputs(scene, ran.inputs, ran.outputs))

    def fits(self, tokens: int) -> bool:
        """Whether all requests can commit so many more tokens and draft after them."""
        return max(self.scene.batch.lens) + tokens + WIDTH <= self.world.table.shape[1]


def _check_lists(meta: Metadata, forward: int, num_rows: int) -> None:
    """What a plan of `spec_metadata.plans.compressed` lists: each token of an entry once, each state by one row, and
    nothing right behind the tokens and entries that a row sees.
    """
    if "window_lens" not in meta.buffers:
        return  # a plan of another form
    planned = {name: tensor[forward] for name, tensor in meta.buffers.items() if name.startswith(LISTS)}
    pairs = [("window_slots", "window_lens")]
    for ratio in (name.removeprefix("input_rows_") for name in planned if name.startswith("input_rows")):
        if ((planned[f"input_rows_{ratio}"] >= 0) & (planned[f"state_reads_{ratio}"] >= 0)).any():
            raise CheckFailure(f"state_reads_{ratio}", "a token of this forward, which is an input row")
        states = planned[f"state_writes_{ratio}"][:num_rows]
        if (states[states >= 0].unique(return_counts=True)[1] > 1).any():
            raise CheckFailure(f"state_writes_{ratio}", "two rows write one state", None, "", str(states.tolist()))
        pairs += [(f"entry_slots_{ratio}", f"num_entries_{ratio}")] if f"entry_slots_{ratio}" in planned else []
    for slots, num in pairs:
        behind = torch.arange(planned[slots].shape[1], device=meta.step.device) == planned[num].unsqueeze(1)
        if (planned[slots][behind] != -1).any():
            raise CheckFailure(slots, "one more than a row sees", None, "-1")


def _accepted(cycle: int) -> tuple[int, int, int]:
    """Tokens of a cycle that commit: the bonus token alone, any number, and half of them."""
    return 1, (1, 4, 2, 3, 1, 4)[cycle % 6], 2


def _near_edges(case: Case) -> Case:
    """Three requests that will cross blocks, and a page's edge."""
    edge = around_pages(case)[0]
    return replace(case, lens=tuple(max(edge - before, 1) for before in (4, 7, 11)))


def _lives(kind: StepKind) -> Cases:
    found = _both_paths(kind, poison="nan")

    def cases(subject: Subject) -> list[Case]:
        middle, any_page = one_page_size(found)(subject), subject.capabilities[kind].page_sizes is None
        short = [replace(case, page_size=SHORT_PAGE) for case in middle if any_page]
        edges = [replace(_near_edges(case), bs=3 if case.path == "graph" else 0) for case in found(subject) + short]
        real = [replace(case, page_size=REAL_PAGE, bs=3 if case.bs else 0) for case in middle]
        return edges + [replace(case, lens=(250, 121, 378)) for case in real]

    return _compressed(cases)


def _typed_lives(subject: Subject) -> list[Case]:
    """In every type of queries, and over 8-bit pages."""
    lives = _lives(VERIFY)(subject)
    plain = [case for case in one_page_size(lambda _: lives)(subject) if case.path == "eager" and not case.cache_dtype]
    if not plain:
        return lives
    typed, declared = in_every_dtype(lambda _: plain)(subject), subject.capabilities[VERIFY].cache_dtypes
    for name in (name for name, dtype in CACHE_DTYPES.items() if dtype in declared):
        typed += [replace(case, dtype="bfloat16", cache_dtype=name) for case in plain]
    return lives + typed


@check("compressed.rollback", _compressed(_typed_lives))
def rollback(subject: Subject, case: Case) -> Measured:
    """After a verify, rejected tokens are forgotten by nothing but the committed length, over several blocks."""
    life = Life(subject, case, Batch(VERIFY, case.lens), (VERIFY,))
    life.run()
    for cycle in range(CYCLES):
        if life.fits(WIDTH):
            life.go_on(VERIFY, _accepted(cycle))
    return nearest(life.found)


def _long_drafts(subject: Subject) -> list[Case]:
    """Drafts of more forwards than a verify has rows, of which the states of a rejected forward are more than usual."""
    return [replace(case, size=LONG_DRAFT) for case in one_page_size(_lives(EXTEND))(subject) if not case.size]


@check("compressed.draft_and_extend", joined(_lives(EXTEND), _long_drafts))
def draft_and_extend(subject: Subject, case: Case) -> Measured:
    """A draft extend rewrites all that the draft loop before it left, and what of its own rows is rejected."""
    life = Life(subject, case, Batch(DRAFT, case.lens), (DRAFT, EXTEND))
    life.run()
    for cycle in range(CYCLES // 2):
        life.go_on(EXTEND, (0, 0, 0))
        if life.fits(WIDTH):
            life.go_on(DRAFT, _accepted(cycle))
    return nearest(life.found)


@check("compressed.chunks", _compressed(one_page_size(eager((StepKind.PREFILL,), lens=(0, 0), widths=CHUNKS[0]))))
def chunks(subject: Subject, case: Case) -> Measured:
    """A prompt in chunks that end in, at and beside blocks, shorter and longer than the states that are kept."""
    life = Life(subject, case, Batch(StepKind.PREFILL, case.lens, case.widths))
    life.run()
    for before, widths in pairwise(CHUNKS):
        life.go_on(StepKind.PREFILL, before, widths)
    life.go_on(StepKind.DECODE, CHUNKS[-1])
    life.go_on(VERIFY, (1, 1))
    return nearest(life.found)


def _measure(subject: Subject, case: Case) -> Measured:
    ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


def _edges(subject: Subject) -> list[Case]:
    """Lengths below one block, and on both sides of edges of blocks, windows and pages."""
    lens = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (13, 14, 15))
    kinds = (StepKind.DECODE, DRAFT, VERIFY, EXTEND)
    found = [case for case in one_page_size(eager(kinds))(subject) if case.topk == 1]
    cases = [replace(case, lens=each) for case in found for each in lens]
    return cases + [replace(case, lens=(0, 0, 1)) for case in found if case.kind == VERIFY]


@check("compressed.edges", _compressed(_edges))
def edges(subject: Subject, case: Case) -> Measured:
    """The row that closes a block makes its entry and sees it, whatever the length: also one without any entry."""
    return _measure(subject, case)


def _real(subject: Subject) -> list[Case]:
    """Every kind at the backend's own window and ratios, on both sides of their edges."""
    cases = []
    for kind, lens in ((StepKind.DECODE, (127, 383, 130)), (DRAFT, (126, 254, 3)), (VERIFY, (125, 255, 380)),
                       (EXTEND, (126, 381, 1))):  # fmt: skip
        cases += _both_paths(kind, page_size=REAL_PAGE, lens=lens)(subject)
    prompts = [
        replace(case, page_size=REAL_PAGE, lens=(0, 126, 255), widths=(131, 4, 2))
        for case in situations(subject, StepKind.PREFILL)
    ]
    return [*{case.layer + case.kind + case.path: case for case in cases + prompts}.values()]


@check("compressed.real_sizes", _compressed(_real))
def real_sizes(subject: Subject, case: Case) -> Measured:
    """The backend's own window and ratios, which other cases run with smaller ones."""
    return _measure(subject, case)


def _short(subject: Subject) -> list[Case]:
    """Every kind on entries of one and of two tokens, at and beside the edges of blocks and pages."""
    kinds = (StepKind.DECODE, DRAFT, VERIFY, EXTEND)
    found = [case for kind in kinds for case in one_page_size(_both_paths(kind))(subject)]
    found += [case for case in _edges(subject) if case.lens in ((1, 2, 3), (7, 8, 9))]
    prompts = one_page_size(eager((StepKind.PREFILL,), lens=(0, 5, 126), widths=(9, 2, 4)))(subject)
    found += [case for case in prompts if case.path == "eager"]
    return [replace(case, layer=layer) for layer in SHORT_LAYERS for case in found if case.layer == "selected"]


@check("compressed.short_blocks", _compressed(_short))
def short_blocks(subject: Subject, case: Case) -> Measured:
    """Entries of one token, which is never left open, and of two, as DeepSeek-V4.1 has them."""
    return _measure(subject, case)


def _open_blocks(subject: Subject) -> list[Case]:
    cases = one_page_size(_both_paths(StepKind.DECODE, lens=(4, 8, 16)))(subject)
    return [replace(case, bs=MAX_BS if case.bs else 0) for case in cases if case.layer != "window"]


@check("compressed.no_block_closes", _compressed(_open_blocks), fixed_lens=True)
def no_block_closes(subject: Subject, case: Case) -> Measured:
    """A step that closes no block writes no entry: not in the first slot, the last, or the reserved page."""
    ran = run_case(subject, case)
    assert isinstance(ran.scene, CompressedScene)
    before, after = (ran.scene.world.pools(memory) for memory in (ran.before, ran.scene.world.memory))
    for name in (name for name in after if name.endswith("entries")):
        compare_identical(name, after[name], before[name])
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


def _mixed(subject: Subject) -> list[Case]:
    kinds = (StepKind.DECODE, DRAFT, VERIFY, EXTEND)
    cases = [case for kind in kinds for case in one_page_size(_both_paths(kind, lens=(17, 6, 11)))(subject)]
    return [replace(case, layer="", table="request") for case in cases if case.layer == LAYERS[0]]


@check("compressed.layers_of_one_model", _compressed(_mixed))
def layers_of_one_model(subject: Subject, case: Case) -> Measured:
    """Layers of all kinds share a step's metadata and don't disturb each other: also one that selects more entries than
    a request has.
    """
    setup = setup_of(subject, case)
    worlds = [world_of(replace(setup, layer=layer)) for layer in (*LAYERS, "selected")]
    last = worlds[-1]
    assert isinstance(last, CompressedWorld)
    last.layer = replace(last.layer, index_topk=MANY)
    return measure_together(worlds, case)


def measure_together(worlds: list[World], case: Case) -> Measured:
    """Hold layers of one model, a world of one backend class each, to the oracle on one step's metadata."""
    kind, backend = StepKind(case.kind), worlds[0].backend
    for world in worlds:
        world.backend = backend
    if case.path == "graph":
        captured = _scenes(worlds, Batch(kind, case.captured_lens), case.seed + 10)
        meta = backend.capture(worlds[0].capacity.bucket(kind, case.bs), worlds[0].paging())
        backend.replay(meta, captured[0].step())
        inputs, graph = [scene.inputs(case.bs) for scene in captured], new_graph(worlds[0].device)
        outputs = graph.capture(lambda: _run_layers(worlds, meta, inputs))
    scenes = _scenes(worlds, batch_of(case), case.seed)
    before = [prepare_memory(scene, case) for scene in scenes]
    if case.path == "graph":
        for static, scene in zip(inputs, scenes, strict=True):
            fill(static, scene.inputs(case.bs))
        backend.replay(meta, scenes[0].step())
        graph.replay()
    else:
        inputs = [scene.inputs() for scene in scenes]
        outputs = _run_layers(worlds, backend.init_forward_metadata(scenes[0].step()), inputs)
    found = []
    for scene, given, memory, out in zip(scenes, inputs, before, outputs, strict=True):
        compare_memory(scene, memory, padded=case.path == "graph")
        found.append(compare_outputs(scene, given, out))
    return nearest(found)


def _scenes(worlds: list[World], batch: Batch, seed: int) -> list[Scene]:
    """A batch in the same pages of each world; its tokens give every layer something else."""
    return [scene_of(world, batch, seed + layer, placement=seed) for layer, world in enumerate(worlds)]


def _run_layers(worlds: list[World], meta: Metadata, inputs: list[list[ForwardInputs]]) -> list[list[AttentionOutput]]:
    """Outputs of each world and forward, a forward of all of them after another."""
    forwards = [
        [run_forward(world, meta, forward, given[forward]) for world, given in zip(worlds, inputs, strict=True)]
        for forward in range(len(inputs[0]))
    ]
    return [list(outputs) for outputs in zip(*forwards, strict=True)]
