"""How long a server waits for kernels of ours to be compiled, from an empty cache, and that no later batch waits.

    python -m tests.compile_times --json docs/results/h100/compile_times.json

takes some minutes on a GPU; `--only fa3/gluon` those of one kernel. Each kernel and number of heads has a process and a
cache of its own. What is planned and attended at `FIRST` batches is compiled; `LATER` batches must compile nothing.
Planners count too, as a server waits for them. Times are of one process, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from attn_backends import results
from attn_backends.registry import get_backend
from benchmarks.layers import DECODES, PREFILLS
from spec_metadata import StepKind

CONTEXT = 4096
FIRST, LATER = (1, 8, 32, 128), (3, 20, 100)
SERVERS = (
    *product(("trtllm_mla", "flashinfer_mla"), ("gluon", "triton"), (16, 128)),
    *(("fa3", "gluon_mla", heads) for heads in (16, 128)),
    ("fa3", "gluon", 32),
    *(("fa3", "triton", heads) for heads in (32, 64)),
    *product(("dsv4",), ("gluon", "triton"), (64, 128)),
)
LONGEST_S, ALL_S = 20.0, 90.0  # seconds asked of one kernel, and of all that a server runs


class Compiled:
    """Seconds by kernel: the longest of its forms, and how many forms."""

    def __init__(self) -> None:
        self.forms: dict[str, list[float]] = {}
        self._began = 0.0
        triton.knobs.runtime.jit_cache_hook = self._begin
        triton.knobs.runtime.jit_post_compile_hook = self._end

    def _begin(self, **given: Any) -> bool:
        self._began = time.perf_counter()
        return False  # Triton goes on and compiles

    def _end(self, *, fn: Any, **given: Any) -> bool:
        self.forms.setdefault(fn.name, []).append(round(time.perf_counter() - self._began, 2))
        return False

    @property
    def count(self) -> int:
        """Forms of all kernels."""
        return sum(map(len, self.forms.values()))


def attend(backend: str, kernel: str, heads: int, batch_sizes: tuple[int, ...]) -> None:
    """Plan and attend the benchmarks' decodes and verifies of all widths, or prompts on a kernel of those alone."""
    taken = get_backend(backend)
    able = next(each.capabilities for each in taken.kernels if each.name == kernel)
    problems = DECODES if StepKind.DECODE in able else PREFILLS
    for (format, make), bs in product(problems.items(), batch_sizes):
        if format in taken.formats:
            asked = (each for each in make(bs, CONTEXT, torch.device("cuda")) if each.layer.num_heads == heads)
            for problem in asked:
                problem.call(taken, kernel)(problem.pool.caches[0])
            torch.cuda.synchronize()


def measured(backend: str, kernel: str, heads: int) -> dict[str, Any]:
    """What one server compiles. Run with an empty cache."""
    compiled = Compiled()
    attend(backend, kernel, heads, FIRST)
    forms, count = {name: list(times) for name, times in compiled.forms.items()}, compiled.count
    attend(backend, kernel, heads, LATER)
    longest = {name.rpartition(".")[2]: max(times) for name, times in forms.items()}
    total, later = round(sum(map(sum, forms.values())), 1), compiled.count - count
    is_right = 0 < max(longest.values()) <= LONGEST_S and total <= ALL_S and not later
    return {
        "longest_s": longest,
        "forms": count,
        "all_s": total,
        "later": later,
        "status": "pass" if is_right else "fail",
    }


def rows(only: str) -> Iterator[dict[str, Any]]:
    """A row for each kernel and number of heads. only: of this kernel, as backend/kernel; of all if empty."""
    for backend, kernel, heads in (each for each in SERVERS if only in ("", "/".join(each[:2]))):
        place = {"backend": backend, "kernel": kernel, "heads": heads}
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "tests.compile_times", "--one", backend, kernel, str(heads)]
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        yield {**place, **(found or {"status": "fail", "reason": done.stderr[-500:]})}


def main() -> int:
    """Measure, write and print the rows; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--only", default="", metavar="BACKEND/KERNEL", help="of this kernel (default: all)")
    parser.add_argument("--one", nargs=3, metavar=("BACKEND", "KERNEL", "HEADS"), help="in this process alone")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one[0], args.one[1], int(args.one[2]))))
        return 0
    head = results.head(("python", "-m", "tests.compile_times", *sys.argv[1:]), "cuda")
    failed = 0
    with results.Recording(args.json, head) as recording:
        for row in rows(args.only):
            recording.add(row)
            print(*row.values(), flush=True)
            failed += row["status"] == "fail"
    recording.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
