"""Planning on a stream of its own, beside a graph that runs: right in the order that events give. On a GPU alone, as a
recorded graph has no streams.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.checks_sets import InSet, verifies
from attn_backends.conformance.checks_turns import in_pairs, same_pages
from attn_backends.conformance.comparisons import compare_memory, compare_outputs, nearest
from attn_backends.conformance.exercise import Captured, Ran, prepare_memory, setup_of, world_of
from attn_backends.layer import AttentionOutput
from attn_backends.memory.phase_sets import PhaseSets

_ROOM_BYTES = 2**28
_GRAPH_DELAY, _PLANNING_DELAY = 20, 200  # passes over it: milliseconds, in which the host launches all the rest


def _on_a_gpu(subject: Subject) -> list[Case]:
    return in_pairs(subject) if subject.device.startswith("cuda") else []


@check("streams.planned_beside_a_graph", _on_a_gpu)
def planned_beside_a_graph(subject: Subject, case: Case) -> Measured:
    """A phase is planned on a second stream while another one's graph runs; its own graph runs after an event of that.

    The graph that runs has been delayed, and the planning for longer: whoever does not wait for the event attends by
    what was planned before.
    """
    world = world_of(setup_of(subject, case))
    first, second = Captured(world, case), Captured(world, replace(case, kind=case.after, after=""))
    scenes = same_pages(world, case)
    memory = [prepare_memory(scene, case) for scene in scenes]
    first.load(scenes[0])
    step = second.fill(scenes[1])
    room = torch.zeros(_ROOM_BYTES, dtype=torch.uint8, device=world.device)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        _delay(room, _PLANNING_DELAY)  # behind which nothing is copied from the host: that would wait
        world.backend.replay(second.meta, step)
    outputs, after = [], []
    for phase, before in zip((first, second), memory, strict=True):
        world.memory.copy_(before)
        if phase is first:
            _delay(room, _GRAPH_DELAY)
        else:
            wait_for(side)
        phase.graph.replay()
        outputs.append([AttentionOutput(out.clone(), lse.clone()) for out, lse in phase.outputs])
        after.append(world.memory.clone())
    torch.cuda.synchronize()
    found = []
    for phase, scene, before, out, memory_after in zip((first, second), scenes, memory, outputs, after, strict=True):
        world.memory.copy_(memory_after)
        ran = Ran(scene, phase.static, out, before, phase.meta)
        found.append(compare_outputs(ran.scene, ran.inputs, ran.outputs))
        compare_memory(ran.scene, ran.before, padded=True)
    return nearest(found)


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
    scenes = same_pages(world, replace(case, after=case.kind))
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


def wait_for(planning: torch.cuda.Stream) -> None:
    """Have the current stream wait for what was planned on another."""
    torch.cuda.current_stream().wait_event(planning.record_event())


def _delay(room: Tensor, passes: int) -> None:
    """Keep the current stream busy."""
    for _ in range(passes):
        room.add_(1)
