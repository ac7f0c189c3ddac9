"""The commands of the documents that need an engine: the suite runs, whatever it finds."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from tests.commands import run_module
from tests.doc_blocks import DOCUMENTS, ROOT, snippets


def commands(reason: str) -> list[str]:
    """Those that the documents don't run elsewhere for a reason of `tests.doc_blocks`."""
    return sorted({each.text for page in DOCUMENTS for each in snippets(page) if each.reason == reason})


def check_runs(command: str, folder: Path) -> None:
    """Run a command in a folder."""
    _, *words = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    code, output = run_module(["attn_backends.cli", *words], folder, environment, 1800)
    assert code in (0, 1), output
    assert "executed" in output
