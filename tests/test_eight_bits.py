"""Kernels over 8-bit caches are timed on what the type holds, and one that does not run costs a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from benchmarks.rows import Stage
from benchmarks.shapes import Problem
from tests import eight_bits
from tests.gluon_sweep import Shape

SMALL = (Shape(576, 64, 16, 4, 2, 130), Shape(192, 16, 32, 40, 2, 80))


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


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_kernels_attend_the_rounded_cache_or_say_why_not(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.shapes.COLD_BYTES", 0)
    stage = Stage(torch.device("cpu"), RecordedGraph, Clock(), 2)
    row = eight_bits.measured(shape, stage)
    assert row["status"] == "fail"
    assert "runs on CUDA devices, not on cpu" in row["reason"]
    asked, call = list[Problem](), Problem.call

    def torch_call(self: Problem, backend: Any, kernel: str) -> Callable[..., torch.Tensor]:
        asked.append(self)
        return call(self, backend, "torch")

    monkeypatch.setattr(Problem, "call", torch_call)
    row = eight_bits.measured(shape, stage)
    assert row == {**shape._asdict(), "us": 1.0, "triton_us": 1.0, "bfloat16_us": 1.0, "speed": 1.0, "status": "pass"}
    types = [each.pool.caches[0].dtype for each in asked]
    assert types == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16]
