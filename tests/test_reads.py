"""The event that ends the reads of a phase: where it is recorded, who waits for it, and that no graph does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from attn_backends import get_backend
from attn_backends.errors import CaptureError
from attn_backends.graphs import RecordedGraph
from attn_backends.memory.reads import Reads
from spec_metadata import BlockTable, BoundInputs, CacheGeometry, Capacity, Step, StepKind

CAPACITY, GEOMETRY = Capacity(2, 16, 4), CacheGeometry(9, 4)
SECOND = torch.device("cuda", 1)


class Told(Reads):
    """Reads that note who waits."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.ended, self.waits = True, 0

    def wait(self) -> None:
        self.waits += 1


@dataclass(frozen=True)
class Stream:
    """One of CUDA's; equal to others of its number."""

    device: torch.device
    number: int = 0
    wait_event: Callable[[object], None] = field(default=lambda event: None, compare=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What is asked of CUDA's streams and events."""
    asked: list[tuple[str, object]] = []

    def current(device: torch.device) -> Stream:
        return Stream(device, wait_event=lambda event: asked.append(("wait", device)))

    event = SimpleNamespace(record=lambda stream: asked.append(("record", stream.device)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    return asked


def test_the_event_is_on_the_streams_of_the_memory_s_own_device(calls: list) -> None:
    reads = Reads(SECOND)
    reads.wait()
    assert (calls, reads.ended) == ([], False), "nothing was recorded that anybody could wait for"
    reads.end()
    reads.wait()
    assert calls == [("record", SECOND), ("wait", SECOND)]
    assert reads.ended


def test_reads_end_on_every_stream_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of the second stream must not take the place of the first one's."""
    waits, running = list[int](), [0]

    class Event:
        def record(self, stream: Stream) -> None:
            self.on = stream.number

    def current(device: torch.device) -> Stream:
        return Stream(device, running[0], lambda event: waits.append(event.on))  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    reads = Reads(SECOND)
    for running[0] in (7, 8, 7):
        reads.end()
    reads.wait()
    assert waits == [7, 8]


def test_a_cpu_has_no_event(calls: list) -> None:
    reads = Reads(torch.device("cpu"))
    reads.end()
    reads.wait()
    assert calls == []


def test_no_graph_holds_a_wait_or_ends_reads(calls: list) -> None:
    reads = Reads(SECOND)
    reads.end()
    with RecordedGraph().recording():
        reads.wait()
        with pytest.raises(CaptureError, match="call reads_end there, not in a capture"):
            reads.end()
    assert calls == [("record", SECOND)]


def table() -> BlockTable:
    return BlockTable(torch.ones(2, CAPACITY.max_pages, dtype=torch.int32), GEOMETRY)


def test_planning_a_phase_from_the_host_waits_and_a_graph_that_plans_does_not() -> None:
    backend = get_backend("fa3")(CAPACITY, GEOMETRY, kernel="torch")
    lens, bucket = torch.zeros(2, dtype=torch.int32), CAPACITY.bucket(StepKind.DECODE, 2)
    copied, bound = (
        backend.capture(bucket, table()),
        backend.capture(bucket, table(), BoundInputs(lens, num_real=lens[:1])),
    )
    step, graph = Step.decode(lens + 3, table()), RecordedGraph()

    def waits(meta, call: Callable[[], object]) -> int:
        meta.captured.phase.reads = told = Told()
        call()
        return told.waits

    assert waits(copied, lambda: backend.replay(copied, step)) == 1
    assert waits(copied, lambda: backend.copy_inputs(copied, step)) == 1
    assert waits(copied, lambda: backend.capture(CAPACITY.bucket(StepKind.DECODE, 1), table())) == 1, "of its phase"
    assert waits(copied, copied.wait_for_reads) == 1
    assert waits(bound, lambda: backend.refresh(bound)) == 1
    graph.capture(lambda: backend.refresh(bound))
    assert waits(bound, graph.replay) == 0


def test_eager_metadata_is_never_planned_again() -> None:
    meta = get_backend("fa3")(CAPACITY, GEOMETRY, kernel="torch").init_forward_metadata(
        Step.decode(torch.zeros(2, dtype=torch.int32), table())
    )
    meta.reads_end()
    meta.wait_for_reads()
