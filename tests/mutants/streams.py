"""Mutants of the order of two streams: an event that is missing, or recorded too early."""

from __future__ import annotations

import pytest

from attn_backends import AttentionBackend, Metadata
from attn_backends.conformance import checks_streams
from attn_backends.conformance.checks_streams import Call
from attn_backends.conformance.stream_order import Name, Streams
from attn_backends.memory.reads import Reads
from spec_metadata import Step
from tests.mutants.mutant import mutant

PLANNED = "streams.planned_beside_a_graph", "streams.two_planned_beside_a_graph"
INPUTS, AGAIN = ("streams.copied_inputs", "streams.bound_inputs"), "streams.planned_again"


def without_event(patch: pytest.MonkeyPatch, *streams: Name) -> None:
    """Leave out the events after which the second stream goes on."""
    known = checks_streams.hand_over
    patch.setattr(checks_streams, "hand_over", lambda order, *pair: None if pair == streams else known(order, *pair))


@mutant("planning on another stream, not waited for", *PLANNED, AGAIN, graph=True)
def planning_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A worker launches a graph after no event of the stream that plans it."""
    without_event(patch, Name.SIDE, Name.MAIN)


@mutant("SGLang #22113, #21942: planned on a stream of its own", *PLANNED, graph=True)
def planning_waits_for_no_inputs(patch: pytest.MonkeyPatch) -> None:
    """The stream that plans does not wait for the one that writes the step's lengths, rows and slots."""
    without_event(patch, Name.MAIN, Name.SIDE)


@mutant("a phase planned for its next step, after no event", AGAIN, "streams.bound_inputs", graph=True)
def planned_again_behind_no_event(patch: pytest.MonkeyPatch) -> None:
    """A worker does not say where the reads of a phase end before it plans that again, or writes its inputs."""
    patch.setattr(Metadata, "reads_end", lambda self: None)


def without_wait(patch: pytest.MonkeyPatch, method: str) -> None:
    """Have a method of backends not wait for what reads the phase that it writes."""
    known = getattr(AttentionBackend, method)

    def unordered(self: AttentionBackend, meta: Metadata, *step: Step) -> None:
        phase = meta.captured.phase if meta.captured else None
        with pytest.MonkeyPatch.context() as inside:
            if phase is not None:
                inside.setattr(phase, "reads", Reads(self.device))
            known(self, meta, *step)

    patch.setattr(AttentionBackend, method, unordered)


@mutant("a phase planned for its next step, not after its event", AGAIN, graph=True)
def copies_wait_for_no_reads(patch: pytest.MonkeyPatch) -> None:
    """A replay copies its step over one that a graph still reads, past the event that ends the reads."""
    without_wait(patch, "copy_inputs")


@mutant("a phase planned from bound inputs, not after its event", AGAIN, graph=True)
def bound_plans_wait_for_no_reads(patch: pytest.MonkeyPatch) -> None:
    """A plan of bound inputs is written over one that a graph still reads, past the event that ends the reads."""
    without_wait(patch, "refresh")


@mutant("inputs of the next step, written after no event", *INPUTS, graph=True)
def inputs_overwritten_behind_no_event(patch: pytest.MonkeyPatch) -> None:
    """Another stream writes the next step's inputs, and does not wait for the reads of this one's."""
    without_event(patch, Name.MAIN, Name.SIDE)
    patch.setattr(Metadata, "wait_for_reads", lambda self: None)


@mutant("SGLang #37936, #37988: the event that ends shared reads comes before the replay", *INPUTS, AGAIN, graph=True)
def reads_end_before_the_replay(patch: pytest.MonkeyPatch) -> None:
    """The event that ends the reads of inputs is recorded before what reads them is launched."""

    def too_early(streams: Streams, reads: list[Call], end: Call) -> None:
        end()
        for call in reads:
            streams.launch(Name.MAIN, call)

    patch.setattr(checks_streams, "end_reads", too_early)
