"""How the host is timed beside a device, and what of the device is counted. On a CPU; no time is asserted."""

from __future__ import annotations

import gc
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from benchmarks import counts
from benchmarks.counts import Counts, count_on_cuda, counts_by_mark
from benchmarks.host import CALLS, MIN_ROUNDS, Work, calibration, rounds_of, take_host_turns

CPU = torch.device("cpu")


class HostTicks:
    """A host's clock that work moves, and waiting too."""

    def __init__(self):
        self.time, self.num_waits = 0.0, 0

    def now(self):
        return self.time

    def wait(self):
        self.num_waits += 1
        self.time += 1000.0


def test_a_contender_is_timed_between_its_arguments_and_what_its_graph_does():
    clock, order = HostTicks(), []

    def work(name, times):
        left = iter(times)

        def call():
            order.append(name)
            clock.time += next(left)

        def ready():
            clock.time += 50.0
            return call

        def in_graph():
            clock.time += 70.0
            order.append(f"{name} in graph")

        return Work(ready, in_graph)

    rounds = [[7, 9, 8, 900, 8], [5, 6, 700, 6, 6], [800, 9, 9, 9, 9]]
    works = [work("a", [1000, *chain(*rounds)]), work("b", [1] * 16)]
    assert take_host_turns(works, [3, 3], clock) == [8, 1]
    assert order[:4] == ["a", "a in graph", "b", "b in graph"], "one run each to warm up"
    assert order[4:] == (["a", "a in graph"] * CALLS + ["b", "b in graph"] * CALLS) * 3
    assert clock.num_waits == 2 * 2 * 3 * CALLS, "the device is idle before every call"


def test_who_takes_long_has_fewer_rounds_spread_over_those_of_the_others():
    assert [rounds_of(us, 20, 30e3) for us in (0, 1000, 3000, 5000, 1e6)] == [20, 20, 10, 6, MIN_ROUNDS]
    assert rounds_of(1e6, 2, 30e3) == 2, "no more than there are"
    order = []
    works = [Work(lambda name=name: lambda: order.append(name)) for name in "ab"]
    take_host_turns(works, [6, 3], HostTicks())
    assert order == ["a", "b", *(["a"] * CALLS + ["a"] * CALLS + ["b"] * CALLS) * 3]


def test_the_collector_waits_until_all_is_timed():
    was_on = []
    with pytest.raises(ZeroDivisionError):
        take_host_turns(
            [Work(lambda: lambda: was_on.append(gc.isenabled()) or 1 // (len(was_on) < 4))], [1], HostTicks()
        )
    assert was_on == [True, False, False, False]
    assert gc.isenabled()


def test_the_calibration_loop_does_the_same_work_each_time():
    assert {calibration().ready()() for _ in range(3)} == {10_000 * 9_999 // 2}


def event(name, start, end, device=DeviceType.CPU):
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


on_device = partial(event, device=DeviceType.CUDA)
EVENTS = [
    event("cudaDeviceSynchronize", 5, 9),
    event("first", 10, 30),
    event("first, host", 10, 20),
    on_device("first", 12, 19),
    event("cudaLaunchKernel", 11, 12),
    event("cudaStreamSynchronize", 13, 14),
    event("cudaMemcpy", 14, 15),
    event("cudaMemcpyAsync", 15, 16),
    on_device("kernel", 12, 14.5),
    on_device("Memset (Device)", 16, 17),
    on_device("Memcpy HtoD (Pinned -> Device)", 21, 24),
    event("cudaDeviceSynchronize", 22, 29),
    on_device("what makes the arguments of the second", 32, 35),
    event("second", 40, 60),
    event("second, host", 40, 50),
    event("cudaGraphLaunch", 41, 42),
    on_device("node of a graph", 45, 52),
]


def test_the_device_is_counted_until_it_was_waited_for_and_the_host_until_it_waits(monkeypatch):
    monkeypatch.setattr(counts, "_MARK", "first")  # ranges are shown on the device too
    assert counts_by_mark(["first", "second"], EVENTS) == [Counts(6.5, 2, 1, 2, 1), Counts(7, 1, 0, 0)]


def test_the_profiler_shows_the_marks_that_are_looked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    works = [Work(lambda: lambda: torch.zeros(3) + 1), Work(lambda: lambda: None)]
    assert count_on_cuda(works) == [Counts(0.0, 0, 0, 0)] * 2


def test_times_are_medians_and_counts_the_most(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = [Counts(9.0, 1, 0, 0), Counts(1.0, 2, 0, 0), Counts(2.0, 1, 0, 1)]
    monkeypatch.setattr(counts, "counts_by_mark", lambda names, events: seen)
    assert count_on_cuda([Work(lambda: lambda: None)]) == [Counts(2.0, 2, 0, 1)]
