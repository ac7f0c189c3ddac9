"""EAGLE-3 drafts what a full recompute gives, and emits what plain decoding does, whatever its cycles accept."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch

from attn_backends.errors import UnsupportedStepError
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.mtp import MtpWorker
from attn_backends_reference.eagle.options import PrefillGraphs, WorkerOptions
from attn_backends_reference.eagle.phases import Nothing
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models.eagle3 import Eagle3Model, save_eagle3
from spec_metadata import Capacity, Step
from tests import eagle3_laws as laws
from tests.eagle3_models import CONFIG, LAYERS, random_draft
from tests.eagle3_scenes import Place, workers
from tests.mtp_scenes import random_arrivals
from tests.serving_scenes import CHAIN, EAGER, GRAPH, TREE, engine_parts, plain, prompts, tokens

SIZES = {"vocab_size": 256, "draft_vocab_size": 100, "hidden_size": 256, "max_position_embeddings": 2048}
"""Of the shipped model."""
CAPTURED = [
    (Place("fa3", 16, (1, 2)), laws.CHAIN, 1),
    (Place("fa3", 4, (1, 2), host_lag=1), (2, 2, 4), 64),
    (Place("reference", 1, (1, 2)), laws.TREE, 2),
]
CASES = [
    (Place("fa3", 1, host_lag=1), laws.TREE, 3, None),
    (Place("reference", 8), (1, 1, 2), 5, None),
    *(
        pytest.param(*case, graphs, marks=() if (i + j) % 2 == 0 else pytest.mark.full)
        for (i, case), (j, graphs) in product(enumerate(CAPTURED), enumerate(get_args(PrefillGraphs)))
    ),
]


@pytest.mark.parametrize(("place", "shape", "chunk", "graphs"), CASES, ids=str)
def test_drafts_are_those_of_a_full_recompute(place, shape, chunk, graphs):
    captured = {"prefill_buckets": (6, 16), "prefill_graphs": graphs} if graphs else {}
    scene = random_arrivals(8, 5, 16, 10, seed=2)
    laws.check_scene(place, shape, scene, 3, chunk=chunk, **captured)


def test_chains():
    laws.check_chain()


def test_trees():
    laws.check_tree()


def test_a_step_that_fails_is_tried_again_as_it_was():
    laws.check_failures()


def test_batches_in_between_and_above_the_graphs():
    laws.check_graphs()


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        pytest.param(CHAIN, EAGER, marks=pytest.mark.full),
        (TREE, EAGER),
        (CHAIN, GRAPH),
        pytest.param(TREE, GRAPH, marks=pytest.mark.full),
    ],
    ids=["chain-eager", "tree-eager", "chain-graph", "tree-graph"],
)
def test_a_random_draft_of_the_shipped_model_loses_nothing(shape, path):
    capacity, given = Capacity(3, 96, 16, **shape), prompts(5, 50)
    expected, _ = plain("gqa", "reference", capacity, given, 12)
    target, _, backends, geometry = engine_parts("gqa", "fa3", capacity)
    draft = Eagle3Model(random_draft(CONFIG | SIZES), target, LAYERS)
    worker = EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(chunk=20, **path))
    assert tokens(serve(worker, given, 12)) == tokens(expected)
    assert bool(worker.num_graph_steps) == bool(path)


def test_a_run_of_a_configuration_takes_a_folder(tmp_path):
    save_eagle3(random_draft(CONFIG | SIZES), tmp_path)
    config = load_run_config("tree", backend="fa3", runtime={"max_bs": 2, "max_context": 96, "buckets": (1,)})
    config = config.model_copy(update={"model": config.model.model_copy(update={"draft": str(tmp_path)})})
    engine, given = build_engine(config), prompts(3, 40)
    assert isinstance(engine.drafts[0], Eagle3Model)
    assert [c.tokens for c in engine.generate(given, 12)] == [c.tokens for c in engine.generate_plain(given, 12)]


@pytest.mark.parametrize("buckets", [(), (1, 2)])
def test_an_idle_rank_runs_every_phase(buckets):
    """Results are trimmed to no request, and keep the width of three states."""
    worker, _ = workers(Place(buckets=buckets), Capacity(2, 48, 4, *laws.TREE))
    rows = torch.empty(0, dtype=torch.int64)
    idle = Step.idle(worker.slots.paging(rows))
    phases = worker.step_sets[0]
    with torch.no_grad():
        tree = worker._run(phases.draft, idle, Nothing())
        accepted = worker._run(phases.verify, idle, tree)
        state = worker._run(phases.extend, idle, accepted)
    assert accepted.hidden.shape == (0, 4, 3 * worker.draft.hidden_size)
    assert state.hidden.shape == (0, worker.draft.hidden_size)


def test_more_branches_than_the_draft_has_tokens_are_refused():
    with pytest.raises(UnsupportedStepError, match=r"topk=41 \(the draft has 40 tokens to propose\).*topk=40, or less"):
        workers(Place(), Capacity(2, 48, 4, 41, 2, 60))


def test_multi_layer_mtp_refuses_the_draft():
    """Its modules take one state of the target, so the first window would fail in a projection."""
    worker, _ = workers(Place(), Capacity(2, 48, 4))
    parts = worker.target, [worker.draft], worker.backends, worker.capacity, worker.slots.geometry
    layers = ", ".join(map(str, LAYERS))
    with pytest.raises(UnsupportedStepError, match=rf"after its layers \[{layers}\], as EAGLE-3's.*EagleWorker with"):
        MtpWorker(*parts)


def test_a_target_keeps_its_states_and_another_view_of_it_gives_more():
    worker, plain_worker = workers(Place(), Capacity(2, 48, 4, *laws.CHAIN))
    assert (worker.target.feature_layers, plain_worker.target.feature_layers) == (LAYERS, ())
    assert worker.target.head is plain_worker.target.head
    assert worker.draft.feature_size == 3 * worker.draft.hidden_size
    ids = torch.arange(40)
    assert torch.equal(worker.draft.target_ids(ids), worker.draft._draft.t2d.nonzero().flatten())
