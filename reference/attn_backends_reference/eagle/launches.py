"""Steps on their way: what was launched and not yet read by the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

Mark = float | torch.cuda.Event


class HostCopy:
    """Copies of tensors of one device to the host. `read` waits for these, not for what was launched after them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._host, self._event = tensors, None
        if tensors[0].is_cuda:
            self._host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list]:
        """The values of each, once all are there: one wait."""
        if self._event is not None:
            self._event.synchronize()
        return [host.tolist() for host in self._host]


class Timings:
    """When the phases of a step ended: host times on a CPU, events on a GPU. The clock starts when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Mark]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """Count all launches since the last mark to a phase."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase. On a GPU, only once the step was read."""
        spans = zip(self._marks[:-1], self._marks[1:], strict=True)
        return {phase: _between(start, end) for (_, start), (phase, end) in spans}


def _between(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


class Launch:
    """One step of a batch, launched.

    tokens: [bs, n] int64, what each request may emit. counts: [bs], how many of them it does, known to the host or not.
    on_read: gets the counts when they are read.
    """

    def __init__(
        self,
        tokens: Tensor,
        counts: Tensor | Sequence[int],
        timings: Timings,
        on_read: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._known = None if isinstance(counts, Tensor) else list(counts)
        self._copy = HostCopy(tokens, counts) if isinstance(counts, Tensor) else HostCopy(tokens)
        self._timings, self._on_read = timings, on_read

    def read(self) -> tuple[list[list[int]], dict[str, float]]:
        """The tokens that each request emitted, and the seconds of each phase; waits for the step."""
        tokens, *copied = self._copy.read()
        counts = copied[0] if self._known is None else self._known
        if self._on_read is not None:
            self._on_read(counts)
        return [row[:count] for row, count in zip(tokens, counts, strict=True)], self._timings.seconds()
