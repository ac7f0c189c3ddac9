"""Graphs in pieces: what is captured, what runs between, and what a capture that fails leaves behind."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from attn_backends.errors import CaptureError
from attn_backends.graphs import CudaGraph, RecordedGraph, is_capturing
from attn_backends_reference.pieces import PiecewiseGraph


def squares(given: Tensor, graph: PiecewiseGraph[float], seen: list[object]) -> Tensor:
    """(given + 1)² · factor · 10, the factor being a replay's own, on the host: no graph can hold that."""
    more = given + 1
    out = torch.zeros_like(more)

    def between(factor: float) -> None:
        seen.append((is_capturing(), more.tolist()))
        out.copy_(more * more * factor)

    graph.cut(between)
    return out * 10


def test_calls_run_between_the_pieces_of_every_replay() -> None:
    given, graph, seen = torch.tensor([1.0, 2.0]), PiecewiseGraph[float](RecordedGraph), list[object]()
    out = graph.capture(lambda: squares(given, graph, seen))
    assert seen == [], "a capture runs nothing that was cut out"
    for values, factor in (([1.0, 2.0], 1.0), ([4.0, 0.0], 0.5), ([4.0, 1.0], 0.0)):
        given.copy_(torch.tensor(values))
        graph.replay(factor)
        assert out.tolist() == [10 * factor * (value + 1) ** 2 for value in values]
        assert seen.pop() == (False, [value + 1 for value in values])


def test_pieces_are_graphs_each() -> None:
    """A host read inside a piece is refused, and leaves no mode behind; between pieces there is nothing to refuse."""
    given = torch.tensor([1.0])

    def region(graph: PiecewiseGraph[None]) -> float:
        graph.cut(lambda _: None)
        assert is_capturing()
        return (given + 1).item()

    graph = PiecewiseGraph[None](RecordedGraph)
    with pytest.raises(CaptureError):
        graph.capture(lambda: region(graph))
    assert not is_capturing()
    assert given.item() == 1


def test_a_piece_replays_with_its_intermediates_poisoned() -> None:
    """What an earlier piece made is there for a later one; what none of them makes again is not."""
    given, graph, made = torch.tensor([1.0]), PiecewiseGraph[None](RecordedGraph), list[Tensor]()

    def region() -> Tensor:
        first = given * 3
        graph.cut(lambda _: made[0].add_(1))
        made.append(first + 0)
        return first + made[0]

    out = graph.capture(region)
    graph.replay(None)
    assert out.tolist() == [6.0], "the call's change of what the next piece makes is lost"


def test_a_cuda_capture_that_cannot_end_leaves_no_stream_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch goes back to the stream before only behind an end that succeeds."""
    current = ["engine's"]

    @contextmanager
    def on_stream(stream: str):
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    @contextmanager
    def capturing(graph: object, pool: object):
        current[0] = "capture's"
        yield
        raise RuntimeError("the capture is invalid")

    for name, stand_in in {"CUDAGraph": object, "stream": on_stream, "graph": capturing}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    with pytest.raises(RuntimeError, match="invalid"), CudaGraph().recording():
        assert current == ["capture's"]
    assert current == ["engine's"]


class Noted(RecordedGraph):
    """Counts how often it was warmed up, and notes what it shares memory with."""

    def __init__(self) -> None:
        super().__init__()
        self.warm_ups, self.sharing = 0, None

    def warm_up(self, region) -> None:
        self.warm_ups += 1
        region()

    @contextmanager
    def recording(self, sharing=None):
        assert not is_capturing(), "the piece before has not ended"
        self.sharing = sharing
        with super().recording(sharing):
            yield


def test_pieces_follow_one_another_and_are_warmed_up_as_a_whole() -> None:
    made, runs = list[Noted](), list[int]()
    graph = PiecewiseGraph[None](lambda: made.append(Noted()) or made[-1])

    def region() -> None:
        runs.append(1)
        for _ in range(3):
            graph.cut(lambda _: None)

    graph.capture(region)
    assert [piece.sharing for piece in made] == [None, *made[:-1]]
    assert [piece.warm_ups for piece in made] == [1, 0, 0, 0]
    assert len(runs) == 2, "the warm-up and the capture"
