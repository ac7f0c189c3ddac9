"""What runs on the device for a piece of host work, and how often the host waits for it, by torch's profiler."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.timing import Work

REPEATS = 3
_MARK = "attn-backends benchmarks "
_HOST = ", host"


@dataclass(frozen=True, slots=True)
class Counts:
    """gpu_us: time of all kernels and copies together, without the gaps between them. launches: kernels and fills,
    those of graphs too. copies: of memory. syncs: calls in which the host waits for the device. to_device, to_host: the
    copies out of and into the host's memory.
    """

    gpu_us: float
    launches: int
    copies: int
    syncs: int
    to_device: int = 0
    to_host: int = 0


Probe = Callable[[Sequence[Work]], list[Counts]]


class Event(Protocol):
    """What the profiler saw, as far as it is read."""

    name: str
    device_type: DeviceType
    time_range: Span


class Span(Protocol):
    """When, in microseconds."""

    start: float
    end: float


def count_on_cuda(works: Sequence[Work]) -> list[Counts]:
    """Profile each on the CUDA device, `REPEATS` times after a first time: medians of times, the most of each count."""
    for work in works:
        work.run()
    torch.cuda.synchronize()
    names = [f"{_MARK}{number}" for number in range(len(works) * REPEATS)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for name, work in zip(names, [work for work in works for _ in range(REPEATS)], strict=True):
            call = work.ready()
            torch.cuda.synchronize()
            with record_function(name):
                with record_function(name + _HOST):
                    call()
                    work.in_graph()
                torch.cuda.synchronize()
    each = counts_by_mark(names, profiled.events() or ())
    return [_together(each[start : start + REPEATS]) for start in range(0, len(each), REPEATS)]


def counts_by_mark(names: Sequence[str], events: Iterable[Event]) -> list[Counts]:
    """Counts of each marked range: what ran on the device within it, and what the host did within the range in it that
    ends before the device is waited for.
    """
    events = list(events)
    marks = {mark for name in names for mark in (name, name + _HOST)}
    spans = {e.name: e.time_range for e in events if e.name in marks and e.device_type == DeviceType.CPU}
    starts = [spans[name].start for name in names]
    on_device: list[list[Event]] = [[] for _ in names]
    syncs = [0] * len(names)
    for event in events:
        start = event.time_range.start
        number = bisect_right(starts, start) - 1
        if number < 0:
            continue
        if _is_work(event):
            if start < spans[names[number]].end:
                on_device[number].append(event)
        elif start < spans[names[number] + _HOST].end:
            syncs[number] += _is_wait(event.name)
    return [_counts(own, number) for own, number in zip(on_device, syncs, strict=True)]


def _counts(on_device: Sequence[Event], syncs: int) -> Counts:
    directions = ("Memcpy", "Memcpy HtoD", "Memcpy DtoH")
    copies, *hosts = (sum(event.name.startswith(name) for event in on_device) for name in directions)
    gpu_us = sum(event.time_range.end - event.time_range.start for event in on_device)
    return Counts(gpu_us, len(on_device) - copies, copies, syncs, *hosts)


def _together(counts: Sequence[Counts]) -> Counts:
    most = {field.name: max(getattr(each, field.name) for each in counts) for field in fields(Counts)}
    return replace(Counts(**most), gpu_us=median(each.gpu_us for each in counts))


def _is_work(event: Event) -> bool:
    """Whether it ran on the device; ranges are shown there too."""
    return event.device_type == DeviceType.CUDA and not event.name.startswith(_MARK)


def _is_wait(name: str) -> bool:
    """Whether a call of the driver or runtime waits: cudaStreamSynchronize and the like, and blocking copies."""
    return name.startswith("cu") and (name.endswith("Synchronize") or name == "cudaMemcpy")
