"""Engines of several processes: what vLLM hands to a process that it spawns, and two ranks of tensor parallelism."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_backends.engines.vllm import NAMES, attended, register
from tests.engines.vllm.defects import SWITCH
from tests.engines.vllm.engine import Row, build, prompts
from tests.engines.vllm.recompute import NUM_PROMPTS, plain

ROW = Row("gqa", "ATTN_BACKENDS_FA3", others=(("tensor_parallel_size", 2), ("distributed_executor_backend", "mp")))


def test_a_name_is_known_where_plug_ins_are_not_loaded_yet() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    given = pickle.dumps([AttentionBackendEnum[name] for name in NAMES])
    code = f"import pickle\nprint(*(backend.name for backend in pickle.loads({given!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == list(NAMES)


@pytest.mark.full
def test_two_ranks_decode_as_one(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has half of the heads; vLLM's own all-reduce joins them, by gloo."""
    wanted = plain("gqa", models, NUM_PROMPTS, False).tokens[:3]
    texts, counted = on_two_ranks(models, monkeypatch)
    assert texts == [text[:12] for text in wanted]
    assert len(counted) == 2
    assert counted[0] == counted[1]
    assert len(counted[0]) == 5
    assert {kind["backend"] for kinds in counted[0].values() for kind in kinds.values()} == {"fa3"}
    assert all("target_verify" in kinds for kinds in counted[0].values())


@pytest.mark.full
def test_a_bug_is_planted_in_every_rank(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "verify as prefill")
    _, counted = on_two_ranks(models, monkeypatch)
    assert [kinds for layers in counted for kinds in layers.values() if "target_verify" in kinds] == []


def on_two_ranks(models: Path, patch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Texts of three prompts, and what each rank counted."""
    from vllm import SamplingParams

    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `attended` is sent to the ranks
    llm = build(ROW, models)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts(3)], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], llm.collective_rpc(attended)
    finally:
        llm.llm_engine.engine_core.shutdown()
