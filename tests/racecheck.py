"""Whether racecheck finds races of our Gluon kernels in shared memory, and a barrier that was left out of each.

    python -m tests.racecheck --json docs/results/h200/racecheck.json

runs a small case of each kernel under compute-sanitizer's racecheck, as the kernel is and from copies of the package
that lack one barrier each. `hazards` are what racecheck reports, `other` says whether the copy gives other bits than
the kernel. Rows say not_run, and why, where the tool is missing or takes too long. Exit code 1: racecheck reports a
hazard of a kernel as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from attn_backends import results
from attn_backends.registry import get_backend
from tests.gluon_replays import CASES, problem_of
from tests.gpu.sanitize import SANITIZER

ROOT, PACKAGE = Path(__file__).parent.parent, "attn_backends"
LIMIT = 250  # seconds of a run
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
_RACE = re.compile(
    r"(?i)race reported between (\w+) access at .*? in (\S+)\n=+\s+and (\w+) access at .*? in ([^\s\[]+)"
)
KERNELS = {"gluon": ("trtllm_mla", "gluon", 8), "sparse": ("dsv4", "gluon", 8), "prefill": ("fa3", "gluon", 300)}
BARRIERS: dict[str, tuple[tuple[str, str], ...]] = {
    "gluon": (
        ("gluon_groups", "mbarrier.wait(full[0].index(ODD), phase)"),
        ("gluon_groups", "mbarrier.wait(free[0].index(0), phase)"),
        ("gluon_groups", "gl.thread_barrier()"),
    ),
    "sparse": (
        ("gluon_sparse", "mbarrier.wait(free[0].index(odd), phase)"),
        ("gluon_groups", "mbarrier.wait(full[0].index(ODD), phase)"),
    ),
    "prefill": (
        ("gluon_prefill_groups", "mbarrier.wait(full.index(step & 1), (step >> 1) & 1)"),
        ("gluon_prefill_groups", "mbarrier.wait(free[0].index(stage), phase)"),
    ),
}
"""Of each kernel, the modules and statements that are left out one by one, where they stand first."""


def without(folder: Path, module: str, statement: str) -> None:
    """A copy of the package in a folder, whose kernel module lacks a statement."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / PACKAGE / "kernels" / f"{module}.py"
    source = path.read_text(encoding="utf-8")
    assert statement in source, f"{module} has no {statement}"
    path.write_text(source.replace(statement, "pass", 1), encoding="utf-8")


def run_here(kernel: str, out: Path) -> None:
    """Write what a kernel gives on its case."""
    backend, name, width = KERNELS[kernel]
    format = next(each for *about, each, rows in CASES if about == [backend, name] and rows == width)
    asked = problem_of(format, width, torch.device("cuda"))
    torch.save(asked.call(get_backend(backend), name)(asked.pool.caches[0]).cpu(), out)


def raced(kernel: str, left_out: tuple[str, str] | None) -> dict[str, Any]:
    """The row of a kernel, or of a copy that lacks a statement of a module."""
    about = {"kernel": "/".join(KERNELS[kernel][:2]), "left_out": " ".join(left_out or ())}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("asked", "right")]
        if left_out:
            without(Path(folder), *left_out)
        try:
            done = _inside(kernel, outputs[0], Path(folder) if left_out else ROOT, [SANITIZER, "--tool", "racecheck"])
            _inside(kernel, outputs[1], ROOT, [])
        except (OSError, subprocess.TimeoutExpired) as error:
            return about | {"status": "not_run", "reason": results.without_folders(str(error))}
        found = _SUMMARY.search(done.stdout + done.stderr)
        if not found:
            said = (done.stdout + done.stderr).strip()[-300:]
            return about | {"status": "not_run", "reason": results.without_folders(said)}
        other = None
        if all(path.exists() for path in outputs):
            asked, right = map(torch.load, outputs)
            other = not torch.equal(asked, right)
    places = sorted({f"{one} {first}, {two} {second}" for one, first, two, second in _RACE.findall(done.stdout)})
    status = "fail" if places and not left_out else "pass"
    return about | {"status": status, "hazards": int(found[1]), "places": places, "other": other}


def _inside(kernel: str, out: Path, root: Path, tool: list[str]) -> subprocess.CompletedProcess[str]:
    """`run_here` in a process of its own, whose package is that of a folder."""
    inside = [sys.executable, "-m", "tests.racecheck", "--inside", kernel, "--json", str(out)]
    paths = os.pathsep.join([str(root), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    return subprocess.run([*tool, *inside], capture_output=True, text=True, timeout=LIMIT, check=False, env=environment)


def rows() -> Iterator[dict[str, Any]]:
    """Each kernel as it is, then without each of its barriers."""
    asked = [(kernel, each) for kernel in KERNELS for each in (None, *BARRIERS[kernel])]
    with ThreadPoolExecutor(len(asked)) as pool:
        yield from pool.map(lambda each: raced(*each), asked)


def main() -> int:
    """Write the rows; 1 if a kernel as it is has a hazard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, help="file to write")
    parser.add_argument("--inside", choices=tuple(KERNELS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        run_here(args.inside, args.json)
        return 0
    head, failed = results.head(("python", "-m", "tests.racecheck", *sys.argv[1:]), "cuda"), False
    with results.Recording(args.json, head, tool="compute-sanitizer --tool racecheck") as recording:
        for row in rows():
            recording.add(row)
            print(row, flush=True)
            failed |= row["status"] == "fail"
    recording.finish()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
