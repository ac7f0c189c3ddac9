"""Commands of Python modules in processes of their own that need not import torch again, which takes longest of them.

Each is forked from a server that has imported torch and nothing of ours, the standard library's `forkserver`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
OURS = {str(ROOT), str(ROOT / "reference")}
DEADLINE = 170
# What initialized a GPU here would keep every forked process from it.
_MORE = [] if torch.cuda.is_available() else ["torch._dynamo", "transformers.modeling_utils"]
multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", *_MORE])


def run_module(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], deadline: float = DEADLINE
) -> tuple[int | None, str]:
    """The exit code and the output of `python -P -m WORDS` in a folder. environment: all that the process gets; its
    PYTHONPATH comes first. deadline: in seconds, after which it is killed.
    """
    context = multiprocessing.get_context("forkserver")
    output = folder.parent / f"{folder.name}.output"
    process = context.Process(target=_run, args=(list(words), str(folder), dict(environment), str(output)))
    process.start()
    process.join(deadline)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, output.read_text()


def _run(words: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    first = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*first, *(path for path in sys.path if path not in OURS)]
    sys.argv[1:] = words[1:]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this module came from there, and what is run may have tests of its own
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
