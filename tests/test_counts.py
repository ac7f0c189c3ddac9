"""What the profiler saw is counted for the work that it belongs to."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from benchmarks.timing import Work
from tests import counts
from tests.counts import Counts, count_on_cuda, counts_by_mark


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


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_times_are_medians_and_counts_the_most(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert count_on_cuda([Work.of(lambda: torch.zeros(3) + 1)]) == [Counts(0.0, 0, 0, 0)], "the marks are found"
    seen = [Counts(9.0, 1, 0, 0), Counts(1.0, 2, 0, 0), Counts(2.0, 1, 0, 1)]
    monkeypatch.setattr(counts, "counts_by_mark", lambda names, events: seen)
    assert count_on_cuda([Work.of(lambda: None)]) == [Counts(2.0, 2, 0, 1)]
