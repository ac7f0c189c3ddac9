"""initcheck over small eager cases, racecheck over our Gluon kernels, and a planted fault that each must report.

    python -m tests.device_faults --json docs/results/h200/sanitizer_faults.json

takes under 150 s, because each process of it is ended after `--limit` seconds. A fault is planted in a copy of the
packages: the merge reads parts that no split wrote, or a Gluon kernel reads shared memory before another group wrote
it. Exit code 1: an error in a kernel of ours, a planted fault that was not reported in its kernel, or a broken case.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from attn_backends import results
from tests.gpu.sanitize import PATHS, SANITIZER, memory_errors

ROOT = Path(__file__).parent.parent
COPIED = ("spec_metadata", "attn_backends", "configs", "tests")


@dataclass(frozen=True)
class Job:
    """One case of a kernel under a tool. check, most, least: the shortest decode or prefill of the check with a context
    of `most` tokens or more beside one of `least` or fewer. edit: a file, what stands there once, and what is planted.
    at: the kernel that the tool must name then.
    """

    tool: str
    backend: str
    kernel: str
    check: str
    edit: tuple[str, str, str]
    at: str
    most: int = 0
    least: int = 1 << 20

    def planted(self, folder: Path) -> None:
        """Write a copy of the packages with the fault."""
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "engines"))
        file, old, new = self.edit
        text = (ROOT / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")


KERNELS = "attn_backends/kernels"
JOBS = {
    "unwritten part": Job(
        "initcheck", "fa3", "triton", "scale.edges",
        (f"{KERNELS}/triton_merge.py", "    _, _, num_parts = part_of(", "    num_parts = num_splits\n    part_of("),
        "_merge", 1000, 100,
    ),
    "latents": Job(
        "racecheck", "trtllm_mla", "gluon", "math.decode",
        (f"{KERNELS}/gluon_groups.py", "    mbarrier.wait(handed.index(1), pairs & 1)\n", ""),
        "_attend",
    ),
    "prompts": Job(
        "racecheck", "fa3", "gluon", "math.prefill",
        (
            f"{KERNELS}/gluon_prefill_groups.py",
            "        kv_head, first, width, row, num_keys, end = _tile(tiles)  # again, as it would be spilled "
            "in between\n"
            "        signal(free.index(4))\n",
            "        signal(free.index(4))\n        kv_head, first, width, row, num_keys, end = _tile(tiles)\n",
        ),
        "_paged_attention",
    ),
}  # fmt: skip
_RACE = re.compile(r"(?m)^========= (?P<what>(?:Error|Warning): .*?(?:Race|hazard).*?) at (?P<where>\S+)")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: ")


def run_case_of(name: str) -> dict[str, str]:
    """Run a job's case here; what came of it."""
    from attn_backends.conformance import Subject, run_case, selected_cases
    from attn_backends.kernels import paged_operators
    from attn_backends.registry import get_backend

    job = JOBS[name]
    paged_operators.FEW_ROWS = 0  # small cases are for the Gluon kernel, too
    subject = Subject(get_backend(job.backend), job.kernel, "cuda")
    kinds = ("decode", "prefill")
    found = [case for case in selected_cases(subject, job.check) if case.path == "eager" and case.kind in kinds]
    fits = [case for case in found if case.lens and max(case.lens) >= job.most and min(case.lens) <= job.least]
    case = min(fits, key=lambda case: max(case.lens))
    row = run_case(subject, case)
    return {"case": case.name, "outcome": str(row.status), "why": results.without_folders(row.reason)}


def races(log: str) -> list[dict]:
    """What a log of racecheck names, by kernel."""
    found = ((match["what"], re.sub(r"\+0x.*", "", match["where"])) for match in _RACE.finditer(log))
    return [{"kernel": kernel, "whose": "ours", "what": what} for what, kernel in found]


def under(tool: str, inside: list[str], folder: Path, limit: float) -> tuple[str, str]:
    """A tool's log of a module of a folder, and what ended it if it did not end by itself."""
    log = folder / f"{tool}.log"
    command = [SANITIZER, "--tool", tool, "--log-file", str(log), sys.executable, "-m", *inside]
    own = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path[1:]]), "TRITON_CACHE_DIR": str(folder / "triton")}
    said = ""
    try:
        subprocess.run(command, cwd=folder, env=os.environ | PATHS["eager"] | own, timeout=limit, check=False)
    except OSError as error:
        said = f"{Path(SANITIZER).name}: {error.strerror}"
    except subprocess.TimeoutExpired:
        said = f"no end after {limit:.0f} s"
    return log.read_text(errors="replace") if log.exists() else "", said


def judged(job: Job, planted: bool, log: str, said: str, outcome: str) -> tuple[str, str, list[dict]]:
    """The status of a run, why, and what the tool named. outcome: of the case; empty if it did not get there."""
    errors = races(log) if job.tool == "racecheck" else memory_errors(log)
    ours = [error for error in errors if error["whose"] == "ours"]
    if not log:
        return "not_run", said or f"{job.tool} said nothing", errors
    if planted:
        seen = any(error["kernel"].startswith(job.at) for error in ours)
        return ("pass", "", errors) if seen else ("fail", said or f"nothing was reported in {job.at}", errors)
    if not _SUMMARY.search(log):
        return "not_run", said or "; ".join(log.splitlines()[:3]) or f"{job.tool} said nothing", errors
    if ours or outcome in ("error", ""):
        return "fail", "; ".join(f"{error['what']} in {error['kernel']}" for error in ours) or "the case broke", errors
    return "pass", "", errors


def run_job(name: str, planted: bool, limit: float) -> dict:
    """The row of a job, with its fault or without it."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        job.planted(place)
        if not planted:
            shutil.copyfile(ROOT / job.edit[0], place / job.edit[0])
        log, said = under(job.tool, ["tests.device_faults", "--inside", name, "--json", "row.json"], place, limit)
        ran = json.loads((place / "row.json").read_text()) if (place / "row.json").exists() else {}
    status, reason, errors = judged(job, planted, log, said, ran.get("outcome", ""))
    about = {"tool": job.tool, "backend": job.backend, "kernel": job.kernel, "planted": name if planted else ""}
    return about | ran | {"status": status, "reason": reason, "errors": errors[:10]}


def run_many(limit: float) -> dict:
    """The row of initcheck over the eager cases that `tests.gpu.sanitize` has, as many as there is time for."""
    job = Job("initcheck", "", "", "", ("", "", ""), "")
    inside = ["tests.gpu.sanitize", "--path", "eager", "--limit", str(limit / 2)]
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            (Path(folder) / name).symlink_to(ROOT / name)
        log, said = under("initcheck", [*inside, "--json", "rows.json"], Path(folder), limit)
        file = Path(folder, "rows.json")
        rows = json.loads(file.read_text()) if file.exists() else []
    ran = [row for row in rows if row["status"] != "not_run"]
    broke = any(row["status"] == "error" for row in ran)
    status, reason, errors = judged(job, False, log, said, "pass" if ran and not broke else "error")
    reached = sorted({f"{row['backend']}/{row['kernel']}" for row in ran})
    about = {"tool": "initcheck", "cases": len(ran), "kernels": reached, "planted": ""}
    return about | {"status": status, "reason": reason, "errors": errors[:10]}


def main() -> int:
    """Run all at once and write rows as they come; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--limit", type=float, default=130, metavar="SECONDS", help="of each process (%(default)s)")
    parser.add_argument("--inside", choices=tuple(JOBS), help="run its case here, without a tool; writes a bare row")
    args = parser.parse_args()
    if args.inside:
        args.json.write_text(json.dumps(run_case_of(args.inside)))
        return 0
    head = results.head(("python", "-m", "tests.device_faults", *sys.argv[1:]), "cuda")
    work: list[tuple[Callable[..., dict], tuple]] = [(run_many, (args.limit,))]
    work += [(run_job, (name, planted, args.limit)) for name in JOBS for planted in (False, True)]
    failed = 0
    with results.Recording(args.json, head) as recording, ThreadPoolExecutor(len(work)) as pool:
        for done in as_completed([pool.submit(what, *given) for what, given in work]):
            recording.add(row := done.result())
            print(*row.values(), flush=True)
            failed += row["status"] == "fail"
        recording.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
