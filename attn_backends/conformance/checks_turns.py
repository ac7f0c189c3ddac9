"""Several steps on one backend: kinds and graphs in turn, refused steps between them, metadata of another instance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.checks_refusals import refused
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs, nearest
from attn_backends.conformance.exercise import (
    Captured,
    Ran,
    batch_of,
    check_refuses_others,
    prepare_memory,
    run_case_eagerly,
    run_case_through_graph,
    run_forward,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.inputs import strided
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import (
    CHAIN_KINDS,
    Cases,
    any_graph,
    around_pages,
    eager,
    graph,
    graphable,
    growing,
    in_rows,
    is_declared,
    one_page_size,
)
from attn_backends.conformance.worlds import World, capacity_of
from attn_backends.errors import AttnBackendsError, BackendUnavailableError
from spec_metadata import BlockTable, InvalidStepError, StepKind
from spec_metadata.capacity import UNIFORM_KINDS

KINDS = (StepKind.PREFILL, *UNIFORM_KINDS)


def _runs(subject: Subject, case: Case, kind: StepKind) -> bool:
    """Whether a step of a kind is declared in a case's world."""
    declared = subject.capabilities.get(kind)
    if declared is None or (declared.page_sizes is not None and case.page_size not in declared.page_sizes):
        return False
    return is_declared(subject, replace(case, kind=str(kind), topk=1 if kind in CHAIN_KINDS else case.topk))


def _captures(subject: Subject, kind: StepKind) -> bool:
    """Whether a kind goes through a graph, prefills as packed rows."""
    if kind is StepKind.PREFILL:
        return kind in subject.capabilities and subject.capabilities[kind].captures_packed
    return graphable(subject, kind)


def _pairs(path: str) -> Cases:
    """Every ordered pair of declared kinds, at one page size, over every cache form, chains and trees."""

    def cases(subject: Subject) -> list[Case]:
        found = []
        for kind in KINDS:
            if path == "graph" and not _captures(subject, kind):
                continue
            for case in one_page_size(eager((kind,)))(subject):
                second = growing(case) if path == "graph" else replace(case, lens=case.lens[:3])
                second = in_rows(second) if kind is StepKind.PREFILL else second
                found += [replace(second, after=str(first)) for first in _firsts(subject, second)]
        return found

    return cases


def _firsts(subject: Subject, case: Case) -> Iterator[StepKind]:
    return (kind for kind in KINDS if kind != case.kind and _runs(subject, case, kind))


def _added(case: Case) -> tuple[int, ...]:
    """Keys that the last row of each request sees past the committed ones, in the first forward."""
    kind = StepKind(case.kind)
    if case.widths:
        return case.widths
    width = capacity_of(case.page_size, case.topk, case.size).bucket(kind, 1).width
    return (1 if kind is StepKind.DRAFT_DECODE else width,) * len(case.lens)


def _first_of(case: Case, path: str) -> Case:
    """The step of the kind that comes before a case's: as many requests, with as many keys each where possible. So
    state that is keyed by lengths alone is confused with this one's.
    """
    kind, bs = StepKind(case.after), len(case.lens)
    least = 0 if kind is StepKind.PREFILL else 1
    widths = (3, 1, 2, 4)[:bs] if kind is StepKind.PREFILL else ()
    other = replace(case, kind=str(kind), path=path, after="", widths=widths, captured_widths=(), num_tokens=0)
    totals = [length + added for length, added in zip(case.lens, _added(case), strict=True)]
    context = capacity_of(case.page_size, case.topk, case.size).max_context
    lens = [min(max(total - added, least), context) for total, added in zip(totals, _added(other), strict=True)]
    other = replace(other, lens=tuple(lens))
    if path == "graph" and widths:
        captured = widths[: len(case.captured_lens)]
        other = replace(other, captured_widths=captured, num_tokens=max(sum(widths), sum(captured)))
    return other if path == "graph" else replace(other, captured_lens=(), bs=0)


def _same_bits(what: str, ran: Ran, other: Ran) -> None:
    """Outputs of real rows, bit for bit."""
    for forward, (one, two) in enumerate(zip(ran.outputs, other.outputs, strict=True)):
        rows = len(ran.scene.rows[forward])
        for name, ours, theirs in (("output", one.out, two.out), ("LSE", one.lse, two.lse)):
            compare_identical(f"{name} of forward {forward}, {what}", ours[:rows], theirs[:rows])


class _Turn:
    """An eager step of a scene that may run more than once."""

    def __init__(self, world: World, case: Case) -> None:
        self.world, self.case = world, case
        self.scene: Scene = scene_of(world, batch_of(case), case.seed)
        self.table = world.table.clone()
        self.meta = world.backend.init_forward_metadata(self.scene.step())

    def run(self) -> Ran:
        self.world.table.copy_(self.table)
        before, inputs = prepare_memory(self.scene, self.case), self.scene.inputs()
        return Ran(self.scene, inputs, run_forwards(self.world, self.meta, inputs), before, self.meta)


@check("api.kinds_in_turn", _pairs("eager"))
def kinds_in_turn(subject: Subject, case: Case) -> Measured:
    """A step of one kind gives the same bits after a step of any other kind on the same backend, which it leaves as it
    was.
    """
    alone, world = run_case_eagerly(subject, replace(case, after="")), world_of(setup_of(subject, case))
    first = _Turn(world, _first_of(case, "eager"))
    before = first.run()
    second = _Turn(world, case)
    ran = second.run()
    compare_memory(ran.scene, ran.before)
    found = [compare_outputs(turn.scene, turn.inputs, turn.outputs) for turn in (before, ran)]
    _same_bits(f"after a {case.after} step", ran, alone)
    _same_bits(f"again, after a {case.kind} step", first.run(), before)
    return nearest(found)


@check("graph.kinds_in_turn", _pairs("graph"))
def graphs_of_kinds_in_turn(subject: Subject, case: Case) -> Measured:
    """A graph of one kind gives the same bits after a capture and a replay of any other kind (an eager step, where that
    can't be captured) on the same backend.
    """
    alone = run_case_through_graph(subject, replace(case, after=""))
    world = world_of(setup_of(subject, case))
    if not _captures(subject, StepKind(case.after)):
        _Turn(world, _first_of(case, "eager")).run()
        captured = Captured(world, case)
        turns = [(captured, case)]
    else:
        other = _first_of(case, "graph")
        first = Captured(world, other)
        first.run(scene_of(world, batch_of(other), case.seed + 1), other)
        captured = Captured(world, case)
        turns = [(captured, case), (first, other), (captured, case)]
    found: list[Measured] = []
    for turn, its in turns:
        ran = turn.run(scene_of(world, batch_of(its), case.seed + 1), its)
        compare_memory(ran.scene, ran.before, padded=True)
        found.append(compare_outputs(ran.scene, ran.inputs, ran.outputs))
        if turn is captured:
            _same_bits(f"after a {case.after} step", ran, alone)
    return nearest(found)


def in_pairs(subject: Subject) -> list[Case]:
    """Every pair of kinds that go through a graph of uniform rows, the later one of shorter requests."""
    kinds = [kind for kind in UNIFORM_KINDS if graphable(subject, kind)]
    return [
        replace(case, after=str(other))
        for case in one_page_size(graph(growing))(subject)
        for other in kinds
        if other != case.kind and is_declared(subject, replace(case, kind=str(other)))
    ]


@check("graph.planned_ahead", in_pairs)
def planned_ahead(subject: Subject, case: Case) -> Measured:
    """A phase stays planned while another one of the same requests is planned at other lengths; then the graphs run.
    The same with the first of these requests alone, and in copied block tables with others. A recorded graph refuses
    the pages of others, where both phases read them in one table.
    """
    world, alone = world_of(setup_of(subject, case)), replace(case, after="")
    phases = [Captured(world, replace(alone, kind=kind)) for kind in (case.kind, case.after)]
    placement = None if case.table == "block" else case.seed
    few = scene_of(world, batch_of(replace(alone, lens=case.lens[:2])), case.seed + 2, placement, world.table.shape[1])
    same, other = same_pages(world, alone, [case.after])  # whose rows the table then has
    found: list[Measured] = []
    for scenes in ((same, other), (few, other)):
        for captured, scene in zip(phases, scenes, strict=True):
            captured.load(scene)
        for captured, scene in zip(phases, scenes, strict=True):
            ran = captured.replay(scene, prepare_memory(scene, case))
            compare_memory(ran.scene, ran.before, padded=True)
            found.append(compare_outputs(ran.scene, ran.inputs, ran.outputs))
    check_refuses_others(phases[0], phases[1], same, scene_of(world, other.batch, case.seed + 3, case.seed + 3))
    return nearest(found)


def same_pages(world: World, case: Case, others: Sequence[str]) -> list[Scene]:
    """A step of a case's kind and some of other kinds, of the same requests and pages; these of fewer tokens, but for
    requests without any.
    """
    fewer = min(2, min(case.lens)) or 2
    lens = tuple(max(length - fewer, 0) for length in case.lens)
    batches = [batch_of(case), *(batch_of(replace(case, kind=kind, lens=lens)) for kind in others)]
    room = world.table.shape[1]  # all pages of a row
    return [scene_of(world, batch, case.seed + i, case.seed, room) for i, batch in enumerate(batches)]


@check("graph.other_buckets", one_page_size(any_graph(growing)))
def other_buckets(subject: Subject, case: Case) -> Measured:
    """Other captured batch sizes of its kind, in any order, change no bit of a graph's results."""
    alone, world = run_case_through_graph(subject, case), world_of(setup_of(subject, case))
    few = replace(case, bs=2, lens=case.lens[:2], widths=case.widths[:2], num_tokens=max(case.num_tokens - 1, 0))
    most = replace(case, bs=world.capacity.max_bs, num_tokens=2 * case.num_tokens)
    for other in (most, few):
        Captured(world, other).run(scene_of(world, batch_of(other), case.seed + 2), other)
    captured = Captured(world, case)
    Captured(world, few).run(scene_of(world, batch_of(few), case.seed + 3), few)
    ran = captured.run(scene_of(world, batch_of(case), case.seed + 1), case)
    _same_bits("with other batch sizes captured", ran, alone)
    return Measured()


@check("graph.after_a_refusal", one_page_size(any_graph(growing)))
def after_a_refusal(subject: Subject, case: Case) -> Measured:
    """A graph that refused a request longer than the capacity or its row of the table, or another request table, still
    holds the step that it took before, of the same layout. It is right on the next one, too.
    """
    world = world_of(setup_of(subject, case))
    captured, scene = Captured(world, case), scene_of(world, batch_of(case), case.seed + 1)
    step = captured.load(scene)
    before = prepare_memory(scene, case)
    too_long = tuple(length + world.max_pages * case.page_size for length in case.lens)
    lens = strided(torch.tensor(too_long, dtype=step.seq_lens.dtype, device=world.device))
    wrong = [replace(step, seq_lens=lens, seq_lens_cpu=too_long, max_committed=None)]
    if isinstance(step.paging, BlockTable):
        wrong.append(replace(step, paging=replace(step.paging, table=step.paging.table[:, :1])))
    else:
        table = step.paging.table
        wrong += [replace(step, paging=replace(step.paging, table=other)) for other in (table.clone(), table[:, :-1])]
        world.backend.replay(captured.meta, replace(step, paging=replace(step.paging, table=table.view_as(table))))
    for each in wrong:
        try:
            world.backend.replay(captured.meta, each)
        except (AttnBackendsError, InvalidStepError) as refusal:
            reason = str(refusal)
        else:
            raise CheckFailure("replay", f"took {each}, which needs more than its capacity or its table, or another")
    compare_identical("cache before the next step", world.memory, before)
    for replay in (partial(captured.replay, scene, before), partial(captured.run, scene, case)):
        ran = replay()
        compare_memory(ran.scene, ran.before, padded=True)
        compare_outputs(ran.scene, ran.inputs, ran.outputs)
    return Measured(refusal=reason)


@check("refusals.anothers_metadata", one_page_size(eager()))
def anothers_metadata(subject: Subject, case: Case) -> Measured:
    """Metadata that another instance of the same backend has planned, by the planner that it chooses. One that is asked
    for by name is taken or refused.
    """
    world, other = (world_of(setup_of(subject, case)) for _ in range(2))
    kernels = dict.fromkeys(world.backend.choices, subject.kernel)
    made = partial(type(world.backend), world.capacity, world.geometry, world.device, kernel=kernels)
    other.backend = made(planner="auto")
    try:
        taken = made(planner="fused").planner.name
    except BackendUnavailableError:
        taken = "fused"
    if taken != "fused":
        raise CheckFailure("planner", "not the one that was asked for", None, "fused", taken)
    scene = scene_of(world, batch_of(case), case.seed)
    theirs = scene_of(other, batch_of(case), case.seed)
    prepare_memory(scene, case)
    given = scene.inputs()[0]
    at = other.backend.init_forward_metadata(theirs.step()).at(0, given.ancestors)
    what = "metadata of another instance"
    return refused(what, scene, lambda: world.store(given, at), lambda: world.attend(given, at))


def _drafted_trees(subject: Subject) -> list[Case]:
    return [case for case in one_page_size(eager((StepKind.DRAFT_DECODE,)))(subject) if case.topk > 1]


@check("refusals.ancestors", _drafted_trees)
def ancestors(subject: Subject, case: Case) -> Measured:
    """Paths of a drafted tree of another depth, of too few requests, of floats, or none; in checking mode also those of
    branches that are not there.
    """
    world = world_of(replace(setup_of(subject, case), checking=True))
    scene = scene_of(world, batch_of(case), case.seed)
    given = scene.inputs()[0].ancestors
    assert given is not None
    meta, reason = world.backend.init_forward_metadata(scene.step()), ""
    wrong = {"deeper": given.repeat(1, 1, 2), "fewer": given[1:], "floats": given.double(), "none": None}
    wrong["branches that are not there"] = given + case.topk
    for what, paths in wrong.items():
        try:
            meta.at(0, paths)
        except InvalidStepError as refusal:
            reason = str(refusal)
        else:
            raise CheckFailure("ancestors", f"{what}: taken, where [bs, topk, forward + 1] integers are due")
    return Measured(refusal=reason)


def _around_pages_drafts(subject: Subject) -> list[Case]:
    cases = one_page_size(eager((StepKind.DRAFT_DECODE,)))(subject)
    return [replace(case, lens=around_pages(case)[:2]) for case in cases]


@check("cache.stores_in_any_order", _around_pages_drafts)
def stores_in_any_order(subject: Subject, case: Case) -> Measured:
    """Rows of a forward go to the same slots when they are stored twice, or forwards are stored last to first."""
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    before, inputs = prepare_memory(scene, case), scene.inputs()
    meta = world.backend.init_forward_metadata(scene.step())
    ats = [meta.at(forward, given.ancestors) for forward, given in enumerate(inputs)]
    turns = list(range(len(inputs)))
    for forward in (*turns[::-1], *turns):
        world.store(inputs[forward], ats[forward])
    compare_memory(scene, before)
    last = turns[-1]
    output = run_forward(world, meta, last, inputs[last])
    scene.num_forwards, scene.rows = 1, scene.rows[last:]
    return compare_outputs(scene, inputs[last:], [output])
