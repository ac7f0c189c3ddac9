"""Mutants on recorded graphs and on CUDA graphs: does the model of a graph fail where the graph does?

    python -m tests.mutants.gpu --json docs/results/h200/mutants.json
    python -m tests.mutants.gpu phases --json docs/results/h200/mutants_phases.json

Runs killing cases on the CPU, and on a GPU if there is one, both with torch kernels. `graphs` are the mutants that a
replay shows. `phases` are those of streams, of sets of phases, and of steps that are ragged, mixed, blocks or windowed;
where one kills, their case is a graph's. Each run has a process of its own: a mutant may break a CUDA context.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from attn_backends import results
from attn_backends.conformance import Case, Outcome
from tests.mutants import MUTANTS, Mutant
from tests.mutants.matrix import CHECKS, read_kills, run_planted, size, subject_of

TIMEOUT = 120
PHASES = {"blocks", "bound", "mixed", "ragged", "sets", "short_blocks", "streams", "windows"}
"""Modules of mutants."""
SETS: dict[str, Callable[[Mutant], bool]] = {
    "graphs": lambda mutant: mutant.graph and module_of(mutant) not in PHASES,
    "phases": lambda mutant: module_of(mutant) in PHASES,
}
MOST_TRIED = 24  # graph's cases of a check, smallest first
DEVICES, MOST_SAID = ("cpu", "cuda"), 90  # characters of a reason


def module_of(mutant: Mutant) -> str:
    """The module that plants it."""
    return mutant.plant.__module__.rpartition(".")[2]


def run_alone(name: str, case: Case, device: str, answers: multiprocessing.Queue) -> None:
    """Answer with (status, reason) of one planted case."""
    if device not in (MUTANTS[name].needs or (device,)):
        answers.put((str(Outcome.NOT_RUN), f"needs {', '.join(MUTANTS[name].needs)}"))
    elif device == "cuda" and not torch.cuda.is_available():
        answers.put((str(Outcome.NOT_RUN), "torch sees no CUDA device"))
    else:
        row = run_planted(MUTANTS[name], case, device)
        answers.put((str(row.status), row.reason))


def outcome(name: str, case: Case, device: str) -> tuple[str, str]:
    """The status and reason of a planted case, from a process of its own."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process could not use its CUDA
    answers = context.Queue()
    process = context.Process(target=run_alone, args=(name, case, device, answers))
    process.start()
    try:
        return answers.get(timeout=TIMEOUT)
    except Exception as error:
        return str(Outcome.ERROR), f"no answer: {type(error).__name__}"
    finally:
        process.kill()
        process.join()


def graph_cases(mutant: Mutant, check: str) -> Iterator[Case]:
    """A check's cases through graphs, smallest first, on the device that the mutant needs."""
    cases = CHECKS[check].cases(subject_of(mutant, "cuda" if "cuda" in mutant.needs else "cpu"))
    return (case for case in sorted(cases, key=size) if case.path == "graph")


def case_of(mutant: Mutant, check: str, known: Case | None) -> Case:
    """What a mutant is run on: a case through a graph if one kills here, of the known kind if one does, else the known
    one, by which it is killed.
    """
    if known is None:
        return next(graph_cases(mutant, check))
    if known.path == "graph":
        return known
    alike_first = sorted(graph_cases(mutant, check), key=lambda case: case.kind != known.kind)
    tried = islice(alike_first, MOST_TRIED)
    return next((case for case in tried if outcome(mutant.name, case, "cpu")[0] == Outcome.FAIL), known)


def row_of(mutant: Mutant, check: str, known: Case | None) -> dict[str, Any]:
    """What a check says of a mutant on both devices, the same reason once. known: case that kills it on the CPU."""
    case = case_of(mutant, check, known)
    cpu, cuda = ((status, reason[:MOST_SAID]) for status, reason in (outcome(mutant.name, case, on) for on in DEVICES))
    about = {"mutant": mutant.name, "check": check, "case": case.to_dict()}
    return about | {"cpu": cpu[0], "cuda": cuda[0], "cpu_reason": cpu[1], "cuda_reason": "" if cuda == cpu else cuda[1]}


def rows(chosen: str, processes: int) -> Iterator[dict[str, Any]]:
    """One row for each mutant of a set and each check that must kill it, in order, so many at a time."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.mutants.matrix"])  # starts no CUDA
    kills = read_kills()
    asked = [
        (mutant, check, kills.get(mutant.name, {}).get(check))
        for mutant in filter(SETS[chosen], MUTANTS.values())
        for check in mutant.killed_by
    ]
    pool = ThreadPoolExecutor(processes)
    try:
        yield from pool.map(lambda each: row_of(*each), asked)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupted run keeps what it has


def main() -> int:
    """Write the rows; 1 if a mutant that could run in a graph of some sort was not caught there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="?", choices=tuple(SETS), default="graphs", help="default: %(default)s")
    parser.add_argument("--json", required=True, type=Path, help="file to write")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="at a time (default: %(default)s)")
    args, survived = parser.parse_args(), 0
    head = results.head(("python", "-m", "tests.mutants.gpu", *sys.argv[1:]), "cuda")
    with results.Recording(args.json, head) as recording:
        for row in rows(args.chosen, args.processes):
            recording.add(row)
            print(f"{row['mutant']:36} {row['check']:28} cpu {row['cpu']:8} cuda {row['cuda']}", flush=True)
            survived += any(row[device] not in (Outcome.FAIL, Outcome.NOT_RUN) for device in ("cpu", "cuda"))
    recording.finish()
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
