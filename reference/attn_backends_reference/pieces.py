"""Phases over packed rows, such as a prefill: captured whole, or piecewise between their attention calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Generic, Self, TypeVar

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.graphs import Graph
from attn_backends.planning.metadata import ForwardMetadata
from attn_backends.runner import AnyPhase, CapturedRegion, Inputs, Outputs, Phase, Runner
from spec_metadata import Bucket, Step, TokenBucket

T = TypeVar("T")
Given = TypeVar("Given")


class PiecewiseGraph(Generic[Given]):
    """A row of graphs of one region: what can't be captured runs eagerly between them, on what each replay is given.

    make_graph: a graph for each piece.
    """

    def __init__(self, make_graph: Callable[[], Graph]) -> None:
        self._make_graph = make_graph
        self._pieces: list[Graph] = []
        self._between: list[Callable[[Given], None]] = []
        self._open = ExitStack()

    def capture(self, region: Callable[[], T], sharing: Self | None = None) -> T:
        """Capture a region that calls `cut`; returns its outputs, whose memory every replay overwrites. sharing: as of
        `Graph`; a piece shares with the one before it.
        """
        self._pieces, self._between = [], []
        first = self._make_graph()
        first.warm_up(region)
        with torch.no_grad(), self._open:
            self._begin(first, None if sharing is None else sharing._pieces[-1])
            return region()

    def cut(self, call: Callable[[Given], None]) -> None:
        """Called by the region: the piece ends here, and a replay runs call(given) before the next one.

        Nothing runs it during the capture, nor while the region is warmed up.
        """
        if self._pieces:
            self._open.close()
            self._between.append(call)
            self._begin(self._make_graph(), self._pieces[-1])

    def replay(self, given: Given) -> None:
        """Run the region again: its pieces, and between them the calls."""
        first, *others = self._pieces
        first.replay()
        with torch.no_grad():
            for call, piece in zip(self._between, others, strict=True):
                call(given)
                piece.replay()

    def _begin(self, piece: Graph, sharing: Graph | None) -> None:
        self._pieces.append(piece)
        self._open.enter_context(piece.recording(sharing))


Forward = ForwardMetadata | PiecewiseGraph[ForwardMetadata]
"""What models make their attention of: one forward's metadata, or a graph whose replays each bring theirs."""
PackedPhase = AnyPhase[Forward, Inputs, Outputs]
"""Over packed rows, such as a prefill: one forward, which may be captured piecewise. All that it takes of a step beside
attention is in its inputs, which hold as many requests as a bucket does.
"""


def whole(phase: PackedPhase[Inputs, Outputs]) -> Phase[Inputs, Outputs]:
    """A packed phase on its step's metadata, for one graph of all of it."""
    region = phase.region
    return Phase(
        phase.name, lambda meta, inputs: region(meta.at(), inputs), phase.safe_inputs, phase.output, phase.bucket
    )


class PiecewiseRunner(Runner[Inputs, Outputs]):
    """Runs a phase of packed rows. Graphs hold the pieces between its attention calls, which run eagerly, on metadata
    of the unpadded step, with any backend and kernel.

    buckets: numbers of tokens to capture.
    """

    def __init__(
        self,
        phase: PackedPhase[Inputs, Outputs],
        backend: AttentionBackend,
        buckets: Sequence[int] = (),
        make_graph: Callable[[], Graph] | None = None,
    ) -> None:
        self._region = phase.region
        super().__init__(phase, backend, buckets, make_graph)

    def _run_eagerly(self, step: Step, inputs: Inputs) -> Outputs:
        return self._region(self.backend.init_forward_metadata(step).at(), inputs)

    def _capture(
        self, bucket: Bucket | TokenBucket, inputs: Inputs, make_graph: Callable[[], Graph], before: Any
    ) -> CapturedRegion[Inputs, Outputs]:
        graph = PiecewiseGraph[ForwardMetadata](make_graph)
        outputs = graph.capture(lambda: self._region(graph, inputs), before)

        def replay(step: Step) -> None:
            graph.replay(self.backend.init_forward_metadata(step).at())

        return CapturedRegion(bucket, inputs, outputs, graph, replay)
