"""What a case of the suite costs on a CPU: its seconds and its memory, in a table of groups.

    python -m tests.case_costs --json docs/results/case_costs.json [--quick] [--select 'scale.*'] [BACKEND ...]
    python -m tests.case_costs --json docs/results/case_costs.json --table

runs each case in a process of its own, forked from one that has imported what cases import. Seconds are of CPU time,
so a busy machine changes them little. Memory is the most that the process held, the imports included. A group's row
has the number of cases of all backends, of how many, their seconds, the slowest case and the most memory. Groups that
are measured replace their rows in the file. Exit code 1: a case took 5 s or 3 GB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from attn_backends import results
from attn_backends.conformance import Case, Selection, Subject, run_case, selected_cases
from attn_backends.conformance.catalogue import GROUPS, group_of
from attn_backends.registry import get_backend, list_backends

SECONDS, MEGABYTES = 5.0, 3000
WARM = "graph.equals_eager"  # a case of it imports what a graph needs


def cost(subject: Subject, case: Case) -> tuple[float, int]:
    """CPU seconds and most megabytes of a case, run in a forked process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(subject, case, theirs))
    process.start()
    found: tuple[float, int] = ours.recv()
    process.join()
    return found


def _run(subject: Subject, case: Case, answer: Connection) -> None:
    begin = time.process_time()
    run_case(subject, case)
    answer.send((time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))


def rows(names: list[str], selection: Selection) -> Iterator[dict]:
    """A row of each group, of all backends together."""
    subjects = [Subject(get_backend(name), "torch") for name in names]
    run_case(subjects[0], Selection(WARM).cases(subjects[0])[0])
    every = [(subject, case) for subject in subjects for case in selection.cases(subject)]
    for group in GROUPS:
        costs = [(*cost(*each), *each) for each in every if group_of(each[1].check) == group]
        if not costs:
            continue
        seconds, _, subject, case = max(costs, key=lambda each: each[0])
        yield {
            "group": group,
            "cases": len(costs),
            "of": sum(len(selected_cases(subject, f"{group}.*")) for subject in subjects),
            "seconds": round(sum(each[0] for each in costs), 1),
            "slowest": round(seconds, 2),
            "most_mb": max(each[1] for each in costs),
            "case": f"{subject.backend.name} {case.check} {case.name}",
        }


def table(found: list[dict]) -> str:
    """Rows as a table of Markdown."""
    lines = ["| group | cases | of | seconds | slowest case, s | most memory, MB |", "|---|---|---|---|---|---|"]
    names = ("group", "cases", "of", "seconds", "slowest", "most_mb")
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in found)])


def main() -> int:
    """Measure and write, or read; print the table. 1 if a case costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="default: all")
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--select", default="*", help="patterns of check ids, with commas between")
    parser.add_argument("--quick", action="store_true", help="three cases of each check")
    parser.add_argument("--table", action="store_true", help="print the file's table and measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = {row["group"]: dict(row) for row in results.read(args.json).rows} if args.json.exists() else {}
    if not args.table:
        for row in rows(args.backends or list_backends(), Selection(args.select, quick=args.quick)):
            print(*row.values(), flush=True)
            known[row["group"]] = row
        head = results.head(("python", "-m", "tests.case_costs", *sys.argv[1:]))
        results.write(args.json, head, [known[group] for group in GROUPS if group in known])
    found = [known[group] for group in GROUPS if group in known]
    print(table(found))
    return int(any(row["slowest"] >= SECONDS or row["most_mb"] >= MEGABYTES for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
