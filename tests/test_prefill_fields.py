"""Whatever a prefill returns comes back from every path: next-token logits, hidden states, those of several layers,
and input embeddings, given ones among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from attn_backends.runner import PerRequest, PerToken, PhaseRunner, Runner, StepResult
from attn_backends_reference.eagle.phases import Model
from attn_backends_reference.eagle.prefill_phases import PrefillInputs, prefill_phase
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.worker import TargetWorker, last_rows
from attn_backends_reference.pieces import Forward, PackedPhase, PiecewiseRunner, whole
from spec_metadata import Step, pad_step, token_positions
from tests import mm_laws
from tests.mm_laws import PLACEHOLDER, prompt_of, text
from tests.prefill_laws import BUCKETS, check_close, check_identical

LENS = {(9, 1, 4): 32, (3, 2): 8, (20, 5, 7): 32, (2, 1, 1, 4): 8, (1,): 8, (26, 8): None}
"""Lengths of prompts, and the bucket that holds them."""


@dataclass(frozen=True, eq=False)
class Fields:
    """logits: [bs, vocab]. hidden, embeds: [num_tokens, H]. states: [num_tokens, 3H], behind three layers."""

    logits: PerRequest
    hidden: PerToken
    states: PerToken
    embeds: PerToken


def phase_of(worker: TargetWorker) -> PackedPhase[PrefillInputs, Fields]:
    """A target's prefill that returns all of them."""
    target, model = worker.target, Model(worker.target, worker.target_caches, worker.backends.prefill)
    known = prefill_phase(model, worker.capacity, worker._sampling)

    def region(forward: Forward, given: PrefillInputs) -> Fields:
        attention = model.attention(forward)
        hidden, states = target.forward_features(given.tokens, given.positions, attention, given.multimodal)
        return Fields(target.logits(hidden[given.last]), hidden, states, target.embed(given.tokens, given.multimodal))

    phase = PackedPhase("fields", region, known.safe_inputs, Fields, known.bucket)
    assert worker._multimodal is not None
    return worker._multimodal.phase(phase)


def step_of(worker: TargetWorker, rows: Sequence[int], lens: Sequence[int]) -> tuple[Step, Any]:
    """A step over prompts whose every third token is hidden, and its inputs."""
    form, chunks = worker.embedding_form, list[Chunk]()
    assert form is not None
    for row, length in zip(rows, lens, strict=False):
        prompt, embeddings = prompt_of(worker, text(length, range(0, length, 3), 0, seed=length))
        chunks.append(Chunk(row, prompt, 0, length, form.take(prompt, embeddings)))
    step = worker._prefill_step(chunks)
    inputs = PrefillInputs(
        tokens=torch.tensor([token for chunk in chunks for token in chunk.tokens]),
        positions=token_positions(step),
        last=last_rows(step),
        table_rows=step.paging.rows,
    )
    return step, worker._with_embeddings(inputs, chunks)


def check_same(check: Any, found: Any, expected: Any) -> None:
    for field in fields(Fields):
        check(field.name, getattr(found, field.name), getattr(expected, field.name))


@pytest.fixture
def worker() -> TargetWorker:
    made = mm_laws.make("eagle3", mm_laws.PLACE, "eager", placeholder_token=PLACEHOLDER)
    for _ in range(4):
        made.slots.reserve(made.slots.admit(), 40)
    return made


@torch.no_grad()
def test_every_field_is_that_of_eager_prefill(worker: TargetWorker) -> None:
    phase, backend = phase_of(worker), worker.backends.prefill
    eager = PiecewiseRunner(phase, backend)
    pieces: Runner[Any, Fields] = PiecewiseRunner(phase, backend, BUCKETS, RecordedGraph)
    full: Runner[Any, Fields] = PhaseRunner(whole(phase), backend, worker._paging(), BUCKETS, RecordedGraph)
    for lens, size in LENS.items():
        step, inputs = step_of(worker, range(1, 5), lens)
        expected = eager.run(step, inputs)
        assert (expected.value.logits.shape, expected.value.states.shape) == ((len(lens), 64), (sum(lens), 96))
        for runner in (pieces, full):
            found = runner.run(step, inputs)
            assert found.bucket == (None if size is None else worker.capacity.prefill_bucket(size))
            check_same(check_close, found.value, expected.value)


@torch.no_grad()
def test_every_field_of_a_full_graph_is_that_of_the_padded_step_to_the_bit(worker: TargetWorker) -> None:
    phase, backend = phase_of(worker), worker.backends.prefill
    full = PhaseRunner(whole(phase), backend, worker._paging(), BUCKETS, RecordedGraph)
    for lens, size in LENS.items():
        step, inputs = step_of(worker, range(1, 5), lens)
        found: StepResult[Fields] = full.run(step, inputs)
        if size is not None and found.bucket is not None:
            captured = full._captured[size]
            unbounded = replace(step, max_committed=None, seq_lens_cpu=None)  # a bound shortens an eager plan
            padded = backend.init_forward_metadata(pad_step(unbounded, found.bucket, backend.capacity))
            check_same(check_identical, captured.outputs, phase.region(padded.at(), captured.inputs))
