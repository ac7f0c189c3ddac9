"""Results as JSON, in one shape for every command: what ran, where, when and on which code, and a compact row a line.

    {"device": ..., "versions": {...}, "date": ..., "commit": ..., "command": ..., "rows": [...]}

A command may add keys of its own before the rows. Nothing in a result names a path of the machine that it came from.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attn_backends.errors import ConfigError
from attn_backends.selection.packages import is_installed

ROOT = Path(__file__).resolve().parent.parent
COMMIT_VARIABLE = "ATTN_BACKENDS_COMMIT"  # for a copy of the tree that git knows nothing of
DISTRIBUTIONS = {
    "triton": "triton",
    "transformers": "transformers",
    "flashinfer-python": "flashinfer",
    "sgl-flash-mla": "flash_mla",
    "sgl-kernel": "sgl_kernel",
    "flash-attn-3": "flash_attn_interface",
    "vllm": "vllm",
    "sglang": "sglang",
}  # and the module of each, which may be there without the package's metadata


@dataclass(frozen=True, slots=True)
class Head:
    """Where rows come from. device: its name. versions: of what matters. date: UTC day, ISO. commit: of the code, with
    "+dirty" if files beside docs differ from it. command: what to type, without paths of a machine.
    """

    device: str
    versions: Mapping[str, str]
    date: str
    commit: str
    command: str


@dataclass(frozen=True, slots=True)
class Results:
    """Rows as plain values, with their head. own: what else the command had to say."""

    head: Head
    rows: tuple[Mapping[str, Any], ...]
    own: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """A key, then a row, on each line."""
        keys = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in {**asdict(self.head), **self.own}.items()]
        rows = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in self.rows)
        return "{\n" + ",\n".join([*keys, f'"rows": [\n{rows}\n]']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """What `to_json` wrote. Results from before commits were recorded have none."""
        try:
            own = dict(json.loads(text))
            rows, device, versions = (own.pop(name) for name in ("rows", "device", "versions"))
            head = Head(device, dict(versions), *(own.pop(name, "") for name in ("date", "commit", "command")))
            return cls(head, tuple(map(dict, rows)), own)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"not a result: {error!r}") from None


def head(command: Sequence[str], device: str = "cpu") -> Head:
    """The head of rows that a command makes here. command: its words. device: such as cpu or cuda."""
    today = datetime.now(UTC).date().isoformat()
    return Head(device_name(device), versions(), today, commit(), without_paths(command))


def write(path: Path, head: Head, rows: Iterable[Mapping[str, Any]], **own: Any) -> None:
    """Write rows to a file. own: further keys of the object."""
    path.write_text(Results(head, tuple(rows), own).to_json(), encoding="utf-8")


def read(path: Path) -> Results:
    """The results of a file; `ConfigError` names it if it holds none."""
    try:
        return Results.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before anything is computed, a file that can't be written afterwards. option: that names it."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")


def device_name(device: str) -> str:
    """What a device calls itself, such as NVIDIA H200."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return torch.device(device).type.upper()


def versions() -> dict[str, str]:
    """Versions of what numbers depend on, as far as it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for distribution, module in DISTRIBUTIONS.items():
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            if is_installed(module):
                found[distribution] = "without package metadata"
    return found


def commit() -> str:
    """The commit of this code: what the environment says, else what git does, else "unknown"."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        found = _git("rev-parse", "HEAD")
        return found + ("+dirty" if _git("status", "--porcelain", "--", ".", ":(exclude)docs") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def without_paths(words: Sequence[str]) -> str:
    """A command line in which files are named relative to the checkout, and files outside it FILE."""
    return shlex.join(_without_path(word) for word in words)


def without_folders(text: str) -> str:
    """Somebody's message, with the names of files but not of the machine's folders."""
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)


def _without_path(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if os.sep in value:
        path = Path(value).resolve()
        value = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else "FILE"
    return option + equals + value


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
