"""The H200's run of targets of 8B shape, tried small: it passes, and sees a token that is wrong."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from attn_backends_reference.eagle.requests import Request, RequestOptions
from tests import models_8b

SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
CONFIG = Qwen3Config(vocab_size=512, intermediate_size=256, num_hidden_layers=8, **SIZES)
SHAPE = models_8b.Shape(CONFIG, torch.float32, num_ids=256, batch_size=2, prompt=12, new_tokens=20)


@pytest.mark.full
def test_a_small_target_and_its_head_pass() -> None:
    chain, tree = models_8b.rows("cpu", {"small": SHAPE})
    for row, form in ((chain, "chain"), (tree, "tree")):
        assert row["draft"] == form
        assert (row["status"], row["equal_in_float32"], row["ties"]) == ("pass", 2, 0)
        assert row["tokens_per_cycle"] >= 1.5
        assert row["graph_steps"]["verify"] > 5
        assert {"decode_ms", "draft_ms", "verify_ms", "draft_extend_ms"} < row.keys()


@torch.no_grad()
def test_a_row_whose_draft_is_never_right_or_whose_texts_differ_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SHAPE._replace(prompt=3, new_tokens=4, compared=4)
    monkeypatch.setattr(models_8b, "run", lambda *_: {"tokens_per_cycle": 1.4})
    assert {row["status"] for row in models_8b.rows("cpu", {"small": small})} == {"fail"}
    monkeypatch.setattr(models_8b, "run", lambda *_: {"tokens_per_cycle": 1.6})
    assert {row["status"] for row in models_8b.rows("cpu", {"small": small})} == {"pass"}
    monkeypatch.setattr(models_8b, "equal_texts", lambda *_: 1)
    assert {row["status"] for row in models_8b.rows("cpu", {"small": small})} == {"fail"}


@torch.no_grad()
def test_the_gap_of_another_token_is_a_share_of_the_best_score() -> None:
    ids, successor = torch.arange(256), torch.arange(256).roll(1)
    target = models_8b.target_of(SHAPE, ids, successor)
    row = models_8b.scores(target, torch.tensor([3, 7]))[-1]
    best, worst = int(row.argmax()), int(row.argmin())

    def request(output: list[int]) -> Request:
        made = Request(0, [3, 7], RequestOptions(2), 2, None, None)
        made.output.extend(output)
        return made

    plain = [request([best, 5])] * 2
    assert models_8b.gaps(target, plain, [request([worst, 5]), request([best, 5])])[0] > 1
    target.head.weight[worst] = target.head.weight[best] * 0.999
    (gap,) = models_8b.gaps(target, plain, [request([worst, 5]), request([best, 5])])
    assert gap == pytest.approx(0.001, abs=1e-5)
