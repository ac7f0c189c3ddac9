"""The commands of the documents that need this engine, and their Python on a model of ours."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.doc_blocks import GPU, VLLM
from tests.doc_desk import write_tokenizer
from tests.engines.doc_commands import check_runs, commands
from tests.engines.vllm.engine import Row, arguments

ROOT = Path(__file__).parents[3]
BLOCKS = [text for text in commands(GPU) if text.startswith("from vllm import")]
NAMED = {"model", "attention_backend", "skip_tokenizer_init"}  # by the block, or left out by it


@pytest.mark.full
@pytest.mark.parametrize("command", commands(VLLM))
def test_a_command_of_the_documents_runs(command, tmp_path):
    check_runs(command, tmp_path)


@pytest.mark.parametrize("block", BLOCKS)
def test_python_of_the_documents_runs(block, models, tmp_path, monkeypatch, capsys):
    import vllm

    model = Path(shutil.copytree(models / "gqa", tmp_path / "model"))
    write_tokenizer(model)
    row = Row("gqa", "ATTN_BACKENDS_FA3", "NONE", drafts=False)
    options = {name: value for name, value in arguments(row, models).items() if name not in NAMED}
    monkeypatch.setattr(vllm, "LLM", lambda name, of=vllm.LLM, **given: of(str(model), **options, **given))
    exec(block, {})
    assert "{'prefill': {'backend': 'fa3', 'kernel': 'torch', 'forwards': 1}" in capsys.readouterr().out


def test_the_page_has_every_operator_that_is_replaced():
    source, page = ((ROOT / name).read_text() for name in ("tests/engines/vllm/stand_ins.py", "docs/vllm.md"))
    defined = re.findall(r'_define\(\s*"\w+",\s*"(\w+)\(', source)
    told = page.partition("- operators that vLLM compiles")[2].partition(";")[0]
    assert len(defined) == source.count("_define(") - 1 == 5
    assert sorted(re.findall(r"`(\w+)`", told)) == sorted(defined)
