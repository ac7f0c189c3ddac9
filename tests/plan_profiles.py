"""What the planning launches of a cycle wait for: ncu over the plan of each phase, uniform and ragged.

    python -m tests.plan_profiles --json docs/results/h200/plan_profiles.json

takes 3 minutes. Rows are of `tests.profiles`: the longest launch of a phase's plan, and all of them. ncu runs a launch
alone and cold, so its times are longer than those of a graph (`benchmarks.plans`); shares and waits are what it is for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_backends import results
from attn_backends.registry import get_backend
from benchmarks import plans
from benchmarks.speculation import NUM_STEPS, PHASES, Batch, Tables, speculative
from tests.profiles import LIMIT, NCU, SECTIONS, kernels_of, summary

CONTEXT = 4096
VERIFIES = tuple(PHASES)[1:]


class Planned(NamedTuple):
    """A phase of a kernel's layer of so many heads, planned for so many requests."""

    backend: str
    kernel: str
    heads: int
    batch_size: int
    phase: str


KERNELS = (("fa3", "vllm_flash_attn", 32), ("dsv4", "flashmla_sparse", 64), ("flashinfer_mla", "flashinfer_fa3", 16))
ASKED = [
    Planned(*kernel, batch_size, phase)
    for kernel, batch_size in product(KERNELS, (32, 128))
    for phase in ("draft", *VERIFIES, *(plans.RAGGED[each] for each in VERIFIES))
]


def run_here(asked: Planned) -> None:
    """The plan, twice; ncu looks at the second."""
    device, backend = torch.device("cuda"), get_backend(asked.backend)
    capacity = speculative(asked.batch_size, plans.CAPACITY_CONTEXT, plans.PAGE_SIZES[asked.backend][0], 1, NUM_STEPS)
    batch = Batch.of(Tables.of(capacity, device), asked.batch_size, CONTEXT)
    shape = next(each for each in plans.layer_shapes(backend) if each.num_heads == asked.heads)
    chosen = dict.fromkeys(PHASES.values(), asked.kernel)
    make = partial(backend, capacity, batch.paging.geometry, device, kernel=chosen)
    (meta,) = plans.alone(make, shape, batch)[asked.phase]
    owner: Any = meta.owner
    owner.refresh(meta)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    owner.refresh(meta)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiled(asked: Planned) -> dict[str, Any]:
    """The row of a plan, from ncu in a process of its own."""
    options = [word for section in SECTIONS for word in ("--section", section)]
    tool = [NCU, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", *options]
    inside = [sys.executable, "-m", "tests.plan_profiles", "--inside", str(ASKED.index(asked)), "--json", os.devnull]
    try:
        done = subprocess.run([*tool, *inside], capture_output=True, text=True, timeout=LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return asked._asdict() | {"status": "not_run", "reason": str(error)}
    if launches := kernels_of(done.stdout):
        return asked._asdict() | {"status": "pass"} | summary(launches)
    said = (done.stdout + done.stderr).strip().splitlines()[-3:]
    return asked._asdict() | {"status": "not_run", "reason": results.without_folders("; ".join(said))}


def rows(processes: int) -> Iterator[dict[str, Any]]:
    """A row for each plan. ncu runs one launch at a time; what comes before it runs side by side."""
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(profiled, ASKED)


def main() -> int:
    """Profile all plans, write the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument("--inside", type=int, metavar="PLAN", help="run this plan here, without ncu")
    args = parser.parse_args()
    if args.inside is not None:
        run_here(ASKED[args.inside])
        return 0
    head = results.head(("python", "-m", "tests.plan_profiles", *sys.argv[1:]), "cuda")
    with results.Recording(args.json, head, tool="ncu") as recording:
        for row in rows(args.processes):
            recording.add(row)
            print(*row.items(), flush=True)
        recording.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
