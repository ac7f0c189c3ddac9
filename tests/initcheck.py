"""initcheck over small eager cases, and a planted read of memory that nobody wrote, which it must report.

    python -m tests.initcheck --json docs/results/h200/initcheck.json

takes under 4 minutes: three processes at once, each ended after `--limit` seconds. Every tensor is an allocation of its
own, as for memcheck. The cases are of our kernels: of FlashMLA's it reports that the merge reads parts which nobody
wrote, in cases whose outputs are right. Scratch memory, which the library fills when it allocates it, is left as it was
allocated: a fill is a write to initcheck. The fault is planted in a copy of the packages: the merge reads parts that no
split wrote. The same case without the fault must be silent. Exit code 1: initcheck ended and did not report the planted
read, a kernel of ours reads what nobody wrote, or a case broke or none ran. Where compute-sanitizer is missing, refuses
the device, does not come to its end or had no room for reports, and reported nothing else, the row says not_run and
why, and does not make the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from attn_backends import results
from attn_backends.conformance import Case, Subject, run_case, selected_cases
from attn_backends.registry import get_backend, list_backends
from attn_backends.selection.providers import VENDOR_KERNELS
from spec_metadata.buffers import Layout
from tests.gpu.sanitize import PATHS, SANITIZER, memory_errors, run_cases

ROOT = Path(__file__).parent.parent
COPIED = ("spec_metadata", "attn_backends", "configs", "tests")
FAULT = (
    "attn_backends/kernels/triton_merge.py",
    "    _, _, num_parts = part_of(0, start, num_keys, num_splits, BLOCK_KEYS)\n",
    "    num_parts = num_splits\n",
)  # a file, what stands there, and what is planted
KERNEL = "_merge"  # which reads the parts
LONG, SHORT = 500, 100  # tokens of a request of many parts, and of one of few
FULL = r"errors were skipped|buffer overflow"  # said of reports that there was no room for
RUNS = ("cases", "right", "planted")


def copy_packages(folder: Path, *, planted: bool) -> None:
    """A copy of the packages, with the fault or without it."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "engines"))
    file, old, new = FAULT
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    if planted:
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")


def leave_scratch_unwritten() -> None:
    """From now on scratch of floats is allocated and not filled: a launch must write what it reads of it."""
    kernels = [kernel for name in list_backends() for kernel in get_backend(name).kernels]
    scratch = {spec.name for kernel in kernels for spec in kernel.scratch if spec.dtype.is_floating_point}
    fill = Layout.fill

    def filled(self: Layout, memory: torch.Tensor, views: dict[str, torch.Tensor]) -> None:
        if not {spec.name for spec in self.specs} <= scratch:
            fill(self, memory, views)

    Layout.fill = filled  # type: ignore[method-assign]


def split_case(subject: Subject) -> Case:
    """The smallest decode of a request of many parts beside one of few."""
    found = [case for case in selected_cases(subject, "scale.edges") if case.path == "eager" and case.kind == "decode"]
    fits = [case for case in found if case.lens and max(case.lens) >= LONG and min(case.lens) <= SHORT]
    return min(fits, key=lambda case: sum(case.lens))


def run_here(run: str, limit: float) -> list[dict]:
    """Rows of a run's cases in this process."""
    leave_scratch_unwritten()
    if run == "cases":
        return list(run_cases("eager", limit, VENDOR_KERNELS))
    subject = Subject(get_backend("fa3"), "triton", "cuda")
    case = split_case(subject)
    row = run_case(subject, case)
    torch.cuda.synchronize()
    about = {"backend": "fa3", "kernel": "triton", "case": case.name}
    return [about | {"status": str(row.status), "reason": results.without_folders(row.reason)}]


def under_initcheck(run: str, limit: float) -> dict:
    """A run in a process of its own under initcheck: its row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_packages(folder, planted=run == "planted")
        log, rows = folder / "log", folder / "rows.json"
        tool = [SANITIZER, "--tool", "initcheck", "--print-limit", "1000000", "--show-backtrace", "no"]
        tool += ["--log-file", str(log)]
        inside = [sys.executable, "-m", "tests.initcheck", "--inside", run, "--limit", str(limit), "--json", str(rows)]
        own = {"PYTHONPATH": os.pathsep.join([name, *sys.path[1:]]), "TRITON_CACHE_DIR": str(folder / "triton")}
        said = "initcheck said nothing"
        try:
            subprocess.run(
                [*tool, *inside], cwd=name, env=os.environ | PATHS["eager"] | own, timeout=limit, check=False
            )
        except OSError as error:
            said = f"{Path(SANITIZER).name}: {error.strerror}"
        except subprocess.TimeoutExpired:
            said = f"no end after {limit:.0f} s"
        ran = json.loads(rows.read_text()) if rows.exists() else []
        return judged(run, log.read_text(errors="replace") if log.exists() else "", said, ran)


def judged(run: str, log: str, said: str, ran: list[dict]) -> dict:
    """The row of a run. log: initcheck's. said: what ended it early. ran: the rows of its cases."""
    errors = memory_errors(log)
    ours = [error for error in errors if error["whose"] == "ours" and not re.search(FULL, error["what"])]
    ended = "ERROR SUMMARY" in log
    broken = [f"{row['kernel']} {row['case']}: {row['reason']}" for row in ran if row["status"] in ("error", "fail")]
    cases = [row for row in ran if row["status"] != "not_run"]
    if run == "planted" and any(error["kernel"].startswith(KERNEL) for error in ours):
        status, reason = "pass", f"the planted read was reported in {KERNEL}"
    elif not ended:
        status, reason = "not_run", "; ".join([said, *log.splitlines()[-2:]])
    elif run == "planted":
        status, reason = "fail", f"THE PLANTED READ WAS NOT REPORTED in {KERNEL}"
    else:
        read = [f"{error['count']} x {error['what']} in {error['kernel'] or 'no kernel'}" for error in ours]
        full = [error["what"] for error in errors if re.search(FULL, error["what"])]
        status = "fail" if read or broken or not cases else "not_run" if full else "pass"
        reason = "; ".join([*read, *broken, *full])
    kernels = sorted({f"{row['backend']}/{row['kernel']}" for row in cases})
    about = {"run": run, "status": status, "reason": reason, "cases": len(cases), "kernels": kernels}
    return about | {"errors": errors[:10]}


def main() -> int:
    """Run all at once, write the rows and print them; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--limit", type=float, default=200, metavar="SECONDS", help="of each process (%(default)s)")
    parser.add_argument("--inside", choices=RUNS, help="run its cases here, without initcheck; writes bare rows")
    args = parser.parse_args()
    if args.inside:
        args.json.write_text(json.dumps(run_here(args.inside, args.limit / 3)))
        return 0
    with ThreadPoolExecutor(len(RUNS)) as side_by_side:
        rows = list(side_by_side.map(under_initcheck, RUNS, [args.limit] * len(RUNS)))
    head = results.head(("python", "-m", "tests.initcheck", *sys.argv[1:]), "cuda")
    results.write(args.json, head, rows, tool="compute-sanitizer initcheck")
    for row in rows:
        print(f"{row['run']}: {row['status']}: {row['reason']} ({row['cases']} cases)", *row["errors"], sep="\n  ")
    return int(any(row["status"] == "fail" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
