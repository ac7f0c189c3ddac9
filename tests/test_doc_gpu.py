"""`make test-docs-gpu` without a GPU, and of a block that fails, that takes too long, or that only a reader can run."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import torch

from attn_backends import cli, results
from tests import doc_gpu
from tests.doc_blocks import GPU, Snippet
from tests.doc_desk import lay_out_for_gpu

HEAD = results.Head("NVIDIA H200", {}, "2026-11-27", "0123456789abcdef", "python -m tests.doc_gpu --json FILE")
LASTING = """import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
print("child", subprocess.Popen(sleep, start_new_session=True).pid)
time.sleep(60)
"""


def rows(tmp_path: Path, *texts: str, language: str = "python", limit: float = 30) -> tuple[int, list[dict]]:
    """The exit code and the rows of planted blocks, in their order."""
    planted = [Snippet(Path("page.md"), line, language, text, GPU) for line, text in enumerate(texts)]
    code = doc_gpu.run_all(planted, tmp_path / "rows.json", HEAD, 2, limit)
    return code, sorted(results.read(tmp_path / "rows.json").rows, key=lambda row: row["line"])


def test_without_a_gpu_the_command_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["doc_gpu", "--json", str(tmp_path / "rows.json")])
    assert doc_gpu.main() == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_block_that_fails_fails_the_run(tmp_path):
    code, (good, bad) = rows(tmp_path, "print('it ran')", "x = 1\nraise ValueError('planted in /a/b/c')")
    assert code == 1
    assert (good["status"], bad["status"]) == ("pass", "fail")
    assert bad["text"] == "x = 1"
    assert bad["reason"].startswith("exit code 1: ")
    assert bad["reason"].endswith("; ValueError: planted in c")


def test_blocks_take_gpus_in_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    text = "import os; raise ValueError(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert [row["reason"][-1] for row in rows(tmp_path, text, text, text)[1]] == ["2", "5", "2"]


def test_a_command_that_fails_fails_the_run(tmp_path):
    code, (row,) = rows(tmp_path, "python -m no_such_module", language="sh")
    assert (code, row["status"]) == (1, "fail")


def test_a_block_that_takes_too_long_was_started_and_leaves_nothing_running(tmp_path):
    code, (row,) = rows(tmp_path, LASTING, limit=3)
    assert (code, row["status"]) == (0, "started")
    child = row["reason"].split()[-1]
    assert row["reason"] == f"ended after 3 s; it had said: child {child}"
    deadline = time.monotonic() + 10
    while is_running(int(child)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether a process is there and no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_only_a_reader_has_is_not_run(tmp_path):
    texts = ("vllm serve MODEL --port 1", "pip install . vllm==0.33.0", "attn-backends conformance sglang:fa3")
    code, found = rows(tmp_path, *texts, language="sh")
    assert code == 0
    assert {row["status"] for row in found} == {"not_run"}
    assert [row["reason"] for row in found] == [
        "MODEL is the reader's; `make test-vllm` has it understood or run on a CPU, "
        "`python -m tests.engines.vllm.gpu correctness` serves models of ours",
        "installs into the reader's environment; tests/engines/vllm/gpu/bundle.sh has the same packages",
        "sglang is not installed here",
    ]


def test_a_folder_of_an_engine_without_its_distribution_is_not_the_engine(tmp_path, monkeypatch):
    """A bundle of a vendor's kernels may lie in a folder of the engine's name, and nothing of the engine runs there."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    text = "python -m tests.engines.vllm.gpu correctness"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert doc_gpu.why_not(text) == "vllm is not installed here"
    (tmp_path / "vllm-0.33.0.dist-info").mkdir()
    (tmp_path / "vllm-0.33.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.33.0\n")
    assert doc_gpu.why_not(text) == ""


def test_the_published_models_of_a_page_are_stood_in_for(tmp_path, monkeypatch, capsys):
    lay_out_for_gpu(tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    command = next(each.text for each in doc_gpu.blocks([Path("docs/models.md")]) if "--draft EAGLE3" in each.text)
    assert cli.main([*shlex.split(command)[1:], "--max-new-tokens", "2"]) == 0
    assert "ended by: max_new_tokens" in capsys.readouterr().out
