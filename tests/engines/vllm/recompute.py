"""What engines with our backends must equal: the same engine on float64 attention, and transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from tests.engines.vllm.engine import Row, Run, prompts, run

NUM_PROMPTS, NUM_TOKENS = 7, 18  # prompts of up to 110 tokens: some texts end at the end of the context, 128


@cache
def plain(model: str, models: Path, num_prompts: int, drafts: bool, is_async: bool = True) -> Run:
    """A model on TESTS_PLAIN, eagerly: with drafts, or greedily one token after the other.

    is_async: how steps are scheduled. At the end of a text, or of the context, it decides what is drafted.
    """
    same = {"mla-3": "mla-1", "gqa-eagle": "gqa"}
    if not drafts and model in same:
        return plain(same[model], models, num_prompts, drafts)  # of the same target
    backend = "TESTS_PLAIN" if model.startswith("gqa") else "TESTS_PLAIN_MLA"
    return run(Row(model, backend, drafts=drafts, is_async=is_async), models, prompts(num_prompts), NUM_TOKENS)


def greedy_by_transformers(folder: Path, prompt: list[int], text: list[int]) -> list[int]:
    """The best token behind the prompt and behind each token of a text, in float64, all at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + text])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
