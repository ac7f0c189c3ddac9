"""Servers that do not start, with our reasons; and one that SGLang starts in its own way, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.engines.sglang.cases import FA3, FLASHINFER, TRTLLM, Case
from tests.engines.sglang.engine import OPTIONS, PROMPTS, run


def another_version() -> None:
    """SGLang is not the one that the plug-in is for."""
    from attn_backends.engines.sglang import versions

    versions.installed = lambda: "0.6.0"


def a_name_is_gone() -> None:
    """SGLang has renamed what the plug-in imports."""
    from sglang.srt.layers.attention import verify_mask

    del verify_mask.VerifyMask


def causal_windows() -> None:
    """The draft's folder does not say that windows are not causal, so SGLang takes them for causal."""
    from sglang.srt.models import dflash

    dflash._get_dflash_attention_type = lambda config, *, default: default


REFUSED: dict[str, tuple[Case, Callable[[], None] | None]] = {
    "SGLang 0.6.0 is installed, and its plug-in is for 0.5.23": (Case("gqa", FA3, 0), another_version),
    "cannot import name 'VerifyMask'": (Case("gqa", FA3, 0), a_name_is_gone),
    "a model whose cache is of kv (it takes latent)": (Case("gqa", FLASHINFER, 0), None),
    "prefill by kernel torch: page size 1 (it takes 32, 64)": (Case("mla", TRTLLM, 1), None),
    "the caches of dsv4 have no view": (Case("mla", "attn_dsv4", 0), None),
    "--speculative-draft-window-size 64 with a draft": (Case("mla", FLASHINFER, 3), None),
    "--speculative-draft-window-size 32 with a draft": (Case("gqa", FA3, 1, in_blocks=True), None),
    "target_verify by kernel torch: it takes no rows that the device divides among requests": (
        Case("mla", TRTLLM, 1, page_size=64, of_draft=FA3, in_blocks=True, dspark="compact"),
        None,
    ),
    "layer 0 has attention of type decoder, cross False (it takes encoder_only)": (
        Case("gqa", FA3, 1, in_blocks=True),
        causal_windows,
    ),
}
WINDOWED = {
    f"--speculative-draft-window-size {window} with a draft": {"speculative_draft_window_size": window}
    for window in (64, 32)
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_server_does_not_start_and_says_why(models, tmp_path, reason):
    case, bug = REFUSED[reason]
    refused = run(tmp_path / "engine", bug, **case.options(models), **WINDOWED.get(reason, {}))
    assert refused.tokens == []
    assert reason in refused.error


SPAWNED = """
import json, sys
from sglang import Engine
if __name__ == "__main__":
    options, ids = json.loads(sys.argv[1])
    engine = Engine(**options)
    out = engine.generate(input_ids=ids, sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": 5})
    engine.shutdown()
    print("TOKENS", json.dumps([one["output_ids"] for one in out]), flush=True)
"""


def test_processes_that_sglang_spawns_find_the_plug_in_by_its_entry_point(runs, models, tmp_path):
    case = Case("gqa", FA3, 1)
    (tmp_path / "serve.py").write_text(SPAWNED)
    ids = [[0, *prompt.encode()] for prompt in PROMPTS]
    given = json.dumps([OPTIONS | case.options(models), ids])
    command = [sys.executable, str(tmp_path / "serve.py"), given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOKENS")] or [done.stderr[-2000:]]
    expected = [tokens[:5] for tokens in runs(case).tokens[: len(PROMPTS)]]
    assert [tokens[:5] for tokens in json.loads(line.removeprefix("TOKENS"))] == expected
