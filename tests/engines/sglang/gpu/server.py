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
from typing import Any, NoReturn, Self

import torch

ROOT = Path(__file__).parents[4]
STUBS = Path(__file__).parent / "stubs"
GROUP = "sglang.srt.plugins"
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "dtype": "bfloat16",
    "grammar_backend": "none",
    "sampling_backend": "pytorch",
    "watchdog_timeout": 300,
    "disable_prefill_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "disable_shared_experts_fusion": True,
    "log_level": "warning",
    "sleep_on_idle": True,  # else each engine that waits keeps a core busy
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each engine starts a process a core
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",  # of SGLang's own layers
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the other is compiled
}


class EngineFailedError(Exception):
    """An engine ended, or took too long; the last line of its log that names an error."""


def write_entry_points(folder: Path) -> None:
    """Metadata in a folder of the path, as an installation writes it, of the library's plug-in and of those here."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    _write_metadata(folder, "attn_backends", project["version"], project["entry-points"][GROUP])
    ours = {name: f"tests.engines.sglang.gpu.{name}:install" for name in ("probe", "fa3_of_vllm")}
    _write_metadata(folder, "attn_backends_probe", "0", ours)


def _write_metadata(folder: Path, name: str, version: str, entry_points: dict[str, str]) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")


def gpus() -> list[str]:
    """Those of this process, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(i) for i in range(max(torch.cuda.device_count(), 1))]


_RUNNING: set[Server] = set()


def end_all() -> NoReturn:
    """All engines, and this process."""
    for server in list(_RUNNING):
        server.end()
    os._exit(1)


class Server:
    """A running engine.

        with Server("gqa", options, {}, folder, limit=120) as server:
            answers = server.ask(input_ids=[...], sampling_params={...})

    folder: for its log, name.log, and the probe's, name.probe. limit: of its life, in seconds; then all its processes
    are ended. Raises `EngineFailedError`.
    """

    def __init__(
        self, name: str, options: dict[str, Any], environment: dict[str, str], folder: Path, limit: float
    ) -> None:
        self.log, self.probe = folder / f"{name}.log", folder / f"{name}.probe"
        write_entry_points(folder / "plugins")
        path = os.pathsep.join([str(STUBS), str(folder / "plugins"), os.environ.get("PYTHONPATH", "")])
        given = os.environ | ENVIRONMENT | {"PYTHONPATH": path, "ATTN_PROBE": str(self.probe)} | environment
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.sglang.gpu.serve", json.dumps(OPTIONS | options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=given,
                start_new_session=True,
            )
        self._timer = Timer(limit, self.end)
        self._timer.start()
        _RUNNING.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.end()
        self._process.wait()
        _RUNNING.discard(self)

    def wait(self) -> float:
        """Until it can be asked; seconds that its start took."""
        return float(self._read()["seconds"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """What `serve.py` answers to one request."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def watched(self) -> list[dict[str, Any]]:
        """What the probe wrote."""
        return [json.loads(line) for line in self.probe.read_text().splitlines()] if self.probe.exists() else []

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailedError(self._reason())
        return dict(json.loads(line))

    def _reason(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "Error" in line]
        return lines[-1][-400:] if lines else "it ended, or was ended at its limit, without an error in its log"

    def end(self) -> None:
        """All its processes, now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
