"""The reference workers on the shipped models: EAGLE equals plain greedy decoding, whatever happens to the batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from attn_backends.errors import UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.phases import Nothing
from attn_backends_reference.eagle.requests import RequestError
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker
from spec_metadata import Capacity, InvalidStepError, Step
from tests.serving_scenes import (
    CHAIN,
    EAGER,
    GRAPH,
    PHASES,
    TREE,
    eagle,
    eagle_worker,
    engine_parts,
    plain,
    plain_worker,
    prompts,
    tokens,
)
from training.cycles import Shape, Window
from training.models import CHECKPOINTS
from training.models import load_draft as load_trained_draft
from training.models import load_target as load_trained_target

# Every backend, model, page size, draft and path, each pair of them at least once.
CASES = [
    ("mla", "flashinfer_mla", 16, CHAIN, GRAPH),
    ("mla", "flashinfer_mla", 1, TREE, EAGER),
    ("mla", "flashinfer_mla", 64, TREE, GRAPH),
    ("mla", "trtllm_mla", 64, CHAIN, EAGER),
    ("mla", "trtllm_mla", 32, TREE, GRAPH),
    ("mla", "fa3", 64, TREE, EAGER),
    ("mla", "fa3", 1, CHAIN, GRAPH),
    ("mla", "reference", 16, TREE, EAGER),
    ("gqa", "fa3", 16, TREE, GRAPH),
    ("gqa", "fa3", 1, CHAIN, EAGER),
    ("gqa", "fa3", 64, CHAIN, GRAPH),
    ("gqa", "reference", 32, CHAIN, GRAPH),
]


@cache
def plainly(model: str, backend: str) -> list[list[int]]:
    """What plain decoding makes of six prompts on a backend, 16 tokens each."""
    found, _ = plain(model, backend, Capacity(6, 96, 16), prompts(6, 60), 16)
    return tokens(found)


@pytest.mark.parametrize(("model", "backend", "page_size", "draft", "path"), CASES)
@pytest.mark.one_in(3)
def test_eagle_equals_plain_decoding(model, backend, page_size, draft, path):
    """Six requests of which three run at once, through buckets of 1 and 2, eagerly at 3, in chunks of 20 tokens."""
    capacity = Capacity(3, 96, page_size, **draft)
    found, worker = eagle(model, backend, capacity, prompts(6, 60), 16, chunk=20, seed=3, **path)
    assert tokens(found) == plainly(model, "reference" if backend == "fa3" else "fa3")
    assert min(worker.num_eager_steps.values()) > 0, "three requests are more than the largest bucket"
    assert bool(worker.num_graph_steps) == bool(path)
    assert sum(c.num_cycles for c in found) < 0.7 * sum(len(c.tokens) for c in found), "drafts are accepted"


@pytest.mark.parametrize(
    ("model", "backend", "draft"),
    [("gqa", "fa3", TREE), ("mla", "flashinfer_mla", CHAIN), ("mla", "trtllm_mla", CHAIN), ("gqa", "reference", CHAIN)],
)
def test_graphs_that_plan_themselves(model, backend, draft):
    """Planning as a graph's first node."""
    capacity = Capacity(2, 96, 32, **draft)
    found, worker = eagle(model, backend, capacity, prompts(2, 60), 16, checking=False, planning="in_graph", **GRAPH)
    assert tokens(found) == plainly(model, "fa3")[:2]
    assert worker.num_graph_steps["verify"] > 0
    assert not worker.num_eager_steps.get("verify")


@pytest.mark.parametrize("make", [plain_worker, eagle_worker])
def test_a_context_has_no_more_tokens_than_the_target_has_positions(make):
    make("gqa", "fa3", Capacity(1, 2048, 16, **CHAIN))
    message = r"max_context=2049 \(the target has 2048 positions\). Instead: max_context=2048, or less"
    with pytest.raises(UnsupportedStepError, match=message):
        make("gqa", "fa3", Capacity(1, 2049, 16, **CHAIN))


def test_planning_has_two_places():
    with pytest.raises(InvalidStepError, match="'before' or 'in_graph', got 'after'"):
        WorkerOptions(planning="after")


@pytest.mark.parametrize("draft", [CHAIN, TREE])
def test_a_request_ends_on_the_last_token_of_the_context(draft):
    capacity = Capacity(2, 48, 16, **draft)
    given = [prompts(6, 60)[3][:30], prompts(6, 60)[5][:46], [65] * 47]
    expected, _ = plain("gqa", "fa3", capacity, given, 1000)
    found, _ = eagle("gqa", "fa3", capacity, given, 1000, **GRAPH)
    assert tokens(found) == tokens(expected)
    assert [len(p) + len(c.tokens) for p, c in zip(given, found, strict=True)] == [48, 48, 48]


def test_torchs_default_type_changes_nothing():
    capacity, given = Capacity(2, 64, 16, **CHAIN), prompts(2, 30)
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity)
    found, usual = [], torch.get_default_dtype()
    for dtype in (usual, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            worker = EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(**GRAPH))
            found.append(serve(worker, given, 12))
        finally:
            torch.set_default_dtype(usual)
    assert found[0] == found[1]


def test_an_end_token_inside_an_accepted_run_ends_the_request():
    newline, capacity, given = 10, Capacity(4, 128, 16, **TREE), prompts(4, 40)
    unending, _ = eagle("gqa", "fa3", capacity, given, 40)
    found, _ = eagle("gqa", "fa3", capacity, given, 40, eos_tokens=(newline,))
    cut = [row[: row.index(newline) + 1] if newline in row else row for row in tokens(unending)]
    assert tokens(found) == cut
    assert any(len(row) < 40 for row in cut)


def test_one_backend_per_phase():
    names = dict.fromkeys(PHASES, "flashinfer_mla") | {"prefill": "fa3", "verify": "trtllm_mla", "decode": "reference"}
    found, _ = eagle("mla", names, Capacity(3, 96, 32, **TREE), prompts(5, 60), 16, **GRAPH)
    assert tokens(found) == plainly("mla", "fa3")[:5]


@pytest.mark.parametrize("shape", [(3, 1, 4), (1, 1, 2), (2, 2, 3), (5, 4, 20), (1, 3, 3)])
def test_other_shapes_of_drafting(shape):
    topk, num_steps, num_draft_tokens = shape
    capacity = Capacity(4, 96, 16, topk, num_steps, num_draft_tokens)
    found, _ = eagle("gqa", "fa3", capacity, prompts(4, 60), 16, **GRAPH)
    assert tokens(found) == plainly("gqa", "fa3")[:4]


def test_a_worker_can_be_used_again_and_repeats_itself():
    capacity, given = Capacity(3, 96, 16, **TREE), prompts(5, 50)
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity)
    worker = EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions((1, 2, 3), RecordedGraph))
    first, second = serve(worker, given, 12), serve(worker, given, 12)
    assert first == second


def test_progress_counts_every_token_once():
    seen: list[int] = []
    capacity = Capacity(2, 96, 16, **CHAIN)
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity)
    worker = EagleWorker(target, draft, backends, capacity, geometry)
    found = serve(worker, prompts(3, 30), 12, seen.append)
    assert sum(seen) == sum(len(c.tokens) for c in found)


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ([], 8, "a prompt is empty"),
        ([1] * 48, 8, "a prompt has 48 tokens"),
        ([1], 0, "max_new_tokens must be at least 1"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(prompt, new_tokens, message):
    capacity = Capacity(2, 48, 16, **CHAIN)
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity)
    worker = EagleWorker(target, draft, backends, capacity, geometry)
    with pytest.raises(RequestError, match=message):
        serve(worker, [[1, 2], prompt], new_tokens)
    assert not any(bool(cache.k.any()) for cache in worker.target_caches)
    assert not worker.slots.in_use


@pytest.mark.parametrize("path", [EAGER, GRAPH])
def test_an_idle_rank_runs_every_phase_and_writes_nothing(path):
    """A rank without requests still takes part: every region runs on no row at all, or on padding."""
    capacity = Capacity(2, 48, 16, **TREE)
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity, checking=not path)
    worker = EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(**path))
    rows = torch.empty(0, dtype=torch.int64)
    idle, reserved = Step.idle(worker.slots.paging(rows)), geometry.reserved_page
    phases = worker.step_sets[0]
    with torch.no_grad():
        tree = worker._run(phases.draft, idle, Nothing())
        accepted = worker._run(phases.verify, idle, tree)
        extended = worker._run(phases.extend, idle, accepted)
    assert tree.tokens.shape == (0, 16)
    assert accepted.hidden.shape == (0, 4, 256)
    assert extended.tokens.shape == (0, 4)
    for layer in (*worker.target_caches, *worker.draft_caches):
        assert not bool(layer.k[torch.arange(geometry.num_pages) != reserved].any())


@pytest.mark.parametrize("model", ["gqa", "mla"])
@pytest.mark.parametrize("draft", [CHAIN, TREE])
def test_cycles_accept_what_the_training_evaluator_accepts(model, draft):
    """The evaluator drafts and verifies with transformers' own layers and no paged cache; tokens a cycle must agree."""
    folder, device = CHECKPOINTS / model, torch.device("cpu")
    trained_target = load_trained_target(folder / "target", torch.float32, device)
    trained_draft = load_trained_draft(folder / "draft", torch.float32, device)
    shape = Shape(draft["topk"], draft["num_steps"], draft["num_draft_tokens"])
    capacity = Capacity(1, 128, 64, **draft)
    for prompt in prompts(8, 60):
        found, worker = eagle(model, "fa3", capacity, [prompt], 1)
        ids, root = torch.tensor([prompt + tokens(found)[0]]), torch.tensor([len(prompt)])
        with torch.no_grad():
            window = Window(trained_target, trained_draft, ids)
            accepted = int(window.verify(root, window.draft_tree(root, shape), shape.steps))
        seen: list[int] = []
        serve(worker, [prompt], 1 + capacity.max_accepted, seen.append)
        assert seen[:2] == [1, accepted + 1], "a round of prefill, then a cycle"
