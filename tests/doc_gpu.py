"""The blocks and commands of the documents that need a GPU, each as it stands, in a process and a folder of its own.

    python -m tests.doc_gpu --json FILE [--processes N] [--limit SECONDS] [PAGE ...]

A row is a block or a command. `started` ran without an error until --limit and was ended: what it would have come to is
not known. `not_run` needs an engine that is not installed here, or what only a reader has, such as MODEL. Published
checkpoints are stood in for by ours. Blocks take GPUs in turn, one each. No file of the checkout is written but FILE.
Nothing is resumed. Exit code 1: one failed. 2: there is no GPU. What a command prints is the reader's affair: `pass` is
exit code 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from importlib.metadata import distributions
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from attn_backends import results
from attn_backends.errors import AttnBackendsError, BackendUnavailableError
from tests.doc_blocks import DOCUMENTS, GPU, Snippet, snippets
from tests.doc_desk import arguments, environment, lay_out_for_gpu

OUTSIDE = {
    r"\bMODEL\b": "MODEL is the reader's; `make test-{0}` has it understood or run on a CPU, "
    "`python -m tests.engines.{0}.gpu correctness` serves models of ours",
    r"^pip ": "installs into the reader's environment; tests/engines/{0}/gpu/bundle.sh has the same packages",
}  # why a block can't run anywhere as it stands
ENGINES = ("sglang", "vllm")
LINES = 3  # of the end of an output, for the reason
PATIENCE = 30  # seconds, for a command to end its own processes


def blocks(pages: Sequence[Path] = ()) -> list[Snippet]:
    """Those of the pages, or of all of them, that are not run elsewhere because they need a GPU."""
    return [found for page in pages or DOCUMENTS for found in snippets(page) if found.reason == GPU]


def why_not(text: str) -> str:
    """Why a block can't be run here, or "". A bundle of kernels in a folder of an engine's name is not the engine."""
    engine = next((engine for engine in ENGINES if engine in text), "")
    outside = next((reason for pattern, reason in OUTSIDE.items() if re.search(pattern, text)), "")
    if outside:
        return outside.format(engine)
    if not engine or any(distributions(name=engine)):
        return ""
    return f"{engine} is not installed here"


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES has them; one entry, which hides them, if there is none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())] or [""]


def run(snippet: Snippet, shelf: Path, limit: float, gpu: str) -> dict[str, Any]:
    """Run a block for at most `limit` seconds in a copy of a desk, on one GPU; its row."""
    start, reason = time.monotonic(), why_not(snippet.text)
    status, reason = ("not_run", reason) if reason else _came_to(snippet, shelf, limit, {"CUDA_VISIBLE_DEVICES": gpu})
    return {
        "page": snippet.document.as_posix(),
        "line": snippet.line,
        "text": snippet.text.splitlines()[0],
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "reason": reason,
    }


def _came_to(snippet: Snippet, shelf: Path, limit: float, variables: Mapping[str, str]) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        desk = Path(shutil.copytree(shelf, Path(folder, "desk")))
        with (output := Path(folder, "output")).open("wb") as stream:
            command = [sys.executable, "-P", *arguments(snippet)]
            code = _exit_code(command, desk, stream, limit, environment(desk) | variables)
        lines = output.read_text(errors="replace").strip().splitlines() or ["no output"]
    said = results.without_folders("; ".join(line.strip() for line in lines[-LINES:]))
    if code is None:
        return "started", f"ended after {limit:.0f} s; it had said: {said}"
    return ("fail", f"exit code {code}: {said}") if code else ("pass", "")


def _exit_code(
    command: list[str], desk: Path, output: BinaryIO, limit: float, variables: Mapping[str, str]
) -> int | None:
    """None of a command that still ran after `limit` seconds. Nothing that it began is left running."""
    given = {**variables, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=desk, env=given, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        return None
    finally:
        for number in _begun_in(desk):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()


def _begun_in(desk: Path) -> list[int]:
    """Processes that have a desk in their variables, as a command's servers do that have sessions of their own."""
    found = []
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if str(desk).encode() in variables.read_bytes():
                found.append(int(variables.parent.name))
    return found


def _fill(shelf: Path, found: Sequence[Snippet]) -> None:
    """Lay out what blocks find, with the corpus if one of them trains."""
    lay_out_for_gpu(shelf)
    if any("training.train" in snippet.text for snippet in found):
        command = [sys.executable, "-P", "-m", "training.corpus"]
        subprocess.run(command, cwd=shelf, env=environment(shelf), stdout=subprocess.DEVNULL, check=True)


def run_all(found: Sequence[Snippet], path: Path, head: results.Head, processes: int, limit: float) -> int:
    """Run blocks, some at once, and write their rows as they come; 1 if one failed."""
    counts = Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        results.Recording(path, head) as recording,
        ThreadPoolExecutor(processes) as pool,
    ):
        _fill(shelf := Path(folder, "shelf"), found)
        given = zip(found, cycle(visible_gpus()), strict=False)
        for done in as_completed([pool.submit(run, snippet, shelf, limit, gpu) for snippet, gpu in given]):
            row = done.result()
            recording.add(row)
            counts[row["status"]] += 1
            print(f"{row['page']}:{row['line']}: {row['status']} {row['seconds']} s {row['reason']}", flush=True)
        recording.finish()
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return int(counts["fail"] > 0)


def main() -> int:
    """Run them; 1 if one failed, 2 if the machine or the file does not suit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="such as docs/models.md; default: all")
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="blocks at once (1)")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of a block (600)")
    args = parser.parse_args()
    try:
        results.check_output("--json", args.json)
        head = results.head(["python", "-m", "tests.doc_gpu", *sys.argv[1:]], "cuda")
        if head.device == "CUDA":
            raise BackendUnavailableError("doc_gpu", ["torch sees no CUDA device"])
        return run_all(blocks(args.pages), args.json, head, args.processes, args.limit)
    except AttnBackendsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
