"""vLLM's engine with our backends inside: its tokens, its drafts, and every attention call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.engine import MAX_MODEL_LEN, MAX_NUM_SEQS, Row, prompts, run
from tests.engines.vllm.laws import assert_attended, assert_compared
from tests.engines.vllm.recompute import NUM_PROMPTS, NUM_TOKENS, greedy_by_transformers, plain
from tests.engines.vllm.rows import BOTH, FULL, QUICK, full_product, pairs
from tests.engines.vllm.shadow import compared, stepwise


def check(row: Row, models: Path, num_prompts: int) -> None:
    with compared() as shadow, stepwise(row):
        found = run(row, models, prompts(num_prompts), NUM_TOKENS, begin=shadow.begin)
    wanted = plain(row.model, models, num_prompts, True)
    assert found.tokens == plain(row.model, models, num_prompts, False).tokens
    assert found.drafts == wanted.drafts
    assert_attended(row, found)
    assert_compared(row, found, shadow)
    assert bool(found.padded) == (row.graphs != "NONE"), "2 or 3 requests run in the graph of 4"
    assert bool(found.cached) == row.caching


@pytest.mark.parametrize("row", QUICK, ids=str)
def test_row(row: Row, models: Path) -> None:
    check(row, models, NUM_PROMPTS)


@pytest.mark.full
@pytest.mark.parametrize("row", full_product(), ids=str)
def test_every_row(row: Row, models: Path) -> None:
    check(row, models, 64)


def test_the_quick_rows_have_every_pair_of_values() -> None:
    assert set().union(*map(pairs, QUICK)) == set().union(*map(pairs, full_product()))
    assert {row.graphs for row in QUICK} == {"NONE", FULL, BOTH}
    assert {row.fused for row in QUICK} == {True, False}


@pytest.mark.parametrize("model", ["gqa", "mla-1"])
def test_plain_decoding_is_transformers(model: str, models: Path) -> None:
    for prompt, text in zip(prompts(NUM_PROMPTS), plain(model, models, NUM_PROMPTS, False).tokens, strict=True):
        assert text == greedy_by_transformers(models / model, prompt, text)


@pytest.mark.parametrize("model", ["gqa", "mla-1", "mla-3"])
def test_what_is_asked_reaches_the_ends(model: str, models: Path) -> None:
    """More requests than fit at once, an end of the context, and drafts that are accepted and rejected."""
    found = plain(model, models, NUM_PROMPTS, True)
    assert len(found.tokens) > MAX_NUM_SEQS
    totals = [len(prompt) + len(text) for prompt, text in zip(prompts(NUM_PROMPTS), found.tokens, strict=True)]
    assert max(totals) == MAX_MODEL_LEN
    num_tokens = sum(len(text) for text in found.tokens)
    assert num_tokens / 4 < len(found.drafts) < num_tokens


def test_an_engine_on_another_backend_fails(models: Path) -> None:
    row = Row("gqa", "ATTN_BACKENDS_FA3")
    with pytest.raises(AssertionError):
        assert_attended(row, plain("gqa", models, NUM_PROMPTS, True))
