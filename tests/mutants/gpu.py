"""Graph mutants on recorded graphs and on CUDA graphs: does the model of a graph fail where the graph does?

    python -m tests.mutants.gpu --json docs/results/h200/mutants.json

Runs every graph mutant's killing cases on the CPU, and on a GPU if there is one, both with torch kernels. Each run has
a process of its own: a mutant may break a CUDA context.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path

import torch

from attn_backends import results
from attn_backends.conformance import Case, Outcome
from tests.mutants import MUTANTS, Mutant
from tests.mutants.matrix import CHECKS, candidates, read_kills, run_planted

TIMEOUT = 120


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
    context = multiprocessing.get_context("fork")
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


def smallest_graph_case(mutant: Mutant, check: str) -> Case:
    """What a mutant is run on that no search could run."""
    return next(case for case in candidates(mutant, CHECKS[check]) if case.path == "graph")


def rows() -> list[dict]:
    """One row for each graph mutant and each check that must kill it."""
    kills, found = read_kills(), []
    for mutant in MUTANTS.values():
        for check in mutant.killed_by if mutant.graph else ():
            case = kills[mutant.name][check] if mutant.name in kills else smallest_graph_case(mutant, check)
            cpu, cuda = outcome(mutant.name, case, "cpu"), outcome(mutant.name, case, "cuda")
            found.append(
                {"mutant": mutant.name, "check": check, "case": case.to_dict(), "cpu": cpu[0], "cuda": cuda[0]}
                | {"cpu_reason": cpu[1], "cuda_reason": cuda[1]}
            )
    return found


def main() -> int:
    """Write the rows; 1 if a mutant that could run in a graph of some sort was not caught there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, help="file to write")
    path = parser.parse_args().json
    found = rows()
    results.write(path, results.head(("python", "-m", "tests.mutants.gpu", *sys.argv[1:]), "cuda"), found)
    for row in found:
        print(f"{row['mutant']:36} {row['check']:28} cpu {row['cpu']:8} cuda {row['cuda']}")
    caught = (Outcome.FAIL, Outcome.NOT_RUN)
    return int(any(row[device] not in caught for row in found for device in ("cpu", "cuda")))


if __name__ == "__main__":
    sys.exit(main())
