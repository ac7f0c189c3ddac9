"""Measurement of times: contenders take turns in one process, by the device's own clock or by the host's.

Clocks, power and other users of a machine drift. Taking turns spreads the drift over all contenders alike, and the
median forgets the turns that something disturbed. Hosts differ more than devices do, so a fixed loop of Python is timed
as one more contender of the host's: times of two machines are compared by it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

CALLS = 5  # of each contender of the host in a round
LOOP = 10_000  # additions of the calibration loop
MIN_ROUNDS = 3


class Clock(Protocol):
    """A clock of a device."""

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


def take_turns(contenders: Sequence[Callable[[], object]], rounds: int, clock: Clock) -> list[float]:
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


def fewer_rounds(contenders: Sequence[Callable[[], object]], rounds: int, budget_us: float, clock: Clock) -> int:
    """As many of the rounds as fit into a budget, but `MIN_ROUNDS` or all that there are."""
    round_us = sum(take_turns(contenders, 1, clock))
    return max(min(MIN_ROUNDS, rounds), min(rounds, int(budget_us / max(round_us, 1.0))))


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The host's work for one step. ready: makes its arguments, which are not timed, and returns the call that is.
    in_graph: the same work as part of the model's graph, which costs the host nothing more.
    """

    ready: Callable[[], Callable[[], object]]
    in_graph: Callable[[], object] = nothing

    @classmethod
    def of(cls, call: Callable[[], object]) -> Work:
        """A call without arguments."""
        return cls(lambda: call)

    def run(self) -> None:
        """All of it."""
        self.ready()()
        self.in_graph()


def _add() -> int:
    total = 0
    for number in range(LOOP):
        total += number
    return total


CALIBRATION = Work.of(_add)


def take_host_turns(works: Sequence[Work], rounds: int, device: torch.device) -> list[float]:
    """Host time of each in microseconds, on an idle device and with Python's collector off: the median over rounds of a
    round's median of `CALLS`. Each runs once before, untimed.
    """
    for work in works:
        work.run()
    taken: list[list[float]] = [[] for _ in works]
    was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for work, medians in zip(works, taken, strict=True):
                medians.append(median(_timed(work, device) for _ in range(CALLS)))
    finally:
        if was_on:
            gc.enable()
    return [median(medians) for medians in taken]


def _timed(work: Work, device: torch.device) -> float:
    """After a long wait the host is slow at first, so the last call's work is waited for before arguments are made."""
    _wait(device)
    call = work.ready()
    _wait(device)
    start = time.perf_counter_ns()
    call()
    end = time.perf_counter_ns()
    work.in_graph()
    return (end - start) / 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
