"""The examples do what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from spec_metadata import Capacity
from tests.serving_scenes import plain, tokens

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "backend"),
    [("own_worker.py", "flashinfer_mla"), ("own_worker.py", "trtllm_mla"), ("frozen_draft.py", "trtllm_mla")],
)
def test_workers_equal_plain_decoding(name, backend, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, backend])
    ran = runpy.run_path(str(EXAMPLES / name))
    expected, _ = plain("mla", "fa3", Capacity(2, 192, 16), ran["prompts"], ran["NEW_TOKENS"])
    found = [text[: ran["NEW_TOKENS"]] for text in ran["texts"]]
    assert found == tokens(expected)
    assert capsys.readouterr().out.count("tokens a cycle") == 2


def test_own_worker_stays_short():
    assert len((EXAMPLES / "own_worker.py").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("preset", ["chain", "tree", "eagle3", "block", "mtp"])
@pytest.mark.one_in(2)
def test_stream_prints_every_text(preset, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stream.py", preset])
    requests = runpy.run_path(str(EXAMPLES / "stream.py"))["requests"]
    assert [str(request.finish) for request in requests][3:] == ["stop", "cancelled"]
    output = capsys.readouterr().out
    lines, (_, statistics) = output.splitlines(), output.split("\n\n")
    for request in requests[:-1]:
        assert [line[4:] for line in lines if line.startswith(f"[{request.number}] ")][:-1] == request.text.split("\n")
    assert len({line[:3] for line in lines[:8]}) > 1, "texts come one after the other, not as they grow"
    assert len(re.findall(r"^\[\d\] \w+: \d+ tokens in \d+ cycles$", statistics, flags=re.MULTILINE)) == len(requests)
    assert requests[1].statistics.num_shared_tokens > 60
