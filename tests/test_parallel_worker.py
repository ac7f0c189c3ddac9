"""The P-EAGLE worker on the shipped target: requests that come and go get plain decoding's tokens, greedy and sampled,
and another shape of drafting, option or backend is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from attn_backends import UnsupportedStepError
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.adaptive import AdaptiveSteps
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.options import PrefillGraphs
from attn_backends_reference.eagle.parallel import ParallelWorker
from attn_backends_reference.eagle.prefill_phases import DRAFT_PREFILL, PREFILL
from attn_backends_reference.eagle.requests import DraftShape
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.run_options import ModelOptions
from spec_metadata import Capacity, Sampling, StepKind
from tests import prefill_laws, serving_laws
from tests.parallel_scenes import NUM_STEPS, SHAPE, parallel_worker, write_head
from tests.serving_scenes import (
    NEWLINE,
    arrivals,
    check_nothing_kept,
    endless,
    failing_steps,
    plain,
    plain_worker,
    prompts,
    tokens,
)


class NarrowExtends(FA3Backend):
    """A backend whose draft extends have at most four rows a request."""

    def unsupported_reasons(self, step: Any) -> list[str]:
        """See `AttentionBackend.unsupported_reasons`."""
        is_wide = step.kind is StepKind.DRAFT_EXTEND and step.width > 4
        return [*super().unsupported_reasons(step), *[f"{step.width} rows of a request"] * is_wide]


GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}
FULL = {"prefill_buckets": (64,), "prefill_graphs": "full"}


@pytest.mark.parametrize(
    ("backend", "page_size", "path", "lag"),
    [
        ("fa3", 16, GRAPH, 1),
        ("fa3", 4, {}, 0),
        pytest.param("reference", 1, {}, 1, marks=pytest.mark.full),
        pytest.param("fa3", 4, GRAPH | {"planning": "in_graph"}, 0, marks=pytest.mark.full),
        pytest.param("fa3", 16, GRAPH | FULL, 1, marks=pytest.mark.full),
        pytest.param("fa3", 1, GRAPH | {"prefill_buckets": (64,)}, 0, marks=pytest.mark.full),
    ],
)
def test_requests_join_and_leave_at_random(backend: str, page_size: int, path: dict[str, Any], lag: int) -> None:
    """Greedy and sampled, token for token what plain decoding gives; no shared page is written to."""
    options = {"checking": path.get("planning") != "in_graph", "eos_tokens": (NEWLINE,), "host_lag": lag}
    worker = parallel_worker(Capacity(6, 112, page_size, **SHAPE), backend, chunk=24, seed=2, **options, **path)
    scene = arrivals(20, 25, 80, 20, seed=3)
    figures = serving_laws.check_scene(worker, scene, endless("gqa", scene, 20))
    assert figures["largest_batch"] > 4, "more than the largest bucket"
    assert figures["tokens_per_cycle"] > 1.6, "drafts are accepted"
    assert {"eos", "stop", "length", "cancelled"} <= figures.keys()
    assert bool(worker.num_graph_steps) == bool(path)


@pytest.mark.parametrize("graphs", get_args(PrefillGraphs))
def test_drafts_prefill_through_a_graph_wherever_the_target_does(graphs: PrefillGraphs) -> None:
    """Also prompts that fill the largest bucket, and have mask rows besides."""
    captured = {"prefill_buckets": (16, 48), "prefill_graphs": graphs, "make_graph": RecordedGraph}
    worker = parallel_worker(Capacity(2, 96, 16, **SHAPE), chunk=24, **captured)
    given = [(48 * each)[:48] for each in prompts(2, 48)]
    with prefill_laws.watched() as seen:
        found = serve(worker, given, 16)
    ran = [(each.num_tokens, each.result.bucket and each.result.bucket.num_tokens) for each in seen]
    assert ran == 2 * [(48, 48), (52, 52)]
    assert tokens(found) == tokens(plain("gqa", "fa3", Capacity(2, 96, 16), given, 16)[0])
    assert not {PREFILL, DRAFT_PREFILL} & worker.num_eager_steps.keys()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_steps", [1, 5])
def test_tokens_are_those_of_plain_decoding_up_to_the_last_position(num_steps: int, temperature: float) -> None:
    """Of contexts that are full at the end, with the host a cycle late."""
    given, sampling = prompts(4, 60), [Sampling(temperature, seed=number) for number in range(4)]
    worker = parallel_worker(
        Capacity(4, 80, 4, 1, num_steps, num_steps + 1, num_extended=2 * num_steps), host_lag=1, chunk=7
    )
    plainly = plain_worker("gqa", "fa3", Capacity(4, 80, 4))
    found, expected = (serve(each, given, 80, sampling=sampling) for each in (worker, plainly))
    assert tokens(found) == tokens(expected)
    assert max(len(prompt) + len(done.tokens) for prompt, done in zip(given, found, strict=True)) == 80
    check_nothing_kept(worker)


def test_a_step_that_fails_is_tried_again() -> None:
    worker, given = parallel_worker(Capacity(4, 96, 16, **SHAPE), chunk=24), prompts(6, 60)
    expected, _ = plain("gqa", "fa3", Capacity(6, 96, 16), given, 16)
    with failing_steps() as failed:
        found = serve(worker, given, 16)
    assert tokens(found) == tokens(expected)
    assert failed.keys() >= {"prefill", "draft_prefill", "verify", "draft_extend"}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_draft_tokens": 3}, {}, r"topk=1, num_draft_tokens=3 \(a mask row proposes one\)"),
    ({"topk": 2}, {}, r"topk=2, num_draft_tokens=4"),
    ({"num_extended": None}, {}, r"num_extended=None \(a draft extend has at most 4 accepted rows and 2 masks"),
    ({"num_rerun": 2}, {}, r"num_rerun=2, .*and runs none again.*Instead: Capacity\(\.\.\., 1, 3, 4, num_extended=6\)"),
    ({}, {"verify_threshold": 0.5}, r"verifying by confidence \(EagleWorker"),
    ({}, {"draft_window": 16}, r"draft_window=16 \(EagleWorker"),
    ({}, {"draft_graphs": "per_module"}, r"draft_graphs='per_module'"),
    ({}, {"placeholder_token": 3}, r"prompts with embeddings"),
    ({}, {"adaptive": AdaptiveSteps((DraftShape(1, 3, 4),), {1: (1.0,)})}, r"adaptive steps"),
]


@pytest.mark.parametrize(("shape", "options", "reason"), REFUSED)
def test_what_it_does_not_do_is_refused(shape: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    capacity = replace(Capacity(2, 96, 16, **SHAPE), **shape)
    with pytest.raises(UnsupportedStepError, match=reason):
        parallel_worker(capacity, **options)


def test_a_backend_that_can_t_take_the_mask_rows_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match="can't draft in a draft extend: 6 rows of a request"):
        parallel_worker(Capacity(2, 96, 16, **SHAPE), "tests.test_parallel_worker:NarrowExtends")


def test_a_window_that_ends_before_the_masks_is_refused() -> None:
    worker = parallel_worker(Capacity(2, 96, 16, **SHAPE))
    draft = worker.draft
    layers, narrow = draft.layers, tuple(replace(layer, window=2) for layer in draft.layers)
    try:
        draft.layers = narrow
        with pytest.raises(UnsupportedStepError, match=r"num_steps=3 \(a window of 2 ends before the row"):
            ParallelWorker(worker.target, draft, worker.backends, worker.capacity, worker.slots.geometry)
    finally:
        draft.layers = layers


def test_a_folder_runs_without_a_file(tmp_path: Path) -> None:
    """Its configuration says that it drafts all tokens at once."""
    write_head(tmp_path)
    model = ModelOptions(target="gqa", draft=str(tmp_path))
    config = load_run_config(None, model=model, runtime={"max_bs": 2, "max_context": 96, "dtype": "float32"})
    assert config.eagle is not None
    assert config.eagle.worker == "parallel"
    assert "draft" not in config.phases
    engine = build_engine(config)
    assert isinstance(engine.eagle, ParallelWorker)
    given = prompts(2, 40)
    assert tokens(engine.generate(given, 16)) == tokens(engine.generate_plain(given, 16))
    assert engine.ran["draft_extend"]["graph"]
    assert "draft" not in engine.ran
    assert engine.eagle.capacity.num_extended == 2 * NUM_STEPS
