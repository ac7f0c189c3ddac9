"""A run of the suite on one kernel that is shared out over processes, and that resumes where it was ended.

    python -m attn_backends.conformance.spread NAME --kernel gluon --device cuda --processes 14 --folder DIR --json FILE

Each process runs whole checks, or a share of one that has more cases than a process should run, and writes its report
to the folder. A report of this commit that is complete is not made again. FILE gets the joined summary
(`attn_backends.conformance.summary`). That of a whole run on a GPU has the floors, which are measured when all
processes are done. `wall_s` is how long the run took, if no process had left a report. Exit code 1: a case is wrong.
2: a case broke, none ran, or a process ended without a report.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from attn_backends import results
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.outcomes import Report
from attn_backends.conformance.runner import floors_of
from attn_backends.conformance.selection import selected_cases
from attn_backends.conformance.subjects import resolve
from attn_backends.conformance.summary import joined, summary
from attn_backends.errors import AttnBackendsError, ConfigError

COMMAND = "python -m attn_backends.conformance.spread"
ALL = "*"
WEIGHTS = {"scale.crossed": 6}  # its case takes as long as so many of another check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and write its report."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", metavar="NAME", help="a registered name or module:Class")
    parser.add_argument("--kernel", required=True, help="one of its kernels")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    parser.add_argument("--select", default=ALL, help="patterns of check ids, with commas; default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, required=True, help="of the processes' reports and what they print")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the joined report")
    args = parser.parse_args(arguments)
    try:
        report = spread(args)
    except (AttnBackendsError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    results.write_text(args.json, summary(report).to_json())
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts.items() if number)
    sys.stdout.write(f"{args.backend}/{args.kernel}: {counts}\n")
    return report.exit_code(require_run=True)


def spread(args: argparse.Namespace) -> Report:
    """The joined report of all processes, with every case. Raises ConfigError where one has no report."""
    args.folder.mkdir(parents=True, exist_ok=True)
    begin, is_first = time.monotonic(), not any(args.folder.glob("part*.json"))
    subject = Subject(resolve(args.backend), args.kernel, args.device)
    num_cases = Counter(case.check for case in selected_cases(subject, args.select))
    weights = Counter({check: number * WEIGHTS.get(check, 1) for check, number in num_cases.items()})
    parts = shares(weights, args.processes)
    with ThreadPoolExecutor(len(parts)) as pool:
        reports = list(pool.map(lambda part: _report(args, *part), enumerate(parts)))
    asked = f"{args.backend} --kernel {args.kernel} --device {args.device} --select '{args.select}'"
    command = f"{COMMAND} {asked} --processes {args.processes} --folder FOLDER --json FILE"
    whole = replace(joined([Report.of(report) for report in reports]), command=command)
    floors = floors_of([args.backend], args.kernel, args.device) if args.select == ALL else ()
    return replace(whole, floors=floors, wall_s=round(time.monotonic() - begin, 1) if is_first else 0.0)


def shares(num_cases: Counter[str], processes: int) -> list[list[str]]:
    """The selection of each process, all of about as many cases: ids of checks, or one id and a share of it."""
    most, left, found = max(2, num_cases.total() // processes), Counter(num_cases), list[list[str]]()
    for check, number in num_cases.most_common():
        parts = -(-number // most)
        if parts > 1 and len(found) + parts < processes:
            found += [[check, "--share", f"{part}/{parts}"] for part in range(1, parts + 1)]
            del left[check]
    return found + [[",".join(checks)] for checks in _evenly(left, processes - len(found))]


def _evenly(num_cases: Counter[str], processes: int) -> list[list[str]]:
    """Ids of checks for each process."""
    found: list[tuple[int, list[str]]] = [(0, []) for _ in range(min(processes, len(num_cases)))]
    for check, number in num_cases.most_common():
        least = min(range(len(found)), key=lambda index: found[index][0])
        found[least] = (found[least][0] + number, [*found[least][1], check])
    return [checks for _, checks in found]


def _report(args: argparse.Namespace, number: int, selected: Sequence[str]) -> results.Results:
    """What one process reported, now or before."""
    path = args.folder / f"part{number}.json"
    named = [args.backend, "--kernel", args.kernel, "--device", args.device, "--select", *selected]
    if not _is_done(path, named):
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "attn_backends.cli", "conformance", *named, "--json", str(path)]
        with path.with_suffix(".log").open("w") as log:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    if not _is_done(path, named, of_any_commit=True):
        said = path.with_suffix(".log").read_text(errors="replace").strip()[-500:]
        raise ConfigError(f"process {number} wrote no whole report to {path}; run this again. It said: {said}")
    sys.stderr.write(f"process {number} is done: {path}\n")
    return results.read(path)


def _is_done(path: Path, named: Sequence[str], *, of_any_commit: bool = False) -> bool:
    """Whether a file is the whole report of these arguments; of this commit, which a changed tree has none of."""
    try:
        found = results.read(path)
    except ConfigError:
        return False
    here = results.commit()
    is_own = found.head.commit == here and here != "unknown" and not here.endswith("+dirty")
    return found.is_complete and f"{' '.join(named)} --json" in found.head.command and (of_any_commit or is_own)


if __name__ == "__main__":
    sys.exit(main())
