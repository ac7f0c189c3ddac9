"""The commands of the documents that need this engine."""

from __future__ import annotations

import pytest

from tests.doc_blocks import SGLANG
from tests.engines.doc_commands import check_runs, commands


@pytest.mark.full
@pytest.mark.parametrize("command", commands(SGLANG))
def test_a_command_of_the_documents_runs(command, tmp_path):
    check_runs(command, tmp_path)
