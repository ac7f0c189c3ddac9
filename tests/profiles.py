"""What our kernels and the vendors' wait for, where ours miss their bound: ncu over one call of each, and replays.

    python -m tests.profiles --json docs/results/h100/profiles.json

takes 5 minutes. A row has the longest launch of a call: its time under ncu, the shares of what units can do, in
percent, and for what its warps waited, in cycles between two instructions of a warp. Of tensor cores it has also the
multiprocessors that use them least and most. `launches` are all of the call, with their times, call_us the sum. Clocks
are not fixed (`--clock-control none`). Where ncu is missing or reads no counters, the rows say not_run and why.

Rows of status `replayed` are of CUDA graphs of the same call, which take turns: call_us of a whole one. Their
`launches` are by torch's profiler: each one's time, and for how long the device was idle before it. Of latents ours is
there once more, without pieces of long requests.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from attn_backends import results
from attn_backends.cache import CacheFormat
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.registry import get_backend
from attn_backends.selection.providers import VENDOR_KERNELS
from benchmarks.compressed import compressed_problems
from benchmarks.layers import Captured, capture, check_same
from benchmarks.rows import Stage
from benchmarks.shapes import LAYERS, PAGE_SIZE, fill_pool, problem
from benchmarks.timing import CudaClock, take_turns
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
ROUNDS, TRACED = 20, 5  # replays that are timed, and that torch's profiler looks at
WITHOUT = " without pieces"
PIECES = "attn_backends.kernels.{}.most_pieces"


class Shape(NamedTuple):
    """One attention call of a backend. width: query rows of a request. kernels: ours, then the vendor's. dim: elements
    of a key and a value, if they are not the benchmarks'. latents: MLA's cache, where ours is told without pieces, too.
    """

    backend: str
    kernels: tuple[str, ...]
    batch_size: int
    context: int
    heads: int
    width: int
    page_size: int = PAGE_SIZE
    dim: int = 0
    latents: bool = False


PROMPTS, SPARSE = ("gluon", "vllm_flash_attn"), ("gluon", "flashmla_sparse")
LATENTS = {"trtllm_mla": ("gluon", "flashmla"), "fa3": ("gluon_mla", "vllm_flash_attn")}
SHAPES = (
    Shape("fa3", PROMPTS, 1, 1024, 32, 1024),
    Shape("fa3", PROMPTS, 1, 32768, 32, 32768),
    Shape("fa3", PROMPTS, 1, 32768, 64, 32768),
    Shape("fa3", PROMPTS, 1, 32768, 32, 1024, 1, 128),
    Shape("fa3", PROMPTS, 1, 32768, 32, 32768, PAGE_SIZE, 256),
    Shape("dsv4", SPARSE, 128, 4096, 128, 1),
    Shape("dsv4", SPARSE, 1, 8192, 128, 8192),
    Shape("trtllm_mla", LATENTS["trtllm_mla"], 128, 32768, 128, 16, latents=True),
    *(Shape(name, LATENTS[name], size, 4096, 16, 1, latents=True) for name in LATENTS for size in (8, 32, 128)),
)


def asked_of(shape: Shape, device: torch.device) -> Any:
    """The problem of a shape."""
    if shape.backend == "dsv4":
        found: Iterator[Any] = compressed_problems([shape.width], shape.batch_size, shape.context, device)
    elif shape.dim:
        layer = AttentionLayer(0, shape.heads, 8, shape.dim, shape.dim, shape.dim**-0.5)
        lengths = Lengths("", [shape.width] * shape.batch_size, shape.context - shape.width)
        found = iter([problem(pool_of(layer, shape.page_size, lengths, device), layer, shape.width)])
    else:
        format = CacheFormat.LATENT if shape.latents else CacheFormat.KV
        layers = LAYERS[format]
        pool = fill_pool(layers[0], shape.batch_size, shape.context, device, [shape.width])
        found = (problem(pool, layer, shape.width) for layer in layers)
    return next(each for each in found if each.layer.num_heads == shape.heads)


def run_here(shape: Shape, kernel: str) -> None:
    """The call, twice; ncu looks at the second."""
    asked = asked_of(shape, torch.device("cuda"))
    call, cache = asked.call(get_backend(shape.backend), kernel), asked.pool.caches[0]
    call(cache)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call(cache)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def replayed(shape: Shape, stage: Stage) -> Iterator[dict[str, Any]]:
    """Rows of a shape's kernels in replays of graphs, each of one call on every cache of the pool."""
    asked, captured = asked_of(shape, stage.device), dict[str, Captured]()
    num_calls = len(asked.pool.caches)
    for kernel in shape.kernels:
        captured[kernel] = capture(asked.call(get_backend(shape.backend), kernel), asked.pool.caches, stage)
        if shape.latents and kernel not in VENDOR_KERNELS:
            modules = [patch(PIECES.format(name), lambda *sizes: 0) for name in ("triton_decode", "gluon_mla")]
            with modules[0], modules[1]:
                call = asked.call(get_backend(shape.backend), kernel)
                captured[kernel + WITHOUT] = capture(call, asked.pool.caches, stage)
    for each in captured.values():
        check_same(each.output, captured[shape.kernels[-1]].output)
    times = take_turns([each.graph.replay for each in captured.values()], stage.rounds, stage.clock)
    for (kernel, each), us in zip(captured.items(), times, strict=True):
        launches = traced(events_of(each), num_calls)
        yield about(shape, kernel) | {"status": "replayed", "call_us": round(us / num_calls, 2), "launches": launches}


def events_of(captured: Captured) -> list[Any]:
    """What runs on the device in some replays."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        for _ in range(TRACED):
            captured.graph.replay()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return [event for event in watched.events() or () if event.device_type.name == "CUDA"]


def traced(events: Iterable[Any], num_calls: int) -> list[tuple[str, float, float]]:
    """The launches of a call: names, times, and how long the device was idle before each, medians in microseconds.
    events: of `TRACED` replays of so many calls.
    """
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    idle = [start - end for (_, end, _), (start, *_) in pairwise(spans)]
    num = len(spans) // (TRACED * num_calls)
    return [
        (
            spans[place][2][:60],
            round(median(end - start for start, end, _ in spans[place::num]), 2),
            round(median(idle[(place or num) - 1 :: num] or [0.0]), 2),
        )
        for place in range(num)
    ]


def about(shape: Shape, kernel: str) -> dict[str, Any]:
    """What every row of a kernel says."""
    return {name: value for name, value in shape._asdict().items() if name != "kernels"} | {"kernel": kernel}


def profiled(number: int, kernel: str) -> dict[str, Any]:
    """The row of a kernel on a shape, from ncu in a process of its own."""
    place = about(SHAPES[number], kernel)
    options = [word for section in SECTIONS for word in ("--section", section)]
    tool = [NCU, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", *options]
    inside = [sys.executable, "-m", "tests.profiles", "--inside", str(number), kernel, "--json", os.devnull]
    try:
        done = subprocess.run([*tool, *inside], capture_output=True, text=True, timeout=LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return place | {"status": "not_run", "reason": str(error)}
    launches = kernels_of(done.stdout)
    if not launches:
        said = (done.stdout + done.stderr).strip().splitlines()[-3:]
        return place | {"status": "not_run", "reason": results.without_folders("; ".join(said))}
    return place | {"status": "pass"} | summary(launches)


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


def summary(launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The part of a call's numbers that a reader needs."""
    launch = max(launches, key=lambda each: each[TIME])
    shares = {name: round(launch[metric], 1) for name, metric in SHARES.items() if metric in launch}
    stalls = {
        name.removeprefix(STALL).removesuffix(PER_ISSUE): round(value, 2)
        for name, value in launch.items()
        if name.startswith(STALL) and name.endswith(PER_ISSUE)
    }
    most = sorted(stalls, key=lambda name: -stalls[name])[:4]
    return {
        "launch": launch["name"][:60],
        "us": round(launch[TIME], 1),
        "percent": shares,
        "waits": {name: stalls[name] for name in most},
        "call_us": round(sum(each[TIME] for each in launches), 1),
        "launches": [(each["name"][:60], round(each[TIME], 1)) for each in launches],
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
    stage = Stage(torch.device("cuda"), CudaGraph, CudaClock(), ROUNDS)
    head = results.head(("python", "-m", "tests.profiles", *sys.argv[1:]), "cuda")
    shapes = {number: SHAPES[number] for number in args.only or range(len(SHAPES))}
    by_ncu = (profiled(number, kernel) for number, shape in shapes.items() for kernel in shape.kernels)
    with results.Recording(args.json, head, tool="ncu") as recording:
        for row in chain(by_ncu, *(replayed(shape, stage) for shape in shapes.values())):
            recording.add(row)
            print(*row.items(), flush=True)
        recording.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
