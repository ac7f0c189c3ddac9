"""The part of a GPU's results that counts the host's waits and copies in a cycle, on a CPU in the device's place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._C._autograd import DeviceType

from attn_backends.graphs import RecordedGraph
from attn_backends_reference.eagle import launches
from attn_backends_reference.eagle.worker import EagleWorker
from benchmarks.rows import Stage
from benchmarks.speculation import NUM_STEPS
from benchmarks.timing import CudaClock
from tests.counts import Counts, counts_by_mark
from tests.gpu.syncs import (
    CONTEXT,
    PLACES,
    PLANNINGS,
    Place,
    backends_of,
    counted,
    cycles,
    setting_of,
    worker_of,
)
from tests.host_traffic import HostTraffic
from tests.test_counts import event, on_device

STAGE = Stage(torch.device("cpu"), RecordedGraph, CudaClock(), rounds=1)
PLACE = PLACES[2]
LAUNCH, READ = Counts(9.0, 80, 9, 0, to_device=1, to_host=2), Counts(0.0, 0, 0, 1)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def traffic(monkeypatch):
    """The probe of a CPU."""
    return HostTraffic(monkeypatch)


def rows_of(probe, place=PLACE):
    return list(counted(STAGE, probe, ("auto",), (replace(place, vendors=()),)))


def test_a_vendors_kernel_that_is_not_here_is_told():
    found = list(counted(STAGE, lambda works: [LAUNCH, READ], (), PLACES))
    assert [(row["kernel"], row["status"]) for row in found[::2]] == [
        ("flashinfer_fa3", "not_run"),
        ("flashmla", "not_run"),
        ("vllm_flash_attn", "not_run"),
        ("flashmla_sparse", "not_run"),
    ]
    assert all("can't run here" in row["reason"] for row in found)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.backend}-{place.cache_dtype}")
@pytest.mark.one_in(2)
def test_a_cycle_waits_for_nothing(place: Place, traffic):
    found = rows_of(traffic.probe, place)
    assert [(row["topk"], row["planning"]) for row in found] == [(k, p) for k in place.topks for p in PLANNINGS]
    for row in found:
        assert (row["status"], row["backend"], row["kernel"]) == ("pass", place.backend, "torch"), row
        assert row["host_lag"] == 1


@pytest.mark.parametrize("planning", PLANNINGS)
def test_cycles_run_through_graphs_from_the_same_lengths(planning):
    setting = setting_of(PLACE, 1, STAGE)
    (backend,) = backends_of(setting, ["auto"]).values()
    worker = worker_of(setting, backend, planning)
    for work in (*cycles(worker), *cycles(worker)):
        work.run()
        assert (worker._lens[worker.rows] > CONTEXT).all()
        assert (worker._lens[worker.rows] <= CONTEXT + NUM_STEPS + 1).all()
    assert (worker.num_graph_steps, worker.num_eager_steps) == ({"draft": 4, "verify": 4, "draft_extend": 4}, {})


def reads(self, rows, committed, cycle=EagleWorker.cycle):
    self._lens[rows[0]].item()
    return cycle(self, rows, committed)


def sends_twice(self, rows, committed, cycle=EagleWorker.cycle):
    self._index(rows)
    return cycle(self, rows, committed)


def fetches_a_third(self, rows, committed, cycle=EagleWorker.cycle):
    launches.HostCopy(self._lens)
    return cycle(self, rows, committed)


DEFECTS = {reads: "waits_to_launch 1, not 0", sends_twice: "copies_to_device 2, not 1",
           fetches_a_third: "copies_to_host 3, not 2"}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_one_too_many_fails(defect, traffic, monkeypatch):
    monkeypatch.setattr(EagleWorker, "cycle", defect)
    assert {(row["status"], row["reason"]) for row in rows_of(traffic.probe)} == {("fail", DEFECTS[defect])}


@pytest.mark.parametrize(
    ("launch", "read", "reason"),
    [
        (LAUNCH, replace(READ, syncs=2), "waits_to_read 2, not 1"),
        (replace(LAUNCH, to_host=0), replace(READ, syncs=0), "waits_to_read 0, not 1; copies_to_host 0, not 2"),
    ],
)
def test_a_second_wait_and_a_profiler_that_saw_nothing_fail(launch, read, reason):
    assert {row["status"] for row in rows_of(lambda works: [LAUNCH, READ])} == {"pass"}
    assert {row["reason"] for row in rows_of(lambda works: [launch, read])} == {reason}


def test_a_launch_is_read_with_one_wait(monkeypatch):
    """Tokens and counts go to the host behind each other, so there is one event to wait for."""
    order = []

    class Event:
        record, synchronize = (partial(order.append, name) for name in ("record", "synchronize"))

    class OnDevice(torch.Tensor):
        is_cuda = True

    def pinned(*sizes, dtype, pin_memory):
        assert pin_memory
        return torch.zeros(*sizes, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    tokens, counts = (torch.tensor(x).as_subclass(OnDevice) for x in ([[5, 6], [7, 8]], [2, 1]))
    monkeypatch.setattr(launches.torch, "empty", pinned)
    launch = launches.Launch(tokens, counts, launches.Timings(torch.device("cpu")))
    assert order == ["record"]
    assert launch.read()[0] == [[5, 6], [7]]
    assert order == ["record", "synchronize"]


def test_copies_of_the_host_are_told_from_those_of_the_device():
    def copy(kind):
        return on_device(f"Memcpy {kind}", 11, 12)

    events = [
        event("mark", 10, 20),
        event("mark, host", 10, 20),
        *map(copy, ("HtoD (Pinned -> Device)", "DtoH (Device -> Pinned)")),
    ]
    events += [copy("DtoH (Device -> Pageable)"), copy("DtoD (Device -> Device)")]
    assert all(each.device_type is DeviceType.CUDA for each in events[2:])
    assert counts_by_mark(["mark"], events) == [Counts(4, 0, 4, 0, to_device=1, to_host=2)]
