"""Compare the fused planners and input copies with their definitions on a GPU, on thousands of batches, and time them.

    python -m tests.gpu.planners [--batches N] [--seconds N] [--only TEXT]

Every batch must be equal in every integer that a planner must write, and hold in all others what it held. A cycle is a
draft of 3 steps, a verify of 4 tokens and a draft extend; its GPU time is that of a graph of many, with the copies of
raw inputs, each from a step of its own; its host time that of the copies and launches themselves. Exits with 1 if a
batch differs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from attn_backends.graphs import CudaGraph
from attn_backends.kernels import triton_inputs
from attn_backends.metadata import WRITE_SLOTS
from spec_metadata import (
    BlockTable,
    CacheGeometry,
    Capacity,
    Extent,
    Paging,
    RequestTable,
    Step,
    StepKind,
    UniformQuery,
    allocate,
    input_specs,
    static_step,
)
from tests.plan_batches import KINDS, PACKED_KINDS, Case
from tests.planner_laws import FORMS, RINGS, Form, check_equal, check_inputs

DEVICE = torch.device("cuda")
PAGE_SIZES = (1, 16, 64, 256)
TABLES = (RequestTable, BlockTable)
CYCLES, ROUNDS = 20, 15
PHASES = (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)


def sizes_of(seed: int) -> dict[str, Any]:
    """Requests and context of a batch: small ones, and now and then a large one."""
    if seed % 25 == 24:
        return {"sizes": (128, 300, 512), "context": 700}
    return {"sizes": (1, 2, 3, 5, 9, 33), "context": (None, 2500)[seed % 20 == 9]}


def comparisons(seeds: range) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is compared, by name."""
    for name, form in FORMS.items():
        kinds = [kind for kind in KINDS if name != "block_table" or kind not in PACKED_KINDS]
        yield from _planned(name, form, kinds, PAGE_SIZES, seeds)
    for name in ("small", "real"):
        page_size, rings = RINGS[name]
        kinds = [kind for kind in KINDS if "tree" not in kind]
        yield from _planned(f"compressed {name}", rings.form, kinds, (page_size,), seeds)
    for seed in seeds:
        kind = [kind for kind in KINDS if kind not in PACKED_KINDS][seed % 6]
        options = {"form": TABLES[seed % 2], "pad": seed % 3, "device": DEVICE, **sizes_of(seed)}
        yield f"inputs {kind}", lambda k=kind, s=seed, o=options: _copied(k, s, o)


def _planned(
    name: str, form: Form, kinds: list[str], page_sizes: tuple[int, ...], seeds: range
) -> Iterator[tuple[str, Callable[[], None]]]:
    for seed in seeds:
        kind, page_size = kinds[seed % len(kinds)], page_sizes[seed // len(kinds) % len(page_sizes)]
        pad = 0 if kind in PACKED_KINDS else (0, 2, 1)[seed % 3]
        options = {"form": TABLES[seed // 2 % 2], "pad": pad, "device": DEVICE, **sizes_of(seed)}
        yield f"{name} {kind}", lambda k=kind, p=page_size, s=seed, o=options: check_equal(form, Case(k, p, s, **o))


def _copied(kind: str, seed: int, options: dict[str, Any]) -> None:
    case = Case(kind, PAGE_SIZES[seed % 4], seed, **options)
    check_inputs(case, case.step.bs + seed % 4)


def phase_step(kind: StepKind, lens: torch.Tensor, paging: Paging) -> Step:
    """A step of a cycle."""
    if kind is StepKind.DRAFT_DECODE:
        return Step.draft_decode(1, 3, lens, paging)
    if kind is StepKind.TARGET_VERIFY:
        return Step.target_verify(4, lens, paging)
    return Step.draft_extend(UniformQuery(4), lens, paging)


def timing(name: str, form: Form, page_size: int, bs: int, table: type, context: int = 4096) -> str:
    """GPU and host time of a cycle's planning at a capacity of 131072 tokens."""
    capacity = Capacity(bs, 131072, page_size, 1, 3, 4)
    num_pages = (context // page_size + 2) * bs + 1
    geometry = CacheGeometry(num_pages, page_size)
    pages = torch.zeros(bs + 1, capacity.max_pages, dtype=torch.int32, device=DEVICE)
    used = context // page_size + 2
    pages[1:, :used] = 1 + torch.randperm(bs * used, device=DEVICE).reshape(bs, used).int()
    paging: Paging = BlockTable(pages[1:], geometry)
    if table is RequestTable:
        slots = pages.unsqueeze(2) * page_size + torch.arange(page_size, device=DEVICE, dtype=torch.int32)
        paging = RequestTable(slots.flatten(1), torch.arange(1, bs + 1, device=DEVICE), geometry)
    lens = torch.full((bs,), context, dtype=torch.int32, device=DEVICE)
    copies, plans, steps = [], [], []
    for kind in PHASES:
        bucket = capacity.bucket(kind, bs)
        extent = Extent.of_bucket(bucket, capacity, num_pages)
        buffers = allocate((*input_specs(bucket, paging), WRITE_SLOTS, *form.specs), extent, DEVICE)
        static = static_step(bucket, paging, buffers)
        steps.append(phase_step(kind, lens, paging))
        copies.append(triton_inputs.bind_inputs(static)(steps[-1]))
        plans.append(form.bind(static, buffers))

    def copy_all() -> None:
        for copy, step in zip(copies, steps, strict=True):
            copy(step)

    def plan_all() -> None:
        for plan in plans:
            plan()

    parts = [lambda: (copy_all(), plan_all()), copy_all, plan_all, *plans]
    whole, copied, planned, *each = (gpu_us(part) for part in parts)
    phases = ", ".join(f"{kind} {us:.1f}" for kind, us in zip(PHASES, each, strict=True))
    host = f"host: copies {host_us(copy_all):.1f}, plans {host_us(plan_all):.1f}"
    return (
        f"{name} {table.__name__} page {page_size} bs {bs} context {context}: GPU {whole:.1f} us a cycle (copies "
        f"{copied:.1f}, plans {planned:.1f}: {phases}); {host}"
    )


def gpu_us(region: Callable[[], object]) -> float:
    """Microseconds of a region among many in a graph."""
    graph = CudaGraph()
    graph.capture(lambda: [region() for _ in range(CYCLES)])
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * start.elapsed_time(end) / CYCLES)
    return median(found)


def host_us(region: Callable[[], object]) -> float:
    """Microseconds until a region returns."""
    found = []
    for _ in range(ROUNDS * 4):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(10):
            region()
        found.append((perf_counter() - start) * 1e5)
    torch.cuda.synchronize()
    return median(found)


def timings() -> Iterator[str]:
    """All that is timed."""
    for bs in (32, 128):
        for table in TABLES:
            for name in ("block_table", "ragged"):
                yield timing(name, FORMS[name], 64, bs, table)
            yield timing("compressed", RINGS["real"][1].form, 256, bs, table)
    for name in ("ragged", "csr"):
        yield timing(name, FORMS[name], 1, 128, RequestTable)
    for context in (1024, 131000):
        yield timing("ragged", FORMS["ragged"], 64, 32, RequestTable, context)
        yield timing("compressed", RINGS["real"][1].form, 256, 32, RequestTable, context)


def main() -> int:
    """Run the comparisons, then the timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400, help="random batches of each planner")
    parser.add_argument("--only", default="", help="run the comparisons whose name has this text")
    parser.add_argument("--seconds", type=float, default=math.inf, help="compare no longer than this")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    num_batches = failed = 0
    in_turns = list(comparisons(range(arguments.batches)))
    Random(0).shuffle(in_turns)
    end = perf_counter() + arguments.seconds
    for name, compare in in_turns:
        if arguments.only not in name or perf_counter() > end:
            continue
        num_batches += 1
        try:
            compare()
        except Exception as error:  # the other batches are of interest all the same
            failed += 1
            print(name, type(error).__name__, str(error)[:500], flush=True)
    print(f"{num_batches} batches, {failed} failed", flush=True)
    for line in timings():
        print(line, flush=True)
    return int(failed > 0 or num_batches == 0)


if __name__ == "__main__":
    sys.exit(main())
