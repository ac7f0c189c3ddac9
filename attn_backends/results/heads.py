"""The head of a result: the device, the versions, the day, the commit and the command, without paths of a machine."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from attn_backends.selection.packages import is_installed

ROOT = Path(__file__).resolve().parent.parent.parent
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
    """The origin of rows. device: its name. versions: of what matters. date: UTC day, ISO. commit: of the code, with
    "+dirty" if files beside docs differ from it. command: what to type, without paths of a machine.
    """

    device: str
    versions: Mapping[str, str]
    date: str
    commit: str
    command: str


def head(command: Sequence[str], device: str = "cpu") -> Head:
    """The head of rows that a command makes here. command: its words. device: such as cpu or cuda."""
    today = datetime.now(UTC).date().isoformat()
    return Head(device_name(device), versions(), today, commit(), without_paths(command))


def device_name(device: str) -> str:
    """The name of a device, such as NVIDIA H200 or CPU."""
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
    """A message with the names of files, without the machine's folders."""
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
