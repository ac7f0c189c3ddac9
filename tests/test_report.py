"""Rows of a report: what identical and consistent mean, and that a wrong backend is neither."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_backends.backends.fa3 import FA3Backend
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle import report
from attn_backends_reference.eagle.engine import Engine, build_engine
from attn_backends_reference.eagle.report import (
    ExactScores,
    Text,
    demo_prompts,
    gap,
    is_consistent,
    run_row,
    tokens_per_cycle,
)
from attn_backends_reference.eagle.requests import Completion
from spec_metadata import StepKind

WRONG = "tests.test_report:OneKeyShort"
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
buckets = {buckets}
max_context = 64
max_new_tokens = 12
page_size = 16
dtype = "{dtype}"
"""


class OneKeyShort(FA3Backend):
    """Verify rows see one key less than they should."""

    def write(self, step, buffers):
        """The ragged form with one key missing."""
        super().write(step, buffers)
        if step.kind is StepKind.TARGET_VERIFY:
            buffers["seqused_k"].sub_(1)


@pytest.fixture
def make_config(tmp_path):
    """Makes a short run on the grouped-query model."""

    def make(**options):
        path = tmp_path / "run.toml"
        path.write_text(
            RUN.format(**{"backend": "fa3", "path": "eager", "dtype": "float32", "buckets": "[2]"} | options)
        )
        return load_run_config(str(path))

    return make


@pytest.fixture
def make_row(make_config):
    """Runs a row on the grouped-query model."""
    return lambda **options: run_row(build_engine(make_config(**options)), PROMPTS)


@pytest.mark.parametrize("path", ["eager", "graph"])
def test_a_float32_row_is_identical(make_row, path):
    row = make_row(path=path)
    assert row.identical
    assert row.passed
    assert (row.path, row.draft, row.batch_size, row.divergences, row.max_gap) == (path, "tree", 2, 0, 0.0)
    assert 1 < row.tokens_per_cycle <= 3


def test_the_path_of_a_row_is_the_one_that_ran(make_row):
    """Two requests at once do not fit the only bucket."""
    assert make_row(path="graph", buckets="[1]").path in ("eager", "mixed")


def test_a_bfloat16_row_is_consistent(make_row):
    row = make_row(dtype="bfloat16")
    assert row.consistent
    assert row.passed


def test_a_bfloat16_row_with_a_missing_key_fails(make_row):
    assert not make_row(backend=WRONG, dtype="bfloat16").passed


def test_a_bfloat16_row_can_be_identical_and_inconsistent(make_row, monkeypatch):
    monkeypatch.setattr(report, "is_consistent", lambda *args: False)
    row = make_row(dtype="bfloat16")
    assert row.identical
    assert not row.passed


def test_scores_and_gap_must_be_within_the_budget(make_config):
    exact = ExactScores().of(build_engine(make_config()))
    right, wrong = (build_engine(make_config(backend=name, dtype="bfloat16")) for name in ("fa3", WRONG))
    prompt = right.tokenizer.encode(PROMPTS[0])
    (completion,) = right.generate_plain([prompt], 12)
    text = Text(prompt, completion.tokens, completion.tokens)
    assert is_consistent(right, exact, [text], max_gap=0.0)
    assert not is_consistent(right, exact, [text], max_gap=5.0), "the two best scores are far apart"
    assert not is_consistent(wrong, exact, [text], max_gap=0.0), "verify scores are off"
    other = [*completion.tokens[:6], 255, *completion.tokens[7:]]
    assert not is_consistent(right, exact, [replace(text, eagle=other)], max_gap=0.0), "a token is not the best"


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


@pytest.mark.parametrize("backend", ["flashinfer_mla", "dsv4"])
def test_exact_scores_are_the_hosts_of_torch_and_are_computed_once(backend, monkeypatch):
    """Whatever backend, kernel and precision are under test."""
    computed = []

    def scores(worker, prompt, tokens):
        decode = worker.backends.decode
        computed.append((decode.name, decode.kernel_of(StepKind.DECODE).name, str(worker.device)))
        return report.torch.zeros(len(tokens) - 1, 3)

    monkeypatch.setattr(report, "decode_logits", scores)
    config = load_run_config("chain", backend=backend, runtime={"dtype": "bfloat16", "path": "eager"})
    exact = ExactScores()
    for engine in (build_engine(config), build_engine(config)):
        assert exact.of(engine)([1, 2], [3, 4, 5]).shape == (2, 3)
    assert computed == [("dsv4" if backend == "dsv4" else "fa3", "torch", "cpu")]


def test_the_gap_is_that_of_the_first_difference():
    scored = []

    def scores(prompt, tokens):
        scored.append((prompt, tokens))
        return report.torch.tensor([[9.0, 1.0, 8.0], [3.0, 2.5, 0.0], [7.0, 0.0, 0.0]])[: len(tokens) - 1]

    assert gap(scores, Text([5, 6], [0, 0, 0], [0, 1, 0])) == 0.5
    assert gap(scores, Text([5, 6], [0, 0], [0, 0, 0])) == 7.0
    assert scored == [([5], [6, 0, 0]), ([5], [6, 0, 0, 0])]


def test_a_prefill_is_no_cycle():
    assert tokens_per_cycle([Completion([1] * 7, 2), Completion([1] * 3, 2)]) == 2.0
    assert tokens_per_cycle([Completion([1], 0)]) == 0.0


def test_the_demo_has_prompts_of_different_lengths_that_fit():
    lengths = [len(prompt) for prompt in demo_prompts()]
    runtime = load_run_config("tree").runtime
    assert len(set(lengths)) == len(lengths) >= 4
    assert max(lengths) + 1 + runtime.max_new_tokens <= runtime.max_context
