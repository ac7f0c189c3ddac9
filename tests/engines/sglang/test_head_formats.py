"""Folders of published heads in SGLang 0.5.23: its drafts are an independent forward's, or as `head_judges` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.sglang import engine
from tests.head_judges import MAX_CONTEXT, NUM_TOKENS, PROMPTS, SGLANG, Judged, given, wrong_drafts

READ = [name for name, verdict in SGLANG.items() if not verdict.error]
NUM_STEPS = 3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", READ)
def test_drafts_are_those_of_an_independent_forward(name: str, models: Path, tmp_path: Path) -> None:
    judged = given(name, SGLANG[name], tmp_path)
    run = judge(judged)
    assert run.error == ""
    assert len(run.cycles) > 20
    wrong = [each for one in run.cycles for each in wrong_drafts(judged.oracle, one["text"], one["tokens"])]
    assert bool(wrong) != SGLANG[name].is_equal, wrong


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SGLANG.keys() - READ))
def test_what_sglang_does_not_take_it_says(name: str, models: Path, tmp_path: Path) -> None:
    assert SGLANG[name].error in judge(given(name, SGLANG[name], tmp_path)).error


def judge(judged: Judged) -> engine.Run:
    """A target and a head in SGLang's engine, drafting chains."""
    return engine.run(
        judged.head.parent / "run",
        prompts_of_bytes,
        model_path=str(judged.target),
        attention_backend="attn_fa3",
        context_length=MAX_CONTEXT,
        speculative_algorithm="EAGLE" if judged.eagle1 else "EAGLE3",
        speculative_draft_model_path=str(judged.head),
        speculative_num_steps=NUM_STEPS,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=NUM_STEPS + 1,
    )


def prompts_of_bytes() -> None:
    """In the process of the engine, which makes a token of each byte and puts 0 in front."""
    engine.PROMPTS[:] = [bytes(prompt[1:]).decode() for prompt in PROMPTS]
    engine.LENGTHS[:] = [NUM_TOKENS] * len(PROMPTS)
