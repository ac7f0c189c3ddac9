"""vLLM's engine with our backends inside: its tokens, its drafts, and every attention call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.engines.vllm.refusals import KERNEL
from tests.engines.vllm.engine import MAX_MODEL_LEN, MAX_NUM_SEQS, EngineFailed, Row, Run, prompts, run
from tests.engines.vllm.laws import assert_attended, check, wrong_drafts
from tests.engines.vllm.recompute import NUM_PROMPTS, greedy_by_transformers, plain
from tests.engines.vllm.rows import BOTH, EAGLE, FULL, QUICK, full_product, pairs
from tests.engines.vllm.shadow import compared

NONE_OF_OURS = r"layers\.0\.self_attn\.attn: 0 of .* prefill; .*layers\.4\.self_attn\.attn: 0 of \d+ target_verify"


@pytest.mark.parametrize("row", [*QUICK, EAGLE], ids=str)
def test_row(row: Row, models: Path) -> None:
    check(row, models, NUM_PROMPTS)


BATCHES = {
    "16 rows of prompts where a graph has those of four verifies": (FULL, (3, 5, 4, 4)),
    "a long prompt's last rows, fewer than a shorter prompt's": ("NONE", (3, 66, 54)),
}


@pytest.mark.parametrize("what", BATCHES)
def test_a_batch_that_is_planned_by_its_own_lengths(what: str, models: Path) -> None:
    graphs, lens = BATCHES[what]
    with compared() as shadow:
        run(Row("gqa", "ATTN_BACKENDS_FA3", graphs), models, [[7] * num for num in lens], 4, begin=shadow.begin)
    assert shadow.compared["target layer, eagerly"]


def test_a_kernel_that_is_asked_for_runs_every_step(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FA3Backend.kernels[-1]
    monkeypatch.setattr(FA3Backend, "kernels", (first, replace(first, name="second")))
    monkeypatch.setenv(KERNEL, "second")
    found = run(Row("gqa", "ATTN_BACKENDS_FA3"), models, prompts(1), 4)
    assert {kind["kernel"] for kinds in found.attended.values() for kind in kinds.values()} == {"second"}


def test_a_verify_wider_than_the_kernel_takes_is_refused_where_its_width_is_known(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FA3Backend.kernels[-1]
    narrow = {kind: replace(able, max_width=3) for kind, able in kernel.capabilities.items()}
    monkeypatch.setattr(FA3Backend, "kernels", (replace(kernel, capabilities=narrow),))
    words = r"fa3 in vLLM, layers model.layers.0.* and on: kernel torch: 4 query rows per request \(at most 3\)"
    with pytest.raises(EngineFailed, match=words):
        run(Row("gqa", "ATTN_BACKENDS_FA3"), models, prompts(1), 4)


def test_the_quick_rows_have_every_pair_of_values() -> None:
    assert set().union(*map(pairs, QUICK)) == set().union(*map(pairs, full_product()))
    assert {row.graphs for row in QUICK} == {"NONE", FULL, BOTH}
    assert {row.fused for row in QUICK} == {True, False}
    assert {row.is_async for row in QUICK} == {True, False}
    assert any(row.is_async for row in QUICK if row.graphs == FULL)


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
    with pytest.raises(AssertionError, match=NONE_OF_OURS):
        assert_attended(row, plain("gqa", models, NUM_PROMPTS, True))


@pytest.mark.full
def test_vllms_own_backend_gives_the_same_and_fails(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's interpreter, on no device: vLLM asks one for its capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    found, wanted = (run(Row("gqa", name), models, prompts(2), 4) for name in ("TRITON_ATTN", "TESTS_PLAIN"))
    assert found.drafts
    assert (found.tokens, found.drafts) == (wanted.tokens, wanted.drafts)
    with pytest.raises(AssertionError, match=NONE_OF_OURS):
        assert_attended(Row("gqa", "ATTN_BACKENDS_FA3"), found)


def test_a_draft_may_lack_where_none_is_wanted_and_nowhere_else() -> None:
    given, drafts = [[1, 2, 3]], {(0, known): [7, 8, 9] for known in range(4, 9)}
    wanted = Run([[4] * 5], drafts)
    lacks = {number: {key: each for key, each in drafts.items() if key[1] != number} for number in (6, 7)}
    assert wrong_drafts(Run(wanted.tokens, lacks[7]), wanted, given) == []
    assert wrong_drafts(Run(wanted.tokens, lacks[6]), wanted, given) == [
        "None for [7, 8, 9] of prompt 0, 6 tokens known"
    ]
    other = wrong_drafts(Run(wanted.tokens, drafts | {(0, 8): [7, 8, 1]}), wanted, given)
    assert other == ["[7, 8, 1] for [7, 8, 9] of prompt 0, 8 tokens known"]
