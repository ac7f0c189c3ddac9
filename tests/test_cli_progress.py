"""What commands show and write while they run: rows as they come, progress on a terminal, kernels that are compiled."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from attn_backends.cli import HELP, consoles, main
from attn_backends_reference.cli import demo
from benchmarks import memory
from benchmarks.__main__ import main as benchmark
from tests.test_cli import ROW


def test_the_demo_writes_its_rows_as_they_come(tmp_path, monkeypatch):
    path, counts = tmp_path / "rows.json", []

    def fake_row(*args):
        found = json.loads(path.read_text())
        counts.append((len(found["rows"]), found["incomplete"]))
        return ROW

    monkeypatch.setattr(demo, "run_row", fake_row)
    assert main(["demo", "--backend", "trtllm_mla", "--json", str(path)]) == 0
    assert counts == [(number, True) for number in range(4)]
    assert "incomplete" not in json.loads(path.read_text())


def test_a_benchmark_writes_its_rows_as_they_come(tmp_path, monkeypatch):
    path, counts = tmp_path / "rows.json", []
    measure = memory.static_memory

    def watched(backend, capacity):
        found = json.loads(path.read_text())
        counts.append(len(found["rows"]))
        assert found["incomplete"] is True
        return measure(backend, capacity)

    monkeypatch.setattr(memory, "static_memory", watched)
    assert benchmark(["memory", "--backend", "fa3", "--json", str(path)]) == 0
    assert counts[0] == 0 < counts[1] < len(json.loads(path.read_text())["rows"])


@pytest.fixture
def terminal(monkeypatch):
    """Standard error is a terminal, and what is shown on it."""
    shown = io.StringIO()
    monkeypatch.setattr(consoles, "error_console", lambda: Console(file=shown, force_terminal=True, width=200))
    return shown


def test_a_compiled_kernel_is_counted_at_its_first_use(terminal, monkeypatch):
    from triton import knobs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = knobs.compilation.listener
    with consoles.progress("fa3 tree", "tokens", 10):
        for cache_hit in (False, True, False):
            knobs.compilation.listener(
                src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=2_000_000), cache_hit=cache_hit
            )
    assert knobs.compilation.listener is before
    assert "fa3 tree; 2 kernels compiled at their first use, 4 s" in terminal.getvalue()


SHOWN = {
    "conformance": ("fa3 --kernel torch --select plan.write_slots --quick", "fa3 (torch) plan."),
    "explain": ("fa3 trtllm_mla --example decode", "2/2 backends"),
    "inspect": ("gqa", "reading what gqa says of itself"),
    "export": ("mla --draft mla-mtp --to vllm --out FOLDER", "writing target and mtp for vllm"),
    "generate": ("--prompt a --max-new-tokens 1", "loading mla"),
    "demo": ("--backend trtllm_mla", "trtllm_mla chain, eager: loading models"),
}
"""A line of every command that can take longer than two seconds, and what a terminal shows of it."""


@pytest.mark.parametrize("command", sorted(HELP.keys() - {"list", "info"}))
def test_every_command_that_takes_long_shows_what_it_does(command, terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run_row", lambda *args: ROW)
    words, expected = SHOWN[command]
    assert main([command, *words.replace("FOLDER", str(tmp_path / "out")).split()]) == 0
    assert expected in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def test_a_narrow_terminal_cuts_the_words_and_not_the_numbers(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(consoles, "error_console", lambda: Console(file=shown, force_terminal=True, width=80))
    with consoles.progress("what is done, at a length that no terminal of this width holds " * 2, "tokens", 640) as bar:
        bar.advance(320)
        bar.describe("what is done, " * 12)
    assert "320/640 tokens" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())


def test_progress_is_shown_on_a_terminal():
    """Of the command in a process of its own."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "attn_backends.cli", "conformance", "fa3", "--kernel", "torch"]
    words += ["--select", "plan.*", "--quick"]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = bytearray()
    while chunk := read_or_end(ours):
        shown += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert "fa3 (torch) plan." in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def read_or_end(descriptor: int) -> bytes:
    """What a terminal shows next; nothing after the last writer has closed it, which Linux calls an error."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
