"""Random worlds against the model until time or a number of batches is over.

    python -m tests.fuzz --seconds 60
    python -m tests.fuzz --batches 1000000 --device cuda --processes 8 --json FILE
    python -m tests.fuzz --world 7:3 --backend fa3 --planner torch --path replay     # what a mismatch told

Every batch is one step that is planned, eagerly or into a captured slot. A mismatch is told by the command that runs it
again. The exit code is 1 then, and for a legal step that was refused and an illegal one that was not. The seed is new
with each run, and printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from math import prod
from multiprocessing import get_context
from pathlib import Path
from secrets import randbelow
from typing import Any

from attn_backends import results
from tests.fuzz.driver import start
from tests.fuzz.run import Spec, Tally, run
from tests.fuzz.steps import BACKENDS, CELLS, PATHS, PLANNERS, SIZES

INTERPRETED = 0.002  # the share of batches of a planner that Triton's interpreter runs, beside one of another
MOST_LINES = 20  # mismatches after which it ends


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, help="how long (default: 60, without --batches)")
    parser.add_argument("--batches", type=int, help="how many batches in all, shared among what is fuzzed")
    parser.add_argument("--seed", type=int, help="of all worlds (default: a new one)")
    for name, choices in (("backend", BACKENDS), ("planner", PLANNERS), ("path", PATHS)):
        parser.add_argument(f"--{name}", choices=choices, help="this one alone")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kernel", help="of the attended batches (default: torch, and on a GPU auto)")
    parser.add_argument("--processes", type=int, default=1, help="side by side (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, written as it grows")
    parser.add_argument("--world", metavar="SEED:NUMBER", help="run one world of one backend, planner and path again")
    parser.add_argument("--keep", metavar="FIRST:END", help="of its steps, these alone")
    given = parser.parse_args(arguments)
    given.kernel = given.kernel or ("torch" if given.device == "cpu" else "auto")
    given.seed = randbelow(2**31) if given.seed is None else given.seed
    given.seconds = 60.0 if given.seconds is None and given.batches is None else given.seconds
    asked_for = (given.backend, given.planner, given.path)
    given.cells = [
        cell for cell in CELLS if all(asked in (None, own) for asked, own in zip(asked_for, cell, strict=True))
    ]
    if not given.cells or (given.world and len(given.cells) != 1):
        parser.error("there is no such planner, or --world lacks --backend, --planner and --path")
    return given


def worlds(given: argparse.Namespace, tally: Tally) -> Iterator[Spec]:
    """The next world each time, of what has had the fewest batches for its share, until it is enough."""
    begin, asked = time.monotonic(), Counter[tuple[str, str, str]]()
    share = {c: INTERPRETED if given.device == "cpu" and c[1] == "fused" else 1.0 for c in given.cells}
    number = 0
    while given.seconds is None or time.monotonic() - begin < given.seconds:
        if len(tally.mismatches) >= MOST_LINES:
            return
        done = Counter[tuple[str, ...]]()
        for (*cell, _), batches in tally.planned.items():
            done[tuple(cell)] += batches
        wanted = {c: (given.batches or 0) * share[c] / sum(share.values()) for c in given.cells}
        open_cells = [c for c in given.cells if given.batches is None or done[c] < wanted[c]]
        if not open_cells:
            return
        cell = min(open_cells, key=lambda c: (max(done[c], asked[c]) / share[c], -share[c]))
        spec = Spec(given.seed, number, *cell, given.device, given.kernel)
        asked[cell] = max(asked[cell], done[cell]) + prod(spec.num_steps)  # until it is counted
        yield spec
        number += 1


def tallies(given: argparse.Namespace, tally: Tally) -> Iterator[Tally]:
    """What each world found, as they come."""
    if given.processes == 1:
        start(given.device)
        yield from map(run, worlds(given, tally))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    running: set[Future[Tally]] = set()
    with ProcessPoolExecutor(given.processes, get_context("spawn"), start, (given.device,)) as pool:
        for spec in worlds(given, tally):
            running.add(pool.submit(run, spec))
            while len(running) >= 2 * given.processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
        yield from (each.result() for each in running)


def rows(tally: Tally) -> list[dict[str, Any]]:
    """A row for each backend, planner and path."""
    found = []
    for cell in CELLS:
        kinds = {kind: n for (*own, kind), n in sorted(tally.planned.items()) if tuple(own) == cell}
        attended = sum(n for (*own, _), n in tally.attended.items() if tuple(own) == cell)
        if kinds:
            names = dict(zip(("backend", "planner", "path"), cell, strict=True))
            found.append({**names, "batches": sum(kinds.values()), "attended": attended, "kinds": kinds})
    return found


def write(given: argparse.Namespace, tally: Tally, seconds: float) -> None:
    """Write the result so far."""
    sizes: dict[str, dict[str, int]] = {}
    for (what, size), n in sorted(tally.sizes.items(), key=lambda item: (item[0][0], int(item[0][1] or 0))):
        sizes.setdefault(what, {})[size] = n
    illegal: dict[str, dict[str, int]] = {}
    for (kind, name, outcome), n in sorted(tally.illegal.items()):
        illegal.setdefault(f"{kind}, {outcome}", {})[name] = n
    own = {
        "seed": given.seed,
        "seconds": round(seconds, 1),
        "batches": tally.planned.total(),
        "attended": tally.attended.total(),
        "mismatches": tally.mismatches[:MOST_LINES],
        "illegal_wrong": sorted(tally.wrong),
        "refused_legal": {f"{error}: {words}": n for (error, words), n in tally.refused.most_common(MOST_LINES)},
        "illegal": illegal,
        "drawn_from": {
            name: dict(zip(map(str, each), weights, strict=True)) for name, (each, weights) in SIZES.items()
        },
        "sizes": sizes,
    }
    command = ["python", "-m", "tests.fuzz", *sys.argv[1:]]
    results.write(given.json, results.head(command, given.device), rows(tally), **own)


def main(arguments: list[str] | None = None) -> int:
    """Fuzz; 1 if the library and the model differ."""
    given = parsed(arguments)
    tally, begin, written = Tally(), time.monotonic(), 0.0
    results.check_output("--json", given.json)
    if given.world:
        start(given.device)
        seed, number = map(int, given.world.split(":"))
        keep = tuple(map(int, given.keep.split(":"))) if given.keep else None
        found: Iterator[Tally] = iter([run(Spec(seed, number, *given.cells[0], given.device, given.kernel, keep))])
    else:
        print(f"seed {given.seed}", flush=True)
        found = tallies(given, tally)
    for each in found:
        for line in tally.add(each):
            print(line, flush=True)
        if given.json and time.monotonic() - written > 5:
            written = time.monotonic()
            write(given, tally, written - begin)
    seconds = time.monotonic() - begin
    if given.json:
        write(given, tally, seconds)
    for row in rows(tally):
        print("{backend:15} {planner:6} {path:7} {batches:9,} batches {attended:7,} attended".format(**row))
    for (error, words), n in tally.refused.most_common(5):
        print(f"{n} legal steps refused, {error}: {words}")
    print(
        f"{tally.planned.total():,} batches, {tally.planned.total() / max(seconds, 1e-3):,.0f} a second; "
        f"{tally.attended.total():,} attended, {tally.illegal.total():,} illegal tried; {tally.refused.total()} legal "
        f"ones refused, {len(tally.wrong)} illegal classes wrong, {len(tally.mismatches)} mismatches; seed {given.seed}"
    )
    return int(bool(tally.mismatches or tally.refused or tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
