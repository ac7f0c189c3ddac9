"""The benchmark of eager layers, on the CPU with a clock that tells what is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.errors import BackendUnavailableError
from benchmarks import __main__, eager, shapes
from benchmarks.rows import Missing


class Ticks:
    """A clock that goes on by a microsecond with every look."""

    def __init__(self) -> None:
        self.ticks, self.waits = 0.0, 0

    def now(self) -> float:
        self.ticks += 1
        return self.ticks

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("backend", ["fa3", "trtllm_mla"])
def test_layers_are_timed_beside_a_scatter_and_a_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "COLD_BYTES", 0)
    monkeypatch.setattr(eager, "BATCH_SIZE", 1)
    monkeypatch.setattr(eager, "CONTEXT", 70)
    called = []
    row = eager.measure(
        backend, "torch", lambda asked, meta: ("nothing", called.append), torch.device("cpu"), Ticks(), 1, 2
    )
    assert (row.backend, row.kernel, row.layers, row.peer) == (backend, "torch", 2, "scatter and nothing")
    assert (row.layer_us, row.peer_us, row.over_us, row.metadata_us, row.loop_us) == (0.5, 0.5, 0.0, 1.0, 1.0)
    assert len(called) == 2 * 6, "a first time, and five in a round"
    assert not row.misses
    assert replace(row, over_us=61.0).misses
    assert replace(row, metadata_us=81.0).misses


def test_kernels_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(backend: str, kernel: str, *_: object) -> str:
        if kernel == "flashmla":
            raise BackendUnavailableError("flashmla", ["is not installed"])
        return kernel

    monkeypatch.setattr(eager, "measure", measure)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = list(eager.rows(1, ["trtllm_mla"]))
    assert isinstance(found[0], Missing)
    assert "is not installed" in found[0].reason
    assert found[1:] == ["triton"]


def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        return
    assert __main__.main(["eager"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err.replace("\n", " ")
