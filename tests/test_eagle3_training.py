"""Training an EAGLE-3 draft: its unrolled steps and the evaluator's trees are a full recompute's, it learns
the target's choices in a vocabulary of its own, and what is stored drafts in the worker.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models import load_draft
from attn_backends_reference.models.eagle3 import Eagle3Draft, save_eagle3
from spec_metadata import Capacity
from tests import reference_models as rm
from tests.eagle3_models import published
from tests.eagle3_oracle import Oracle
from tests.serving_scenes import CHAIN, engine_parts, plain, prompts, tokens
from training import eagle3, models, train
from training.corpus import load_heldout
from training.cycles import Eagle3Window, Shape
from training.evaluate import drafters
from training.fitting import Recipe

CPU = torch.device("cpu")
TEXT = b"\0".join(load_heldout().values())


@cache
def target() -> PreTrainedModel:
    return models.load_target(models.CHECKPOINTS / "gqa" / "target", torch.float32, CPU)


def random_draft() -> Eagle3Draft:
    draft = eagle3.new_eagle3(TEXT)
    for part in (draft.fc, draft.layers, draft.lm_head):
        rm.randomize(part, seed=3)
    return draft.eval().requires_grad_(False)


def oracle_of(draft: Eagle3Draft) -> Oracle:
    config = models.COMMON | eagle3.EAGLE3
    model = AutoModelForCausalLM.from_pretrained(
        models.CHECKPOINTS / "gqa" / "target", attn_implementation="eager", dtype=torch.float32
    )
    return Oracle(model.eval(), config, published(draft), tuple(eagle3.layers_of(draft)))


@torch.no_grad()
def test_unrolled_steps_see_what_drafting_sees() -> None:
    draft, ids = random_draft(), torch.tensor(list(TEXT[700:724]))
    oracle, text = oracle_of(draft), ids.tolist()
    embeds, features, _ = eagle3.teacher3(target(), draft, ids[None])
    steps = train.unroll(draft, embeds, draft.fc(features), partial(eagle3.score, draft), 3)
    of_text = oracle.features(text)
    for row in (0, 7, 20):
        expected = oracle.log_probs(text[: row + 2], text[row + 2 : row + 4], of_text)[:, draft.target_ids]
        found = torch.stack([logits[0, row] for logits in steps if row < logits.shape[1]]).log_softmax(-1)
        torch.testing.assert_close(found, expected[: len(found)], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_evaluator_drafts_as_a_full_recompute() -> None:
    draft, roots = random_draft(), [1, 2, 60, 98]
    file, oracle = torch.tensor(list(TEXT[500:599])), oracle_of(draft)
    window = Eagle3Window(target(), draft, file.expand(len(roots), -1))
    trees, features = window.draft_tree(torch.tensor(roots), Shape(1, 3, 4)), oracle.features(file.tolist())
    for root, drafted in zip(roots, trees.tokens.tolist(), strict=True):
        scores = oracle.log_probs(file[: root + 1].tolist(), drafted[1:-1], features)
        assert drafted == [int(file[root]), *scores.argmax(-1).tolist()]
    assert len({tuple(row) for row in trees.tokens[:, 1:].tolist()}) > 2


@torch.no_grad()
def test_goals_are_the_target_s_distributions_among_the_draft_s_tokens() -> None:
    """A row whose likeliest token the draft lacks teaches nothing."""
    draft, ids = random_draft(), torch.tensor([list(TEXT[700:764])])
    logits = target()(input_ids=ids, use_cache=False).logits[0, 1:]
    lacked = int(logits[5].argmax())
    draft.t2d[lacked], draft.t2d[1] = False, True
    own = draft.t2d.nonzero().flatten()
    draft.d2t.copy_(own - torch.arange(len(own)))
    _, features, goal = eagle3.teacher3(target(), draft, ids)
    assert features.shape == (1, 63, 768)
    for row, scores in zip(goal[0], logits, strict=True):
        expected = scores.softmax(-1)[own] / scores.softmax(-1)[own].sum() * (scores.argmax() != lacked)
        torch.testing.assert_close(row, expected * draft.t2d[scores.argmax()], rtol=1e-4, atol=1e-5)
    assert float(goal[0, 5].sum()) == 0


def test_a_few_steps_make_a_draft_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "VALID_LENGTH", 32)
    recipe = Recipe(0, 12, 2, 48, 2e-3, 0.01)
    before = eagle3.new_eagle3(TEXT)
    draft, rows = train.train_eagle3("gqa", target(), TEXT, TEXT, recipe, fast=False)
    assert sum(rows[-2]["bits"]) < 0.7 * sum(rows[0]["bits"]), f"it learns: {rows[0]}, {rows[-2]}"
    assert len(rows[-1]["agreement"]) == 3
    assert torch.equal(before.d2t, draft.d2t), "the vocabulary stays"
    folder = tmp_path / "eagle3"
    save_eagle3(copy.deepcopy(draft), folder)
    assert (folder / "model.safetensors").stat().st_size < 2**21
    assert set(drafters_of(tmp_path)) == {"chain", "tree", "eagle3_chain", "eagle3_tree"}
    capacity, given = Capacity(2, 48, 16, **CHAIN), prompts(2, 30)
    expected, _ = plain("gqa", "reference", capacity, given, 8)
    served, _, backends, geometry = engine_parts("gqa", "fa3", capacity)
    worker = EagleWorker(served, load_draft(folder, served), backends, capacity, geometry, WorkerOptions())
    assert tokens(serve(worker, given, 8)) == tokens(expected)


def drafters_of(folder: Path) -> dict[str, object]:
    (folder / "draft").symlink_to((models.CHECKPOINTS / "gqa" / "draft").absolute())
    return dict(drafters(folder, target(), torch.float32, CPU))


def test_a_stream_of_too_few_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="the stream has 3 different tokens, the draft 96"):
        eagle3.new_eagle3(b"abcabc")
