"""Folders of published heads in vLLM 0.33: its drafts are an independent forward's, or differ as `head_judges` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines.vllm.engine import MAX_MODEL_LEN, NUM_DRAFTED, EngineFailed, Row, Run, run
from tests.head_forward import HeadOracle
from tests.head_judges import MAX_CONTEXT, NUM_TOKENS, PROMPTS, VLLM, Judged, given, wrong_drafts

READ = [name for name, verdict in VLLM.items() if not verdict.error]


@pytest.mark.one_in(20)
@pytest.mark.parametrize("name", READ)
def test_drafts_are_those_of_an_independent_forward(name: str, tmp_path: Path) -> None:
    verdict = VLLM[name]
    judged = given(name, verdict, tmp_path)
    found = judge(judged)
    assert len(found.drafts) > 20
    assert wrong(judged.reading, found) == []
    assert bool(wrong(judged.oracle, found)) != verdict.is_equal


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(VLLM.keys() - READ))
def test_what_vllm_does_not_take_it_says(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=re.escape(VLLM[name].error)):
        judge(given(name, VLLM[name], tmp_path))


def judge(judged: Judged) -> Run:
    """A target and a head in vLLM's engine."""
    method = "eagle" if judged.eagle1 else "eagle3"
    drafts = {"method": method, "model": str(judged.head), "num_speculative_tokens": NUM_DRAFTED}
    drafts |= {"attention_backend": "ATTN_BACKENDS_FLASHINFER_MLA"} if judged.is_mla else {}
    others = (("speculative_config", drafts), ("num_gpu_blocks_override", 96))
    row = Row(judged.target.name, "ATTN_BACKENDS_FA3", others=others)
    assert MAX_MODEL_LEN == 2 * MAX_CONTEXT
    return run(row, judged.target.parent, PROMPTS, NUM_TOKENS)


def wrong(oracle: HeadOracle, run: Run) -> list[str]:
    """Where vLLM drafted another token. Behind the last token of a text nothing is drafted."""
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, run.tokens, strict=True)]
    drafts = ((texts[i][:known], drafted) for (i, known), drafted in run.drafts.items() if known < len(texts[i]))
    return [each for text, drafted in drafts for each in wrong_drafts(oracle, text, drafted)]
