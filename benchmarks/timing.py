"""Side by side: contenders take turns in one process, and the device's own clock times each turn.

Clocks, power and other users of a machine drift. Taking turns spreads the drift over all contenders alike, and the
median forgets the turns that something disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """What tells the time on the device."""

    def mark(self) -> Any:
        """A mark in the current stream, after the work that is queued there."""

    def wait(self) -> None:
        """Wait for all queued work."""

    def microseconds(self, start: Any, end: Any) -> float:
        """Device time between two marks that were waited for."""


class CudaClock:
    """CUDA events."""

    def mark(self) -> torch.cuda.Event:
        """An event in the current stream; see `Clock`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for the device; see `Clock`."""
        torch.cuda.synchronize()

    def microseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events; see `Clock`."""
        return start.elapsed_time(end) * 1e3


def take_turns(contenders: Sequence[Callable[[], None]], rounds: int, clock: Clock) -> list[float]:
    """Median device time of each contender in microseconds. Each runs once untimed, then once in every round.

    Nothing waits between turns, so the device always has work queued and launches cost it nothing.
    """
    for run in contenders:
        run()
    clock.wait()
    turns: list[list[tuple[Any, Any]]] = [[] for _ in contenders]
    for _ in range(rounds):
        for run, marks in zip(contenders, turns, strict=True):
            start = clock.mark()
            run()
            marks.append((start, clock.mark()))
    clock.wait()
    return [median(clock.microseconds(*marks) for marks in taken) for taken in turns]
