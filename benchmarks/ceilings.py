"""What a device reaches at best, measured beside everything else: a copy of memory and a product of matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.rows import Stage
from benchmarks.shapes import DTYPE
from benchmarks.timing import take_turns

COPY_BYTES = 2**30  # many times the L2 of an H200
MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy_tb_per_s: bytes read and bytes written of a copy. matmul_tflop_per_s: of a square product in bfloat16."""

    copy_tb_per_s: float
    matmul_tflop_per_s: float

    def copy_us(self, num_bytes: int) -> float:
        """Time of a copy that reads and writes so many bytes together."""
        return num_bytes / self.copy_tb_per_s / 1e6


def measure_ceilings(stage: Stage) -> Ceilings:
    """Measure both, in turn."""
    source = torch.ones(COPY_BYTES // 2, dtype=DTYPE, device=stage.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPE, device=stage.device) for _ in range(2))
    graphs = [stage.make_graph(), stage.make_graph()]
    graphs[0].capture(lambda: torch.neg(source, out=target))  # a graph would leave a plain copy to slower engines
    graphs[1].capture(lambda: a @ b)
    copy_us, matmul_us = take_turns([graph.replay for graph in graphs], stage.rounds, stage.clock)
    return Ceilings(2 * COPY_BYTES / copy_us / 1e6, 2 * MATMUL_SIZE**3 / matmul_us / 1e6)
