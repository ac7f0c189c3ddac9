"""FlashMLA's schedules beside ours, as `python -m tests.gpu schedules` compares them, on a CPU and its stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from benchmarks import compressed
from benchmarks.rows import Stage
from tests import flashmla_sparse_stand_in, test_vendor_flashmla
from tests.gpu import schedules
from tests.vendor_stand_ins import install

STAND_INS = {"flashmla": test_vendor_flashmla.CALLS, "flashmla_sparse": flashmla_sparse_stand_in.CALLS}


class Turns:
    """A clock by which contenders take these times in every round, one after the other."""

    def __init__(self, times: list[float]) -> None:
        self.times, self.number = times, 0

    def mark(self) -> int:
        self.number += 1
        return self.number

    def wait(self) -> None:
        """Nothing is queued."""

    def microseconds(self, start: int, end: int) -> float:
        return self.times[(start // 2) % len(self.times)]


def rows_of(kernel: str, monkeypatch: pytest.MonkeyPatch, times: list[float]) -> list[dict[str, Any]]:
    """Rows of a kernel's smallest problems."""
    sizes = {"CONTEXT": 80, "SHORT": 20, "MANY": 3, "SOME": 2, "REPEATS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(schedules, name, value)
    monkeypatch.setattr(compressed, "COLD_BYTES", 1)
    install(monkeypatch, STAND_INS[kernel])
    make, both, *_, long = schedules.KERNELS[kernel]
    monkeypatch.setattr(schedules, "KERNELS", {kernel: (make, both, (1,), (2,), long and 300)})
    return list(schedules.rows("cpu", Stage(torch.device("cpu"), RecordedGraph, Turns(times), 1)))


@pytest.mark.parametrize("kernel", STAND_INS)
def test_attention_is_the_same_on_both_schedules(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of(kernel, monkeypatch, [10.0, 9.7, 2.0, 40.0])
    long = "1 x 300" if kernel == "flashmla" else "1 x 80"
    assert [row["problem"] for row in found] == ["1 x 80", "2 x 80", "3 x 80", f"{long}, 2 x 20", "2 random"]
    assert {(row["kernel"], row["is_partition"], row["status"]) for row in found} == {(kernel, True, "pass")}
    assert {(row["attention_us"], row["plan_us"], row["speed"]) for row in found} == {(5.0, 1.0, 0.97)}
    assert any(row["splits"] != row["vendors_splits"] for row in found), "both are one schedule"


def test_a_slower_schedule_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may be a little slower."""
    found = rows_of("flashmla", monkeypatch, [10.0, 9.6, 2.0, 40.0])
    assert [row["status"] for row in found] == ["pass", *["missed"] * 4]


@pytest.mark.parametrize("kernel", ["flashmla", pytest.param("flashmla_sparse", marks=pytest.mark.full)])
def test_a_schedule_that_leaves_keys_out_fails(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = schedules.KERNELS[kernel][1][0]
    refresh = ours.refresh

    monkeypatch.setattr(ours, "refresh", lambda self: (refresh(self), self.parts[0, 3].sub_(1)))
    found = rows_of(kernel, monkeypatch, [1.0])
    assert {(row["is_partition"], row["status"]) for row in found} == {(False, "fail")}
