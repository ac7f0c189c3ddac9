"""Folders of published DFlash and DSpark drafts in vLLM 0.33's own engine, on our backend and on attention of these
tests: its drafts are those of the independent forward that our worker's drafts equal, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.block_formats import BLOCKS, DSPARKS, SIZE, BlockOracle
from tests.eagle3_models import tiny_target
from tests.engines.vllm import engine, stand_ins
from tests.engines.vllm.engine import EngineFailed, Row, Run, run
from tests.engines.vllm.kinds import wrong_layers
from tests.engines.vllm.recompute import greedy_by_transformers
from tests.engines.vllm.rows import FULL
from tests.engines.vllm.shadow import compared
from tests.head_formats import write
from tests.head_judges import MAX_CONTEXT, NUM_TOKENS, PROMPTS
from tests.test_dflash import oracle_of

FORMATS = BLOCKS | DSPARKS
READ: dict[str, dict[str, Any]] = {
    "SpecForge DFlash": {},
    "speculators DFlash": {"sliding_window_non_causal": True},
    "DSpark": {},
}
"""Keys that vLLM is given in the place of a folder's: it takes speculators' key for layers without a window, too."""
REFUSED = {
    "SpecForge DFlash, windows": "Unsupported activation: gelu",
    "DSpark, recurrent": "has no attribute 'markov_rank'",
    "speculators DSpark": "no module or parameter named 'markov_head.gate_",
}
"""What vLLM says of the others."""


END = 32
"""A context that the longest text reaches the end of."""


@pytest.mark.full
@pytest.mark.parametrize("name", READ)
def test_drafts_are_those_of_an_independent_forward(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_drafts(*judged(name, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("SpecForge DFlash", FULL),
        pytest.param("SpecForge DFlash", "NONE", marks=pytest.mark.full),
        pytest.param("speculators DFlash", FULL, marks=pytest.mark.full),
        pytest.param("DSpark", FULL, marks=pytest.mark.full),  # test_adaptive_verification runs it, too
        pytest.param("DSpark", "NONE", marks=pytest.mark.full),
    ],
)
def test_blocks_are_drafted_on_our_backend(
    name: str, graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compared() as shadow:
        oracle, found = judged(name, tmp_path, monkeypatch, "ATTN_BACKENDS_FA3", graphs, shadow.begin, max_context=END)
    assert_drafts(oracle, found, PROMPTS, END)
    for prompt, text in zip(PROMPTS, found.tokens, strict=True):
        assert text == greedy_by_transformers(tmp_path / "target", prompt, text)
    drafted = {"draft_block": sum(map(bool, found.drafted))}
    asked = dict.fromkeys(found.layers[0], found.steps) | dict.fromkeys(found.layers[1], drafted)
    assert wrong_layers(found.attended, asked) == []
    assert sum(shadow.compared.values()) == sum(sum(each.values()) for each in asked.values())
    for model in ("target", "draft"):
        assert bool(shadow.compared[f"{model} layer, in a graph"]) == (graphs != "NONE")


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_does_not_take_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineFailed, match=re.escape(REFUSED[name])):
        judged(name, tmp_path, monkeypatch)


@torch.no_grad()
def assert_drafts(
    oracle: BlockOracle, found: Run, given: list[list[int]] = PROMPTS, max_context: int = 2 * MAX_CONTEXT
) -> None:
    """Of blocks within the context; vLLM keeps no row behind it."""
    texts = [prompt + tokens for prompt, tokens in zip(given, found.tokens, strict=True)]
    ends = [min(len(text), max_context - SIZE) for text in texts]
    known = [(texts[i][:count], drafts) for (i, count), drafts in found.drafts.items() if count <= ends[i]]
    assert len(known) > 15
    assert [drafts for _, drafts in known] == [oracle.drafts(text, oracle.features(text)) for text, _ in known]


def judged(
    name: str, folder: Path, patch: pytest.MonkeyPatch, backend: str = "TESTS_PLAIN", graphs: str = "NONE",
    begin: Callable[[], None] = lambda: None, given: list[list[int]] = PROMPTS, max_context: int = 2 * MAX_CONTEXT,
    **more: Any,
) -> tuple[BlockOracle, Run]:  # fmt: skip
    """The forward of a format, and what vLLM made of its folder."""
    form = replace(FORMATS[name], config={**FORMATS[name].config, **READ.get(name, {})})
    target = copy.deepcopy(tiny_target(form.num_layers))
    target.config.max_position_embeddings = 2 * MAX_CONTEXT
    target.save_pretrained(folder / "target")
    table = {"embed_tokens.weight": target.model.embed_tokens.weight.detach().clone()}
    oracle = oracle_of(form, write(form, folder / "head", given=table if table.keys() <= form.tensors.keys() else {}))
    num_drafted, method = SIZE - 1 + bool(form.facts.get("from_root")), "dspark" if "markov" in form.facts else "dflash"
    stand_ins.install_block_drafts()
    patch.setattr(engine, "NUM_DRAFTED", num_drafted)
    asked = {"method": method, "model": str(folder / "head"), "num_speculative_tokens": num_drafted}
    drafting = ("speculative_config", asked | {"attention_backend": backend} | more)
    others = (drafting, ("num_gpu_blocks_override", 96), ("max_model_len", max_context))
    row = Row("target", backend, graphs, is_async=False, others=others)
    return oracle, run(row, folder, given, NUM_TOKENS, begin)
