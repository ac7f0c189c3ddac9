"""memcheck over every kernel that runs here: one small case of each kind of step, eagerly and in a graph.

    python -m tests.gpu.sanitize --json docs/results/h200/sanitizer.json

Sixteen processes share the cases; `--only fa3/gluon` has those of such kernels alone. Eager ones run without torch's
caching allocator, so that every tensor is an allocation of its own and a read past its end is seen; a graph needs the
allocator's pools. An error in a kernel of a vendor is listed under the vendor's name and is no error of ours as long as
conformance finds the vendor's metadata right. Numbers are conformance's affair, too: a case may fail here, but not
break. Exit code 1: an error of ours, a case that broke or a kernel that was not reached. Where compute-sanitizer is
missing or refuses the device, the result says not_run and why.
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
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, zip_longest
from pathlib import Path

import torch

from attn_backends import results
from attn_backends.conformance import Case, Subject, resolve_subjects, run_case, selected_cases
from attn_backends.registry import list_backends

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
PATHS, EACH = {"eager": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "graph": {}}, 8
PARTS = [f"{path}/{turn}" for path in PATHS for turn in range(EACH)]
VENDORS = {
    "FlashInfer": r"flashinfer",
    "FlashMLA": r"sm90::|smxx::|flash_?mla|mla_metadata",
    "FlashAttention-3": r"\bflash::|flash_fwd",
    "torch": r"\bat::|at_cuda_detail|\bcub::|cublas|gemm|distribution_",
}
_ERROR = re.compile(r"(?m)^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|\s)(?P<what>.+)\n=========\s+at (?P<where>.+)$")
_HEADING = re.compile(r"(?m)^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|\s)(?P<what>.+)\n(?!=========\s+at )")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def cases(subject: Subject, path: str) -> list[Case]:
    """The first case of each check of numbers, cache format and kind of step, chains and trees."""
    every = [case for case in selected_cases(subject, "math.*") if case.path == path]
    first = {(case.check, case.kind, case.format, case.topk > 1): case for case in reversed(every)}
    return list(first.values())


def run_cases(part: str, limit: float, left_out: Container[str] = (), only: Sequence[str] = ()) -> Iterator[dict]:
    """Rows of the cases of one path, kernel by kernel in turn; what `limit` seconds do not suffice for is not run.
    part: a path, or one of PARTS. left_out: kernels by name. only: kernels as backend/kernel; all if there are none.
    """
    (path, _, turn), start = part.partition("/"), time.monotonic()
    asked = (name.partition("/") for name in only or list_backends())
    found = [resolve_subjects(name, kernel or "auto", "cuda") for name, _, kernel in asked]
    subjects = [subject for here, _ in found for subject in here if subject.kernel not in left_out]
    for row in (row for _, absent in found for row in absent if turn in ("", "0")):
        about = {"backend": row.backend, "kernel": row.kernel, "check": row.check, "case": "", "path": path}
        yield about | {"status": "not_run", "reason": row.reason, "excused": row.excused}
    rounds = zip_longest(*([(subject, case) for case in cases(subject, path)] for subject in subjects))
    every = filter(None, chain.from_iterable(rounds))
    for subject, case in islice(every, int(turn), None, EACH) if turn else every:
        about = {"backend": subject.backend.name, "kernel": subject.kernel, "check": case.check, "case": case.name}
        if time.monotonic() - start > limit:
            yield about | {"path": path, "status": "not_run", "reason": f"{limit:.0f} s were over"}
            continue
        row = run_case(subject, case)
        torch.cuda.synchronize()
        yield about | {"path": path, "status": str(row.status), "reason": results.without_folders(row.reason)}


def memory_errors(log: str) -> list[dict]:
    """The errors that a log of memcheck names, by kernel: whose it is, what it did and how often."""
    found = Counter((match["what"], _kernel(match["where"])) for match in _ERROR.finditer(log))
    found.update((re.sub(r"0x[0-9a-f]+", "an address", match["what"]), "") for match in _HEADING.finditer(log))
    summary = _SUMMARY.search(log)
    unnamed = (int(summary[1]) if summary else 0) - found.total()
    if unnamed > 0:
        found["reported without a kernel", ""] = unnamed
    errors = (({"what": what, "count": n}, kernel) for (what, kernel), n in found.items())
    return [{"kernel": kernel, "whose": _whose(kernel), **error} for error, kernel in errors]


def _kernel(where: str) -> str:
    return re.sub(r"\+0x[0-9a-f]+.*|\s+in .*", "", where).strip()


def _whose(kernel: str) -> str:
    return next((vendor for vendor, name in VENDORS.items() if re.search(name, kernel)), "ours")


def under_memcheck(part: str, limit: float, words: Sequence[str]) -> tuple[list[dict], str]:
    """Run a part of this file's cases in a process of its own under memcheck; its rows, and memcheck's log. words: the
    command's.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, rows = Path(folder, "log"), Path(folder, "rows.json")
        tool = [SANITIZER, "--tool", "memcheck", "--report-api-errors", "no", "--log-file", str(log)]
        inside = [sys.executable, "-m", "tests.gpu.sanitize", *words, "--part", part, "--json", str(rows)]
        env = os.environ | PATHS[part.partition("/")[0]]
        try:
            done = subprocess.run([*tool, *inside], env=env, timeout=2 * limit + 60, check=False)
            said = f"exit code {done.returncode}"
        except OSError as error:
            said = f"{Path(SANITIZER).name}: {error.strerror}"
        except subprocess.TimeoutExpired as error:
            said = f"no end after {error.timeout:.0f} s"
        text = log.read_text(errors="replace") if log.exists() else ""
        return (json.loads(rows.read_text()) if rows.exists() else [], text or said)


def counted(rows: list[dict]) -> list[dict]:
    """Rows of cases that passed, as one for each check and path with their number; all others as they are."""
    same = Counter(tuple({**row, "case": ""}.items()) for row in rows if row["status"] == "pass")
    passed = [{**dict(row), "cases": number} for row, number in same.items()]
    return passed + [row for row in rows if row["status"] != "pass"]


def verdict(rows: list[dict], errors: list[dict], logs: Mapping[str, str]) -> tuple[str, str]:
    """pass, fail or not_run, and why. logs: memcheck's, by part."""
    if not any(row["status"] != "not_run" for row in rows):
        lines = [line for log in logs.values() for line in log.splitlines() if "COMPUTE-SANITIZER" not in line]
        return "not_run", results.without_folders("; ".join(lines[:3]) or "memcheck said nothing")
    ours = [error for error in errors if error["whose"] == "ours"]
    silent = [part for part, log in logs.items() if not _SUMMARY.search(log)]
    wanted = {(row["backend"], row["kernel"], row["path"]) for row in rows if not row.get("excused")}
    reached = {(row["backend"], row["kernel"], row["path"]) for row in rows if row["status"] != "not_run"}
    reasons = [f"{error['count']} x {error['what']} in {error['kernel'] or 'no kernel'}" for error in ours]
    reasons += [f"{row['kernel']} {row['case']}: {row['reason']}" for row in rows if row["status"] == "error"]
    reasons += [f"memcheck wrote no summary of the {part} cases" for part in silent]
    reasons += [f"{backend}/{kernel} was not reached, {path}" for backend, kernel, path in sorted(wanted - reached)]
    return ("fail" if reasons else "pass"), "; ".join(reasons)


def main() -> int:
    """Write the result; 1 if the verdict is fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of each process (300)")
    parser.add_argument("--only", nargs="+", default=(), metavar="BACKEND/KERNEL", help="run these alone")
    parser.add_argument("--part", choices=PARTS, help="run its cases here, without memcheck; writes bare rows")
    args = parser.parse_args()
    if args.part:
        args.json.write_text(json.dumps(list(run_cases(args.part, args.limit, only=args.only))))
        return 0
    with ThreadPoolExecutor(len(PARTS)) as side_by_side:
        found = list(side_by_side.map(lambda part: under_memcheck(part, args.limit, sys.argv[1:]), PARTS))
    rows = [row for own, _ in found for row in own]
    logs = {part: log for part, (_, log) in zip(PARTS, found, strict=True)}
    errors = [error for log in logs.values() for error in memory_errors(log)]
    status, reason = verdict(rows, errors, logs)
    head = results.head(("python", "-m", "tests.gpu.sanitize", *sys.argv[1:]), "cuda")
    said = {"tool": "compute-sanitizer memcheck", "status": status, "reason": reason, "errors": errors}
    results.write(args.json, head, counted(rows), **said)
    print(f"memcheck: {status}", reason, dict(Counter(row["status"] for row in rows)), *errors, sep="\n")
    return int(status == "fail")


if __name__ == "__main__":
    sys.exit(main())
