"""The model of two streams: a launch runs behind its events, and otherwise as late or as early as its stream may."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from attn_backends.conformance.stream_order import ModelledStreams, Name


def ran(late: Name, launch: Callable[[ModelledStreams, Callable[[Name, str], None]], None]) -> list[str]:
    """The order in which launches ran."""
    streams, order = ModelledStreams(late), list[str]()
    launch(streams, lambda stream, what: streams.launch(stream, lambda: order.append(what)))
    assert order == []
    streams.finish()
    return order


@pytest.mark.parametrize(("late", "expected"), [(Name.MAIN, ["s1", "s2", "m1"]), (Name.SIDE, ["m1", "s1", "s2"])])
def test_without_events_the_other_stream_runs_first(late: Name, expected: list[str]) -> None:
    def launch(streams, on):
        on(Name.MAIN, "m1"), on(Name.SIDE, "s1"), on(Name.SIDE, "s2")

    assert ran(late, launch) == expected


@pytest.mark.parametrize("late", Name)
def test_an_event_orders_what_was_launched_before_it_and_comes_after_its_wait(late: Name) -> None:
    def launch(streams, on):
        on(Name.SIDE, "free"), on(Name.MAIN, "read")
        streams.order(Name.MAIN, Name.SIDE)
        on(Name.SIDE, "written"), on(Name.MAIN, "later")

    order = ran(late, launch)
    assert order.index("read") < order.index("written")
    assert (order.index("free") < order.index("read")) is (late is Name.MAIN)
    assert (order.index("written") < order.index("later")) is (late is Name.MAIN)


@pytest.mark.parametrize("late", Name)
def test_what_comes_before_the_event_of_a_phase_runs_in_a_call_that_waits_for_it(late: Name) -> None:
    meta: Any = SimpleNamespace(captured=SimpleNamespace(phase=SimpleNamespace(reads=None)))
    meta.reads_end = lambda: meta.captured.phase.reads.end()
    streams, order = ModelledStreams(late), list[str]()

    def plan() -> None:
        meta.captured.phase.reads.wait()
        order.append("planned")

    streams.launch(Name.MAIN, lambda: order.append("read"))
    streams.end_reads(Name.MAIN, meta)
    streams.launch(Name.MAIN, lambda: order.append("later"))
    streams.launch(Name.SIDE, plan)
    streams.finish()
    assert order == (["read", "planned", "later"] if late is Name.MAIN else ["read", "later", "planned"])
