"""What a profile says of a call: ncu's raw page is read, and a machine without ncu is no failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from benchmarks.rows import Stage
from tests import profiles

SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
STALLS = [f"{profiles.STALL}{each}{profiles.PER_ISSUE}" for each in ("wait", "barrier")]
LINES = (
    ("ID", "Kernel Name", profiles.TIME, SM, *STALLS),
    ("", "", "us", "%", "inst", "inst"),
    ("0", "short", "1.5", "10.04", "1.00", "2.00"),
    ("1", "long", "1,500.26", "63.55", "2.154", "0.5"),
)
PAGE = "\n".join(["==PROF== Connected to process 1", *(",".join(f'"{word}"' for word in line) for line in LINES)])


class Clock:
    """A host's that goes on with every mark."""

    now = 0.0

    def mark(self) -> float:
        self.now += 1
        return self.now

    def wait(self) -> None:
        pass

    def microseconds(self, start: float, end: float) -> float:
        return end - start


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_the_longest_launch_and_all_of_a_raw_page_are_summed_up():
    launches = profiles.kernels_of(PAGE)
    assert [each["name"] for each in launches] == ["short", "long"]
    found = profiles.summary(launches)
    every = {"call_us": 1501.8, "launches": [("short", 1.5), ("long", 1500.3)]}
    longest = {"launch": "long", "us": 1500.3, "percent": {"sm": 63.5}, "waits": {"wait": 2.15, "barrier": 0.5}}
    assert found == longest | every
    assert profiles.kernels_of(PAGE.replace('"us"', '"ms"'))[0][profiles.TIME] == 1500.0
    assert profiles.kernels_of("==ERROR== no counters") == []


def test_without_ncu_a_row_says_so(monkeypatch):
    monkeypatch.setattr(profiles, "NCU", "/nowhere/ncu")
    row = profiles.profiled(0, "gluon")
    assert (row["status"], row["backend"], row["kernel"]) == ("not_run", "fa3", "gluon")
    assert "ncu" in row["reason"]


def test_launches_of_a_replay_have_their_times_and_the_idle_ones_before():
    """Two calls of two launches in each replay; the second call's later launch begins later."""
    calls = [100.0 * number for number in range(2 * profiles.TRACED)]
    found = [event("attend", start, start + 10) for start in calls]
    found += [event("merge", start + 12, start + 15) for start in calls]
    assert profiles.traced(reversed(found), 2) == [("attend", 10.0, 85.0), ("merge", 3.0, 2.0)]
    assert profiles.traced([], 2) == []


def test_replays_are_of_each_kernel_and_of_ours_without_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.shapes.COLD_BYTES", 0)
    monkeypatch.setattr(profiles, "events_of", lambda captured: [])
    stage = Stage(torch.device("cpu"), RecordedGraph, Clock(), 2)
    shape = profiles.Shape("trtllm_mla", ("torch", "torch"), 2, 100, 16, 1, latents=True)
    rows = list(profiles.replayed(shape, stage))
    assert [row["kernel"] for row in rows] == ["torch", "torch without pieces"]
    assert all(row["status"] == "replayed" and row["call_us"] > 0 and row["heads"] == 16 for row in rows)
    shape = profiles.Shape("fa3", ("torch",), 1, 100, 32, 100, 16, 64)
    assert [row["kernel"] for row in profiles.replayed(shape, stage)] == ["torch"]
