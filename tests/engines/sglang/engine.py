"""Runs SGLang's engine on the CPU with some options, and says what came out.

SGLang and torch take 20 s to import, so they are imported once, and each engine runs in a fork: with all of SGLang's
processes, forked instead of spawned. SGLang is not told otherwise of the plug-in than a user's is: by its entry point.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engines.sglang import blocks_on_cpu
from tests.engines.sglang.probe import Log, install

GREEDY = {"temperature": 0, "ignore_eos": True}
SHARED = (
    "import os\nimport sys\n\n\ndef main(argv):\n    parser = argparse.ArgumentParser()\n"
    "    args = parser.parse_args(argv)\n"
)
PROMPTS = [
    "import os\n",
    SHARED + "    for name in args.names:\n",
    SHARED + "    return 0\n\n\nclass Foo(object):\n    def __init__(self",
    "for i in range(",
    SHARED + "    if not args:\n        raise ValueError(",
    "def f(x):\n",
]
LENGTHS = [20, 9, 17, 24, 5, 13]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_running_requests": 4,
    "max_total_tokens": 8192,
    "mem_fraction_static": 0.4,
    "random_seed": 1,
    "grammar_backend": "none",
    "sampling_backend": "pytorch",
    "watchdog_timeout": 120,
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "log_level": "error",
}


@dataclass(frozen=True)
class Run:
    """What an engine gave. tokens: of every request, the prompts twice. cached: their tokens that came out of the radix
    cache. log: the probe's. error: what it died of, else empty.
    """

    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def forwards(self) -> list[dict[str, Any]]:
        """Of all model runners, in order."""
        return [entry for entry in self.log if "forward" in entry]

    @property
    def cycles(self) -> list[dict[str, Any]]:
        """One a request and draft."""
        return [entry for entry in self.log if "cycle" in entry]


def run(
    folder: Path, bug: Callable[[], None] | None = None, environment: dict[str, str] | None = None, **options: Any
) -> Run:
    """An engine's answers. folder: an empty one, for its files. bug: what to patch before it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        os.environ.update(environment or {})
        _child(folder, bug, options)
    os.waitpid(child, 0)
    output = (folder / "output").read_text() if (folder / "output").exists() else ""
    if not (folder / "answers.json").exists():
        return Run(error=output or "no output")
    answers = json.loads((folder / "answers.json").read_text())
    return Run(answers["tokens"], answers["cached"], Log(folder / "log").read())


def _child(folder: Path, bug: Callable[[], None] | None, options: dict[str, Any]) -> None:
    """Everything that an engine says goes to a file, and the process ends with it."""
    try:
        os.setsid()
        output = (folder / "output").open("w", buffering=1)
        sys.stdout = sys.stderr = output  # pytest's are files of its own
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        start = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda method, force=False: start("fork", force=True)
        if options.get("tp_size"):
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # a core for each of two ranks
        os.register_at_fork(after_in_child=_renew_threads)
        _renew_threads()
        for name in [name for name in sys.modules if name.startswith("attn_backends.engines.")]:
            del sys.modules[name]  # a test may have imported the plug-in; SGLang is to do so
        install(Log(folder / "log"))
        if options.get("speculative_algorithm") in ("DFLASH", "DSPARK"):
            blocks_on_cpu.allow()
        if bug is not None:
            bug()
        answers = _answer(options)
        (folder / "answers.part").write_text(json.dumps(answers))
        (folder / "answers.part").rename(folder / "answers.json")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _renew_threads() -> None:
    """torch makes its pool of threads anew at the first use after a fork, and two threads may find it half made."""
    torch.set_num_threads(1)


def _answer(options: dict[str, Any]) -> dict[str, Any]:
    """All prompts together, more than run at once, each of another length; then all again, out of the radix cache."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**(OPTIONS | options))
    ids = [[0, *prompt.encode()] for prompt in PROMPTS]
    sampling = [GREEDY | {"max_new_tokens": length} for length in LENGTHS]
    out = [one for _ in range(2) for one in engine.generate(input_ids=ids, sampling_params=sampling)]
    engine.shutdown()
    return {
        "tokens": [one["output_ids"] for one in out],
        "cached": [one["meta_info"]["cached_tokens"] for one in out],
    }
