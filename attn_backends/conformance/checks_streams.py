"""Two streams: a phase planned on a stream of its own, and inputs overwritten after the event that ends their reads.

On a GPU the streams are CUDA's, elsewhere a model of their order (`stream_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.checks_bound import BoundGraph, bindable, is_bindable
from attn_backends.conformance.checks_sets import InSet, verifies
from attn_backends.conformance.checks_turns import in_pairs, same_pages
from attn_backends.conformance.comparisons import compare_memory, compare_outputs, nearest
from attn_backends.conformance.exercise import (
    Captured,
    Ran,
    batch_of,
    fill,
    prepare_memory,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import (
    RAGGED_KINDS,
    any_graph,
    graph,
    graphable,
    growing,
    is_declared,
    joined,
    one_page_size,
    ragged_steps,
)
from attn_backends.conformance.stream_order import Name, Streams, streams_of
from attn_backends.layer import AttentionOutput
from attn_backends.memory.phase_sets import PhaseSets
from spec_metadata import BoundedQuery, Step
from spec_metadata.capacity import UNIFORM_KINDS
from spec_metadata.query import packed_starts

Call = Callable[[], None]
_ROOM_BYTES = 2**28
_GRAPH_DELAY = 20  # passes over it


class _OnStream:
    """A graph in turn with others on the main stream: memory as before it, outputs and memory kept. The model's inputs
    are made before: a copy from the host waits for the stream, which then no longer lags.
    """

    def __init__(self, captured: Captured, scene: Scene, before: Tensor) -> None:
        self.captured, self.scene, self.before = captured, scene, before
        self.inputs = scene.inputs(captured.case.bs, captured.case.num_tokens)

    def run(self) -> None:
        """Restore the cache, hand in the model's inputs and replay."""
        self.captured.world.memory.copy_(self.before)
        fill(self.captured.static, self.inputs)
        self.ran = self.captured.replay(self.scene, self.before)
        self.after = self.captured.world.memory.clone()

    def measured(self) -> Measured:
        """What came out, once the streams have finished."""
        self.captured.world.memory.copy_(self.after)
        compare_memory(self.ran.scene, self.ran.before, padded=True)
        given = self.scene.inputs(self.captured.case.bs, self.captured.case.num_tokens)
        return compare_outputs(self.ran.scene, given, self.ran.outputs)


@check("streams.planned_beside_a_graph", in_pairs)
def planned_beside_a_graph(subject: Subject, case: Case) -> Measured:
    """A phase is planned on a second stream after the main one's writes of its inputs, while another one's graph runs;
    its own graph runs after an event of that. Either stream may lag.
    """
    return _planned_beside(subject, replace(case, after=""), [case.after])


def _two_others(subject: Subject, case: Case) -> list[str]:
    """Kinds that are captured beside a case's own."""
    others = (str(kind) for kind in UNIFORM_KINDS if graphable(subject, kind) and kind != case.kind)
    return [kind for kind in others if is_declared(subject, replace(case, kind=kind))][-2:]


def _in_threes(subject: Subject) -> list[Case]:
    cases = one_page_size(graph(growing))(subject)
    return [case for case in cases if len(_two_others(subject, case)) == 2]


@check("streams.two_planned_beside_a_graph", _in_threes)
def two_planned_beside_a_graph(subject: Subject, case: Case) -> Measured:
    """Two phases are planned ahead on a second stream while a third one's graph runs, as the rest of a cycle is."""
    return _planned_beside(subject, case, _two_others(subject, case))


def _planned_beside(subject: Subject, case: Case, others: Sequence[str]) -> Measured:
    """Phases of other kinds are planned on the second stream while a graph of the case's kind runs on the main one."""
    world, found = world_of(setup_of(subject, case)), []
    phases = [Captured(world, replace(case, kind=kind)) for kind in (case.kind, *others)]
    scenes = same_pages(world, case, others)
    for late in (Name.SIDE, Name.MAIN):
        first, *rest = graphs = [
            _OnStream(phase, scene, prepare_memory(scene, case)) for phase, scene in zip(phases, scenes, strict=True)
        ]
        for each in rest:
            each.captured.plan(each.captured.scene.step())  # not what is planned below
        phases[0].load(scenes[0])
        steps = [each.captured.fill(each.scene) for each in rest]
        inputs = [tensor for step in steps for tensor in _inputs_of(step)]
        true = [tensor.clone() for tensor in inputs]
        _overwrite(inputs)
        streams = streams_of(world.device, late)
        streams.launch(Name.MAIN, partial(_write, inputs, true))
        hand_over(streams, Name.MAIN, Name.SIDE)
        for each, step in zip(rest, steps, strict=True):
            streams.launch(Name.SIDE, partial(each.captured.plan, step))
        streams.launch(Name.MAIN, first.run)
        hand_over(streams, Name.SIDE, Name.MAIN)
        for each in rest:
            streams.launch(Name.MAIN, each.run)
        streams.finish()
        found += [each.measured() for each in graphs]
    return nearest(found)


def _any_rows(subject: Subject) -> list[Case]:
    """Graphs of uniform, packed and ragged rows, at one page size."""
    ragged = [case for case in ragged_steps(*RAGGED_KINDS)(subject) if case.path == "graph"]
    return one_page_size(joined(any_graph(), lambda _: ragged))(subject)


@check("streams.planned_again", _any_rows)
def planned_again(subject: Subject, case: Case) -> Measured:
    """A phase is planned for its next step on a second stream, from a copy or an engine's buffers. The plan waits for
    the event that ends the reads of its graph on the main stream, and the graph for an event of the plan. Either stream
    may lag.
    """
    world, found = world_of(setup_of(subject, case)), []
    binds = not (case.refresh or case.widths) and is_bindable(subject, case)
    forms = [Captured, BoundGraph] if binds else [Captured]
    for form, late in product(forms, Name):
        captured, scenes = form(world, case), same_pages(world, case, [case.kind])
        graphs = [_OnStream(captured, scene, prepare_memory(scene, case)) for scene in scenes]
        following = scenes[1].step()
        captured.load(scenes[0])
        streams = streams_of(world.device, late)
        end_reads(streams, [graphs[0].run], partial(streams.end_reads, Name.MAIN, captured.meta))
        streams.launch(Name.SIDE, partial(captured.bring if case.refresh else captured.plan, following))
        hand_over(streams, Name.SIDE, Name.MAIN)
        streams.launch(Name.MAIN, graphs[1].run)
        streams.finish()
        found += [each.measured() for each in graphs]
    return nearest(found)


def _read_then_overwritten(
    graph: _OnStream, reads: list[Call], end: Callable[[Streams, Name], None], inputs: list[Tensor], last: list[Call]
) -> Measured:
    """Measure a graph whose inputs are overwritten after their reads: on its own stream, and on another one. end: has
    a stream wait for the event that ends the reads.
    """
    world, found = graph.captured.world, []
    true = [tensor.clone() for tensor in inputs]
    for stream in Name:
        _write(inputs, true)
        streams = streams_of(world.device, late=Name.MAIN)
        end_reads(streams, reads, partial(end, streams, stream))
        streams.launch(stream, partial(_overwrite, inputs))
        for call in last:
            streams.launch(Name.MAIN, call)
        streams.finish()
        found.append(graph.measured())
    return nearest(found)


@check("streams.copied_inputs", _any_rows)
def copied_inputs(subject: Subject, case: Case) -> Measured:
    """A step's tensors are overwritten once a replay has copied them, before the graph runs: in stream order, and on
    another stream after an event.
    """
    world = world_of(setup_of(subject, case))
    captured, scene = Captured(world, case), scene_of(world, batch_of(case), case.seed + 1)
    ran = _OnStream(captured, scene, prepare_memory(scene, case))
    step = captured.fill(scene)
    plan = partial(captured.bring if case.refresh else captured.plan, step)

    def end(streams: Streams, stream: Name) -> None:
        hand_over(streams, Name.MAIN, stream)

    return _read_then_overwritten(ran, [plan], end, _inputs_of(step), [ran.run])


def _growing_bindable(subject: Subject) -> list[Case]:
    return [case for case in bindable(subject) if len(case.lens) > 1]


@check("streams.bound_inputs", one_page_size(_growing_bindable))
def bound_inputs(subject: Subject, case: Case) -> Measured:
    """An engine's buffers are overwritten once a graph that is planned from them has run: in stream order, and on
    another stream after the phase's event.
    """
    world = world_of(setup_of(subject, case))
    captured, scene = BoundGraph(world, case), scene_of(world, batch_of(case), case.seed + 1)
    ran = _OnStream(captured, scene, prepare_memory(scene, case))
    captured.load(scene)
    given = captured.inputs
    inputs = [given.seq_lens, captured.paging.static_input(), given.out_cache_loc, given.num_real, given.tree_mask]

    def end(streams: Streams, stream: Name) -> None:
        streams.end_reads(Name.MAIN, captured.meta)
        streams.launch(stream, captured.meta.wait_for_reads)

    return _read_then_overwritten(ran, [ran.run], end, [tensor for tensor in inputs if tensor is not None], [])


def _inputs_of(step: Step) -> list[Tensor]:
    """The tensors of a step that a replay copies. A request table itself is read in place."""
    widths = step.query.widths if isinstance(step.query, BoundedQuery) else packed_starts(step.query)
    found = [step.seq_lens, step.paging.static_input(), step.out_cache_loc, step.tree_mask, widths]
    return [tensor for tensor in found if tensor is not None]


def _write(inputs: list[Tensor], values: list[Tensor]) -> None:
    """Write a step's values into its tensors."""
    for tensor, value in zip(inputs, values, strict=True):
        tensor.copy_(value)


def _overwrite(inputs: list[Tensor]) -> None:
    """As the next step would: of other requests, of no length, in place."""
    for tensor in inputs:
        tensor.zero_()


def end_reads(streams: Streams, reads: list[Call], end: Call) -> None:
    """Launch what reads, then the event after which its memory may be overwritten."""
    for call in reads:
        streams.launch(Name.MAIN, call)
    end()


def hand_over(streams: Streams, before: Name, after: Name) -> None:
    """Have a stream wait for what another one holds now, by an event."""
    if before is not after:
        streams.order(before, after)


def _sets_on_a_gpu(subject: Subject) -> list[Case]:
    return verifies(subject) if subject.device.startswith("cuda") else []


@check("streams.sets_switch_behind_reads", _sets_on_a_gpu)
def sets_switch_behind_reads(subject: Subject, case: Case) -> Measured:
    """Another set of phases is planned on a second stream while a graph of the last one, delayed, still runs. Both have
    the same phase, so that whoever does not wait reads values of the other set's step, and nothing worse.
    """
    world, room = world_of(setup_of(subject, case)), torch.zeros(_ROOM_BYTES, dtype=torch.uint8, device=subject.device)
    sets = PhaseSets(world.device)
    first, second = (InSet(world, case, sets.add()) for _ in range(2))
    scenes = same_pages(world, case, [case.kind])
    memory, found = [prepare_memory(scene, case) for scene in scenes], []
    first.load(scenes[0])
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    for phase, scene, before in zip((first, second), scenes, memory, strict=True):
        if phase is second:
            with torch.cuda.stream(side):
                second.load(scene)
            main.wait_stream(side)
        world.memory.copy_(before)
        _delay(room, _GRAPH_DELAY)
        phase.graph.replay()
        outputs = [AttentionOutput(out.clone(), lse.clone()) for out, lse in phase.outputs]
        ran = Ran(scene, phase.static, outputs, before, phase.meta)
        sets.reads_end()
        found.append((ran, world.memory.clone()))
    for ran, after in found:
        world.memory.copy_(after)
        compare_memory(ran.scene, ran.before, padded=True)
    return nearest([compare_outputs(ran.scene, ran.inputs, ran.outputs) for ran, _ in found])


def _delay(room: Tensor, passes: int) -> None:
    """Keep the current stream busy."""
    for _ in range(passes):
        room.add_(1)
