"""What our layers hold of vLLM's caches: no more than it does itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.utils import clear_layer_kv_caches

from tests.engines.vllm import engine
from tests.engines.vllm.engine import Row, run, runner_of

GQA = Row("gqa", "ATTN_BACKENDS_FA3", drafts=False)
MLA = Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", drafts=False, block_size=32)
PROMPT, NUM_TOKENS = [3, 1, 4, 1, 5], 3


def watched(before: torch.Tensor) -> tuple[torch.Tensor, ref[Any]]:
    """A cache as another, no view to torch as vLLM's, and what dies with its memory."""
    memory = np.zeros(before.nbytes, dtype=np.uint8)
    cache = torch.from_numpy(memory).view(before.dtype).as_strided(before.shape, before.stride())
    return cache.detach(), ref(memory)


@pytest.mark.parametrize("row", [GQA, MLA], ids=["keys and values", "latents"])
def test_a_cache_is_used_while_it_is_bound_and_not_held(
    row: Row, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM captures graphs on one cache and runs on another, and its layers outlive their caches."""
    build, layers, old, memories = engine.build, list[Any](), list[torch.Tensor](), list[ref[Any]]()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    first = list[int]()

    def rebound(*args: Any) -> Any:
        llm = build(*args)
        first.extend(llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids)
        for layer in runner_of(llm).compilation_config.static_forward_context.values():
            layers.append(layer)
            old.append(layer.kv_cache)
            layer.kv_cache, memory = watched(layer.kv_cache)
            memories.append(memory)
            old[-1].zero_()
        return llm

    monkeypatch.setattr(engine, "build", rebound)
    assert run(row, models, [PROMPT], NUM_TOKENS).tokens == [first]
    assert not any(cache.any() for cache in old), "written after another was bound"
    assert layers
    clear_layer_kv_caches(layers)
    assert all(memory() is None for memory in memories)
