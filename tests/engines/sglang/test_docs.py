"""The commands of the documents that need this engine, and those that serve a model on a GPU."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from multiprocessing import get_context

import pytest

from tests.doc_blocks import GPU, SGLANG
from tests.engines.doc_commands import check_runs, commands

SERVED = [each for each in commands(GPU) if each.startswith("sglang serve ")]


@pytest.mark.full
@pytest.mark.parametrize("command", commands(SGLANG))
def test_a_command_of_the_documents_runs(command, tmp_path):
    check_runs(command, tmp_path)


def attention_backend_of(command: str) -> str:
    """What SGLang reads out of it, with the plug-ins that it finds."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return str(parser.parse_args(shlex.split(command)[2:]).attention_backend)


@pytest.mark.parametrize("command", SERVED)
def test_a_command_that_serves_is_understood(command, models):
    """In a fork: engines are forks of this process, and find the plug-in themselves."""
    with get_context("fork").Pool(1) as child:
        assert child.apply(attention_backend_of, [command]) == "attn_flashinfer_mla"
