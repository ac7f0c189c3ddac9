"""Folders of published heads, unchanged, in vLLM 0.33: its drafts are `HeadOracle`'s, or it says what it refuses."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from tests.eagle3_models import tiny_target
from tests.engines.vllm.engine import MAX_MODEL_LEN, NUM_DRAFTED, EngineFailed, Row, Run, run
from tests.head_catalogue import FORMATS
from tests.head_formats import write
from tests.head_forward import HeadOracle
from tests.head_runs import TEXT, oracle_of

PROMPTS = [TEXT[:11].tolist(), TEXT[20:24].tolist(), TEXT[5:33].tolist()]
NUM_TOKENS = 10
STATES = "mat1 and mat2 shapes cannot be multiplied"
"""Its runner reads no `eagle_aux_hidden_state_layer_ids` within `eagle_config`: of four layers it takes two states."""
REFUSED = {
    "SafeAILab EAGLE-3, wider target": STATES,
    "SpecForge": STATES,
    "SpecForge, gpt-oss": STATES,
    "SGLang's reader, the target's output head": STATES,
    "SGLang's reader, tied": STATES,
    "SpecForge EAGLE-3.1": "The size of tensor a (22) must match the size of tensor b (32)",
    "NVIDIA Model Optimizer": "The size of tensor a (64) must match the size of tensor b (96)",
    "SGLang's reader": "in LlamaModel. The available parameters belonging to",
    "vLLM's reader": "Unsupported activation: gelu. Only silu is supported for now.",
    "speculators": "model type `speculator_model` but Transformers does not recognize this architecture",
    "speculators, Qwen3's layer": "model type `speculator_model` but Transformers does not recognize this architecture",
    "SafeAILab EAGLE-1/2, Qwen2": "effective_layer_idx: 4 is out of bounds for layer_types",
}


@pytest.mark.full
def test_drafts_are_those_of_an_independent_forward(tmp_path: Path) -> None:
    oracle, found = run_format("SafeAILab EAGLE-3", tmp_path, "ATTN_BACKENDS_FA3")
    assert len(found.drafts) > 20
    assert wrong_drafts(oracle, found) == []


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_does_not_take_it_says(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=re.escape(REFUSED[name])):
        run_format(name, tmp_path, "ATTN_BACKENDS_FA3")


def run_format(name: str, folder: Path, backend: str) -> tuple[HeadOracle, Run]:
    """A head's folder as it is published, in vLLM's engine."""
    format = FORMATS[name]
    tensors = write(format, folder / "head")
    target = copy.deepcopy(tiny_target(format.num_layers))
    target.config.max_position_embeddings = MAX_MODEL_LEN
    target.save_pretrained(folder / "target")
    method = "eagle" if format.facts.get("eagle") else "eagle3"
    drafts = {"method": method, "model": str(folder / "head"), "num_speculative_tokens": NUM_DRAFTED}
    row = Row("target", backend, others=(("speculative_config", drafts),))
    return oracle_of(format, tensors), run(row, folder, PROMPTS, NUM_TOKENS)


@torch.no_grad()
def wrong_drafts(oracle: HeadOracle, run: Run) -> list[str]:
    """Where vLLM drafted another token than the oracle's best, which is better by more than a tie's."""
    wrong = []
    for (prompt, known), drafted in run.drafts.items():
        if known == len(PROMPTS[prompt]) + NUM_TOKENS:
            continue  # the text is at its end: nothing is drafted
        text = (PROMPTS[prompt] + run.tokens[prompt])[:known]
        scores = oracle.log_probs(text, drafted[:-1], oracle.features(text))
        for i, token in enumerate(drafted):
            best = scores[i].argmax()
            if scores[i, best] - scores[i, token] > 1e-4:
                wrong.append(f"prompt {prompt}, {known} known, draft {i}: {token}, not {best}")
    return wrong
