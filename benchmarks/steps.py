"""What making the three steps of a speculative cycle costs the host, from tensors that an engine has.

    python -m benchmarks.steps --json FILE

On a GPU where there is one, else on the CPU. `us` is of one call after a wait, as `benchmarks metadata` times the rest
of a cycle. `hot_us` is the least of many calls without a wait. The loop of the calibration is timed along in both ways.
Exits with 1 if an operator was called, as every launch and allocation is one, or if a step took longer than
`MAX_STEP_US`. Steps with exact lengths on the host are exempt, because each length is checked.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends import results
from attn_backends.cli.consoles import output_console
from benchmarks.host import HostClock, WallClock, Work, calibration, nothing, take_host_turns
from benchmarks.speculation import Tables, speculative
from spec_metadata import BlockTable, Paging, Step, UniformQuery
from spec_metadata.layout import HostBounds

NUM_STEPS, CONTEXT, PAGE_SIZE = 3, 4096, 64
MAX_STEP_US = 5.0
TABLES, SLOTS, BOUNDS = ("request", "block"), ("given", "left out"), ("none", "max_committed", "seq_lens_cpu")
HOT_CALLS, HOT_ROUNDS = 200, 50


@dataclass(frozen=True, slots=True)
class StepsRow:
    """table, slots, bounds: what steps are made of, `calibration` for the loop. us, hot_us: of all three steps.
    operators: that torch was asked for.
    """

    table: str
    slots: str
    bounds: str
    batch_size: int
    us: float
    hot_us: float
    operators: int

    @property
    def misses(self) -> bool:
        """Whether it is not as cheap as it should be."""
        is_promised = self.table != "calibration" and self.bounds != "seq_lens_cpu"
        return self.operators > 0 or (is_promised and self.us > 3 * MAX_STEP_US)


class CpuClock(WallClock):
    """The time that passes where nothing runs beside the host."""

    def wait(self) -> None:
        """There is nothing to wait for."""


class Operators(TorchDispatchMode):
    """Counts what torch is asked for."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def make_steps(lens: Tensor, paging: Paging, slots: tuple[Tensor, Tensor] | None, host: HostBounds) -> list[Step]:
    """The three steps of a cycle. slots: of the draft, and of the verify and the extend."""
    drafted, verified = slots or (None, None)
    return [
        Step.draft_decode(1, NUM_STEPS, lens, paging, drafted, **host),
        Step.target_verify(NUM_STEPS + 1, lens, paging, verified, **host),
        Step.draft_extend(UniformQuery(NUM_STEPS + 1), lens, paging, verified, **host),
    ]


def cycles(batch_size: int, device: torch.device) -> Iterator[tuple[tuple[str, str, str], Callable[[], object]]]:
    """What makes the steps of a cycle, and from what."""
    tables = Tables.of(speculative(batch_size, CONTEXT, PAGE_SIZE, 1, NUM_STEPS), device)
    request = tables.paging(batch_size)
    block = BlockTable(request.pages(tables.capacity.max_pages).int(), tables.geometry)
    lens = torch.full((batch_size,), CONTEXT, dtype=torch.int32, device=device)
    given = [torch.arange(batch_size * num, device=device) for num in (NUM_STEPS, NUM_STEPS + 1)]
    bounds: dict[str, HostBounds] = {
        "none": {},
        "max_committed": {"max_committed": CONTEXT},
        "seq_lens_cpu": {"max_committed": CONTEXT, "seq_lens_cpu": [CONTEXT] * batch_size},
    }
    for table, slots, bound in product(TABLES, SLOTS, BOUNDS):
        own = (given[0], given[1]) if slots == "given" else None
        paging = request if table == "request" else block
        yield (table, slots, bound), partial(make_steps, lens, paging, own, bounds[bound])


def measured(batch_size: int, device: torch.device, rounds: int) -> list[StepsRow]:
    """The rows of a batch size, and of the loop that is timed along."""
    named = [*cycles(batch_size, device), (("calibration", "", ""), calibration().ready())]
    clock: HostClock = WallClock() if device.type == "cuda" else CpuClock()
    times = take_host_turns([Work(partial(_itself, call)) for _, call in named], [rounds] * len(named), clock)
    rows = []
    for (names, call), us in zip(named, times, strict=True):
        with Operators() as operators:
            call()
        num_calls = 1 if names[0] == "calibration" else HOT_CALLS
        hot_us = min(timeit.repeat(call, nothing, number=num_calls, repeat=HOT_ROUNDS)) / num_calls * 1e6
        rows.append(StepsRow(*names, batch_size, round(us, 2), round(hot_us, 2), operators.num))
    return rows


def _itself(call: Callable[[], object]) -> Callable[[], object]:
    return call


def main() -> int:
    """Measure all; 1 if something was not as cheap as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 32, 128], metavar="N")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, rows = output_console(), list[StepsRow]()
    for batch_size in arguments.batch_size:
        for row in measured(batch_size, device, arguments.rounds):
            rows.append(row)
            console.print("MISSED" if row.misses else "met", asdict(row))
    command = ["python", "-m", "benchmarks.steps", "--json", str(arguments.json)]
    results.write(arguments.json, results.head(command, device.type), [asdict(row) for row in rows])
    return int(any(row.misses for row in rows))


if __name__ == "__main__":
    sys.exit(main())
