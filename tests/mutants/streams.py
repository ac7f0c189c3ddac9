"""Mutants of the order of two streams: an event that is missing, or recorded too early."""

from __future__ import annotations

from typing import Any

import pytest

from attn_backends.conformance import checks_streams
from attn_backends.conformance.stream_order import Name, Streams
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


@mutant("a phase planned for its next step, after no event", AGAIN, graph=True)
def planned_again_behind_no_event(patch: pytest.MonkeyPatch) -> None:
    """The stream that plans does not wait for the reads of the graph whose phase it plans again."""
    without_event(patch, Name.MAIN, Name.SIDE)


@mutant("inputs of the next step, written after no event", *INPUTS, graph=True)
def inputs_overwritten_behind_no_event(patch: pytest.MonkeyPatch) -> None:
    """Another stream writes the next step's inputs, and does not wait for the reads of this one's."""
    without_event(patch, Name.MAIN, Name.SIDE)


@mutant("SGLang #37936, #37988: the event that ends shared reads comes before the replay", *INPUTS, AGAIN, graph=True)
def reads_end_before_the_replay(patch: pytest.MonkeyPatch) -> None:
    """The event that ends the reads of inputs is recorded before what reads them is launched."""

    def too_early(streams: Streams, reads: list[Any], stream: Name) -> None:
        checks_streams.hand_over(streams, Name.MAIN, stream)
        for call in reads:
            streams.launch(Name.MAIN, call)

    patch.setattr(checks_streams, "end_reads", too_early)
