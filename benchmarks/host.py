"""How long the host is kept: contenders take turns, on an idle device and with Python's collector off.

Hosts differ and drift more than devices do, so a fixed loop of Python is timed as one more contender: times of two
machines, or of two hours, are compared by it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

CALLS = 5  # of each contender in a round
MIN_ROUNDS = 3
LOOP = 10_000  # additions of the calibration loop


class HostClock(Protocol):
    """What tells the time on the host."""

    def now(self) -> float:
        """Microseconds since whenever."""

    def wait(self) -> None:
        """Wait until the device is idle."""


class WallClock:
    """The time that passes, beside a CUDA device."""

    def now(self) -> float:
        """The performance counter; see `HostClock`."""
        return time.perf_counter_ns() / 1e3

    def wait(self) -> None:
        """Wait for the device; see `HostClock`."""
        torch.cuda.synchronize()


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the host does for one step. ready: makes its arguments, which are not timed, and returns the call that is.
    in_graph: what the model's graph does of the same work, which costs the host nothing more.
    """

    ready: Callable[[], Callable[[], object]]
    in_graph: Callable[[], object] = nothing

    def run(self) -> None:
        """All of it."""
        self.ready()()
        self.in_graph()


def calibration() -> Work:
    """The loop that is timed beside everything else."""

    def loop() -> int:
        total = 0
        for number in range(LOOP):
            total += number
        return total

    return Work(lambda: loop)


def rounds_of(turn_us: float, most: int, budget_us: float) -> int:
    """Rounds that a contender with such turns has, so that they take no longer than the budget: at least `MIN_ROUNDS`,
    of which there may be fewer.
    """
    return max(min(MIN_ROUNDS, most), min(most, int(budget_us / max(turn_us, 1.0))))


def take_host_turns(works: Sequence[Work], rounds: Sequence[int], clock: HostClock) -> list[float]:
    """Host time of each in microseconds: the median over its rounds of a round's median of `CALLS`. Each runs once
    before, untimed. rounds: of each; who has fewer than others sits out evenly.
    """
    for work in works:
        work.run()
    taken: list[list[float]] = [[] for _ in works]
    with _without_collector():
        for number in range(max(rounds)):
            for work, own, medians in zip(works, rounds, taken, strict=True):
                if takes_part(number, own, max(rounds)):
                    medians.append(median(_timed(work, clock) for _ in range(CALLS)))
    return [median(medians) for medians in taken]


def takes_part(number: int, own: int, most: int) -> bool:
    """Whether who has `own` rounds of the `most` is in the one of this number."""
    return (number + 1) * own // most > number * own // most


def _timed(work: Work, clock: HostClock) -> float:
    """After a long wait the host is slow at first, so the last call's work is waited for before arguments are made."""
    clock.wait()
    call = work.ready()
    clock.wait()
    start = clock.now()
    call()
    end = clock.now()
    work.in_graph()
    return end - start


@contextmanager
def _without_collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
