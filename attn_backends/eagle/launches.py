"""Steps on their way: what was launched and not yet read by the host."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

Mark = float | torch.cuda.Event


class HostCopy:
    """A device tensor's copy to the host. `tolist` waits for the copy alone, not for what was launched after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tolist(self) -> list:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class Timings:
    """When the phases of a step ended: host times on a CPU, events on a GPU. The clock starts when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Mark]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """What was launched since the last mark was this phase."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, perf_counter()))

    def seconds(self) -> dict[str, float]:
        """How long each phase took. On a GPU, only once the step was read."""
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
    """

    def __init__(self, tokens: Tensor, counts: Tensor | Sequence[int], timings: Timings) -> None:
        self._tokens = HostCopy(tokens)
        self._counts = HostCopy(counts) if isinstance(counts, Tensor) else list(counts)
        self._timings = timings

    def read(self) -> tuple[list[list[int]], dict[str, float]]:
        """What each request emitted, and the seconds of each phase; waits for the step."""
        counts = self._counts if isinstance(self._counts, list) else self._counts.tolist()
        tokens = [row[:count] for row, count in zip(self._tokens.tolist(), counts, strict=True)]
        return tokens, self._timings.seconds()
