"""The commands of the documents that need this engine, and those that serve a model on a GPU."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser

import pytest

from tests.doc_blocks import GPU, SGLANG
from tests.engines.doc_commands import check_runs, commands

SERVED = [each for each in commands(GPU) if each.startswith("sglang serve ")]


@pytest.mark.full
@pytest.mark.parametrize("command", commands(SGLANG))
def test_a_command_of_the_documents_runs(command, tmp_path):
    check_runs(command, tmp_path)


@pytest.mark.parametrize("command", SERVED)
def test_a_command_that_serves_is_understood(command):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.parse_args(shlex.split(command)[2:]).attention_backend == "attn_flashinfer_mla"
