"""An engine in a process of its own, to which requests are sent as lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any, Self

ROOT = Path(__file__).parents[4]
GROUP = "vllm.general_plugins"
TESTS_PLUG_INS = {
    "tests_plain": "tests.engines.vllm.plain:register",
    "tests_bugs": "tests.engines.vllm.defects:register",
    "tests_given": "tests.engines.vllm.given:register",
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "seed": 0,
    "gpu_memory_utilization": 0.02,  # of which only a check at the start is made; the cache's size is given
    "disable_log_stats": False,
    "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that counts
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # what counts is sent to the ranks
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each engine starts a process a core
}


class EngineFailedError(Exception):
    """An engine ended, or took too long; the last line of its log that names an error."""


def write_entry_points(folder: Path) -> None:
    """Metadata in a folder of the path, as an installation writes it, of our plug-in and those of the tests."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    plug_ins = project["entry-points"][GROUP] | TESTS_PLUG_INS
    info = folder / f"attn_backends-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: attn_backends\nVersion: {project['version']}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in plug_ins.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")


class Server:
    """A running engine.

        with Server("gqa", options, {}, folder, limit=120) as server:
            seconds = server.wait()
            answer = server.ask("generate", prompts=[...], lengths=[...], gaps=False)

    folder: for its log, name.log. limit: of its life, in seconds; then all its processes are ended. Raises
    `EngineFailedError`.
    """

    def __init__(
        self, name: str, options: dict[str, Any], environment: dict[str, str], folder: Path, limit: float
    ) -> None:
        self.log = folder / f"{name}.log"
        write_entry_points(folder / "plugins")
        path = os.pathsep.join([str(folder / "plugins"), os.environ.get("PYTHONPATH", "")])
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm.gpu.serve", json.dumps(OPTIONS | options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": path} | environment,
                start_new_session=True,
            )
        self._timer = Timer(limit, self.end)
        self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.end()
        self._process.wait()

    def wait(self) -> float:
        """Until it can be asked; seconds that its start took."""
        return float(self._read()["seconds"])

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """What a method of `serve.Engine` returns."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do} | request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailedError(self._reason())
        return dict(json.loads(line))

    def _reason(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "Error" in line]
        lines = [line for line in lines if "See root cause above" not in line] or lines  # of the core's process
        return lines[-1][-400:] if lines else "it ended, or was ended at its limit, without an error in its log"

    def end(self) -> None:
        """All its processes, now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
