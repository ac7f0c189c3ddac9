"""What our kernels and the vendors' wait for, where ours miss their bound: ncu over one call of each.

    python -m tests.profiles --json docs/results/h100/profiles.json

takes 4 minutes. A row has the longest kernel of a call: its time under ncu, the shares of what units can do, in
percent, and for what its warps waited, in cycles between two instructions of a warp. Of tensor cores it has also the
multiprocessors that use them least and most. Clocks are not fixed (`--clock-control none`). Where ncu is missing or
reads no counters, the rows say not_run and why.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_backends import results
from attn_backends.cache import CacheFormat
from attn_backends.layer import AttentionLayer
from attn_backends.registry import get_backend
from benchmarks.compressed import compressed_problems
from benchmarks.shapes import LAYERS, PAGE_SIZE, fill_pool, problem
from tests.prompt_forms import Lengths, pool_of

NCU = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats")
TIME = "gpu__time_duration.sum"
STALL, PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor, least": "sm__pipe_tensor_cycles_active.min.pct_of_peak_sustained_elapsed",
    "tensor, most": "sm__pipe_tensor_cycles_active.max.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
}
LIMIT = 100  # seconds of a call


class Shape(NamedTuple):
    """One attention call of a backend. width: query rows of a request. kernels: ours, then the vendor's. dim: elements
    of a key and a value, if they are not the benchmarks'.
    """

    backend: str
    kernels: tuple[str, ...]
    batch_size: int
    context: int
    heads: int
    width: int
    page_size: int = PAGE_SIZE
    dim: int = 0


PROMPTS, SPARSE = ("gluon", "vllm_flash_attn"), ("gluon", "flashmla_sparse")
SHAPES = (
    Shape("fa3", PROMPTS, 1, 1024, 32, 1024),
    Shape("fa3", PROMPTS, 1, 32768, 32, 32768),
    Shape("fa3", PROMPTS, 1, 32768, 64, 32768),
    Shape("fa3", PROMPTS, 1, 32768, 32, 1024, 1, 128),
    Shape("fa3", PROMPTS, 1, 32768, 32, 32768, PAGE_SIZE, 256),
    Shape("dsv4", SPARSE, 128, 4096, 128, 1),
    Shape("dsv4", SPARSE, 1, 8192, 128, 8192),
    Shape("trtllm_mla", ("gluon", "flashmla"), 128, 32768, 128, 16),
    Shape("trtllm_mla", ("gluon", "flashmla"), 8, 4096, 16, 1),
    Shape("trtllm_mla", ("gluon", "flashmla"), 128, 4096, 16, 1),
)


def run_here(shape: Shape, kernel: str) -> None:
    """The call, twice; ncu looks at the second."""
    device = torch.device("cuda")
    if shape.backend == "dsv4":
        found: Iterator[Any] = compressed_problems([shape.width], shape.batch_size, shape.context, device)
    elif shape.dim:
        layer = AttentionLayer(0, shape.heads, 8, shape.dim, shape.dim, shape.dim**-0.5)
        lengths = Lengths("", [shape.width] * shape.batch_size, shape.context - shape.width)
        found = iter([problem(pool_of(layer, shape.page_size, lengths, device), layer, shape.width)])
    else:
        format = CacheFormat.KV if shape.backend == "fa3" else CacheFormat.LATENT
        layers = LAYERS[format]
        pool = fill_pool(layers[0], shape.batch_size, shape.context, device, [shape.width])
        found = (problem(pool, layer, shape.width) for layer in layers)
    asked: Any = next(each for each in found if each.layer.num_heads == shape.heads)
    call, cache = asked.call(get_backend(shape.backend), kernel), asked.pool.caches[0]
    call(cache)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call(cache)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiled(number: int, kernel: str) -> dict[str, Any]:
    """The row of a kernel on a shape, from ncu in a process of its own."""
    shape = SHAPES[number]
    about = shape._asdict() | {"kernels": None, "kernel": kernel}
    about = {name: value for name, value in about.items() if name != "kernels"}
    options = [word for section in SECTIONS for word in ("--section", section)]
    tool = [NCU, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", *options]
    inside = [sys.executable, "-m", "tests.profiles", "--inside", str(number), kernel, "--json", os.devnull]
    try:
        done = subprocess.run([*tool, *inside], capture_output=True, text=True, timeout=LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return about | {"status": "not_run", "reason": str(error)}
    launches = kernels_of(done.stdout)
    if not launches:
        said = (done.stdout + done.stderr).strip().splitlines()[-3:]
        return about | {"status": "not_run", "reason": results.without_folders("; ".join(said))}
    return about | {"status": "pass"} | summary(max(launches, key=lambda each: each[TIME]))


def kernels_of(text: str) -> list[dict[str, Any]]:
    """What ncu's raw page says of each launch: numbers by name of the metric, times in microseconds."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    found = []
    for row in rows[1:]:
        numbers: dict[str, Any] = {"name": row["Kernel Name"]}
        for name, value in row.items():
            try:
                numbers[name] = float(value.replace(",", ""))
            except (ValueError, AttributeError):
                continue
        numbers[TIME] *= {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}[rows[0][TIME].removesuffix("econd")]
        found.append(numbers)
    return found


def summary(launch: dict[str, Any]) -> dict[str, Any]:
    """The part of a launch's numbers that a reader needs."""
    shares = {name: round(launch[metric], 1) for name, metric in SHARES.items() if metric in launch}
    stalls = {
        name.removeprefix(STALL).removesuffix(PER_ISSUE): round(value, 2)
        for name, value in launch.items()
        if name.startswith(STALL) and name.endswith(PER_ISSUE)
    }
    most = sorted(stalls, key=lambda name: -stalls[name])[:4]
    return {"launch": launch["name"][:60], "us": round(launch[TIME], 1), "percent": shares} | {
        "waits": {name: stalls[name] for name in most}
    }


def main() -> int:
    """Profile all shapes, write the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="profile these shapes (default: all)")
    parser.add_argument("--inside", nargs=2, metavar=("SHAPE", "KERNEL"), help="run this call here, without ncu")
    args = parser.parse_args()
    if args.inside:
        run_here(SHAPES[int(args.inside[0])], args.inside[1])
        return 0
    rows = []
    for number in args.only or range(len(SHAPES)):
        for kernel in SHAPES[number].kernels:
            rows.append(profiled(number, kernel))
            print(*rows[-1].items(), flush=True)
    results.write(args.json, results.head(("python", "-m", "tests.profiles", *sys.argv[1:]), "cuda"), rows, tool="ncu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
