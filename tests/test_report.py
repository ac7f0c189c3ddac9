"""Rows of a report: what identical and consistent mean, and that a wrong backend is neither."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.config import load_run_config
from attn_backends.eagle import report
from attn_backends.eagle.engine import Engine
from attn_backends.eagle.report import Text, demo_prompts, gap, run_row, tokens_per_cycle
from attn_backends.eagle.serving import Completion
from spec_metadata import StepKind

PROMPTS = ["import os\nimport ", "class Stack:\n    def push(self, "]

RUN = """
backend = "{backend}"
[model]
target = "gqa"
draft = "gqa"
[eagle]
topk = 2
num_steps = 2
num_draft_tokens = 4
[runtime]
path = "{path}"
max_bs = 2
buckets = [2]
max_context = 64
max_new_tokens = 12
page_size = 16
dtype = "{dtype}"
"""


class OneKeyShort(FA3Backend):
    """Verify rows see one key less than they should."""

    def plan(self, step, forward, buffers):
        """The ragged form with one key missing."""
        plan = super().plan(step, forward, buffers)
        return replace(plan, seqused_k=plan.seqused_k - 1) if step.kind is StepKind.TARGET_VERIFY else plan


@pytest.fixture
def make_row(tmp_path):
    """Runs a row on the grouped-query model."""

    def make(**options):
        path = tmp_path / "run.toml"
        path.write_text(RUN.format(**{"backend": "fa3", "path": "eager", "dtype": "float32"} | options))
        return run_row(load_run_config(str(path)), PROMPTS)

    return make


@pytest.mark.parametrize("path", ["eager", "graph"])
def test_a_float32_row_is_identical(make_row, path):
    row = make_row(path=path)
    assert row.identical
    assert row.passed
    assert (row.path, row.draft, row.batch_size, row.divergences, row.max_gap) == (path, "tree", 2, 0, 0.0)
    assert 1 < row.tokens_per_cycle <= 3


def test_a_bfloat16_row_is_consistent(make_row):
    row = make_row(dtype="bfloat16")
    assert row.consistent
    assert row.passed


def test_a_bfloat16_row_with_a_missing_key_fails(make_row):
    row = make_row(backend="tests.test_report:OneKeyShort", dtype="bfloat16")
    assert not row.consistent
    assert not row.passed


def test_a_float32_row_with_another_token_fails(make_row, monkeypatch):
    generate = Engine.generate

    def off_by_one_token(*args):
        first, second = generate(*args)
        return [first, replace(second, tokens=[*second.tokens[:5], 255, *second.tokens[6:]])]

    monkeypatch.setattr(Engine, "generate", off_by_one_token)
    row = make_row()
    assert not row.identical
    assert not row.passed
    assert row.divergences == 1
    assert row.max_gap > 0


def test_the_gap_is_that_of_the_first_difference(monkeypatch):
    scored = []

    def scores(worker, prompt, tokens):
        scored.append((prompt, tokens))
        return report.torch.tensor([[9.0, 1.0, 8.0], [3.0, 2.5, 0.0], [7.0, 0.0, 0.0]])[: len(tokens) - 1]

    monkeypatch.setattr(report, "decode_logits", scores)
    engine = type("Run", (), {"eagle": None})()
    assert gap(engine, Text([5, 6], [0, 0, 0], [0, 1, 0])) == 0.5
    assert gap(engine, Text([5, 6], [0, 0], [0, 0, 0])) == 7.0
    assert scored == [([5], [6, 0, 0]), ([5], [6, 0, 0, 0])]


def test_a_prefill_is_no_cycle():
    assert tokens_per_cycle([Completion([1] * 7, 2), Completion([1] * 3, 2)]) == 2.0
    assert tokens_per_cycle([Completion([1], 0)]) == 0.0


def test_the_demo_has_prompts_of_different_lengths_that_fit():
    lengths = [len(prompt) for prompt in demo_prompts()]
    runtime = load_run_config("tree").runtime
    assert len(set(lengths)) == len(lengths) >= 4
    assert max(lengths) + 1 + runtime.max_new_tokens <= runtime.max_context
