"""The examples do what they say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from spec_metadata import Capacity
from tests.serving_scenes import plain, tokens

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("backend", ["flashinfer_mla", "trtllm_mla"])
def test_own_worker_equals_plain_decoding(backend, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["own_worker.py", backend])
    ran = runpy.run_path(str(EXAMPLES / "own_worker.py"))
    expected, _ = plain("mla", "fa3", Capacity(2, 192, 16), ran["prompts"], ran["NEW_TOKENS"])
    found = [text[: ran["NEW_TOKENS"]] for text in ran["texts"]]
    assert found == tokens(expected)
    assert capsys.readouterr().out.count("tokens a cycle") == 2


def test_own_worker_stays_short():
    assert len((EXAMPLES / "own_worker.py").read_text(encoding="utf-8").splitlines()) <= 120
