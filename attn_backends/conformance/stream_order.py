"""Two streams of an engine: CUDA streams, or a model of their order on a machine without a GPU.

Both run what is launched in the order that events give, and everything else as late as they can on the stream that
lags. On a GPU that stream is kept busy first. The model puts off every launch until `finish`, and then runs what is
ready on the other stream first. A launch of the model is whole: it sees neither an overlap of kernels, nor what a call
does on the host in the meantime. But where the library waits for the event of a phase, what comes before it runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from typing import Protocol

import torch

from attn_backends.memory.reads import Reads
from attn_backends.planning.metadata import Metadata

_ROOM_BYTES = 2**28
_PASSES = 200  # over it: milliseconds, in which the host launches all the rest


class Name(StrEnum):
    """The name of a stream."""

    MAIN = "main"
    SIDE = "side"


class Streams(Protocol):
    """The two streams of an engine."""

    def launch(self, stream: Name, call: Callable[[], None]) -> None:
        """Run device work on a stream, after all that was launched there."""

    def order(self, before: Name, after: Name) -> None:
        """Have later launches on `after` wait for an event of `before`, recorded now."""

    def end_reads(self, stream: Name, meta: Metadata) -> None:
        """Call `Metadata.reads_end` on a stream, after all that was launched there."""

    def finish(self) -> None:
        """Wait for all."""


class CudaStreams:
    """Streams of a GPU. The main one is the current one. late: which is kept busy first."""

    def __init__(self, late: Name) -> None:
        self._streams = {Name.MAIN: torch.cuda.current_stream(), Name.SIDE: torch.cuda.Stream()}
        room = torch.zeros(_ROOM_BYTES, dtype=torch.uint8, device="cuda")
        self.order(Name.MAIN, Name.SIDE)
        with torch.cuda.stream(self._streams[late]):
            for _ in range(_PASSES):
                room.add_(1)
        self._kept: list[object] = [room]  # a stream may still use what it holds

    def launch(self, stream: Name, call: Callable[[], None]) -> None:
        """Launch now."""
        self._kept.append(call)
        with torch.cuda.stream(self._streams[stream]) if stream is Name.SIDE else nullcontext():
            call()

    def order(self, before: Name, after: Name) -> None:
        """An event, and a wait for it."""
        self._streams[after].wait_event(self._streams[before].record_event())

    def end_reads(self, stream: Name, meta: Metadata) -> None:
        """Call it now, with the stream as the current one."""
        self.launch(stream, meta.reads_end)

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()
        self._kept.clear()


class ModelledStreams:
    """Queues of launches, run at the end. late: which runs only where the other one waits or is empty."""

    def __init__(self, late: Name) -> None:
        self._turns = sorted(Name, key=lambda name: name == late)
        self._queues: dict[Name, list[tuple[Callable[[], None], dict[Name, int]]]] = {name: [] for name in Name}
        self._first: dict[Name, dict[Name, int]] = {name: {} for name in Name}
        self._num_done = dict.fromkeys(Name, 0)

    def launch(self, stream: Name, call: Callable[[], None]) -> None:
        """Note a call, and how many launches of the other stream come first."""
        self._queues[stream].append((call, dict(self._first[stream])))

    def order(self, before: Name, after: Name) -> None:
        """Launches so far on `before` come first."""
        self._first[after][before] = len(self._queues[before])

    def end_reads(self, stream: Name, meta: Metadata) -> None:
        """Call it now, on a model of the event. A call that waits for that runs what comes first then."""
        assert meta.captured is not None, "eager metadata is not planned again"
        meta.captured.phase.reads = _ModelledReads(partial(self._run_first, stream, len(self._queues[stream])))
        meta.reads_end()

    def finish(self) -> None:
        """Run all; on each stream in turn as far as it may."""
        while ready := next(filter(self._is_ready, self._turns), None):
            self._run(ready)

    def _run_first(self, stream: Name, number: int) -> None:
        """Run the first launches of a stream, that many, in the midst of one of the other's."""
        while self._num_done[stream] < number:
            assert self._is_ready(stream), "an event comes after what waits for it"
            self._run(stream)

    def _run(self, stream: Name) -> None:
        call, _ = self._queues[stream][self._num_done[stream]]
        self._num_done[stream] += 1
        call()

    def _is_ready(self, stream: Name) -> bool:
        number, queue = self._num_done[stream], self._queues[stream]
        return number < len(queue) and all(self._num_done[other] >= least for other, least in queue[number][1].items())


class _ModelledReads(Reads):
    """Reads of a phase on modelled streams. run: what runs all that comes before the event."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(torch.device("cpu"))
        self._run = run

    def end(self) -> None:
        self.ended = True

    def wait(self) -> None:
        if self.ended:
            self._run()


def streams_of(device: torch.device, late: Name) -> Streams:
    """The streams of a device, one of which lags."""
    return (CudaStreams if device.type == "cuda" else ModelledStreams)(late)
