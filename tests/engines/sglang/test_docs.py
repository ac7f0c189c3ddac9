"""The commands of the documents that need this engine: the suite runs, whatever it finds."""

from __future__ import annotations

import os
import shlex

import pytest

from tests.commands import run_module
from tests.doc_blocks import DOCUMENTS, ROOT, SGLANG, snippets

COMMANDS = sorted({each.text for page in DOCUMENTS for each in snippets(page) if each.reason == SGLANG})


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documents_runs(command, tmp_path):
    _, *words = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    code, output = run_module(["attn_backends.cli", *words], tmp_path, environment, 1800)
    assert code in (0, 1), output
    assert "executed" in output
