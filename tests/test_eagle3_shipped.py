"""The shipped EAGLE-3 draft: its drafts are a full recompute's, chain and tree, on every path; texts are those of plain
decoding; and it accepts at least what the EAGLE draft of the same model does.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product

import pytest
import torch

from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.report import run_row
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.models.eagle3 import Eagle3Model
from spec_metadata import Capacity
from tests.eagle3_laws import accepted_lengths, check_drafts
from tests.eagle3_scenes import watch
from tests.eagle3_shipped import DRAFT, shipped_worker, trained
from tests.serving_scenes import CHAIN, EAGER, GRAPH, TREE, check_nothing_kept, plain, prompts, tokens
from training import eagle3, models
from training.corpus import load_heldout
from training.cycles import Eagle3Window, Shape, Window, walk
from training.evaluate import summary

CPU = torch.device("cpu")
PLACES = [
    ("fa3", 16, CHAIN, EAGER),
    ("fa3", 1, CHAIN, GRAPH),
    ("fa3", 4, TREE, EAGER),
    ("reference", 16, TREE, GRAPH),
]


@cache
def plainly() -> list[list[int]]:
    """What plain decoding makes of four prompts."""
    return tokens(plain("gqa", "reference", Capacity(4, 96, 16), prompts(4, 60), 16)[0])


@pytest.mark.parametrize(("backend", "page_size", "shape", "path"), PLACES)
def test_drafts_are_those_of_a_full_recompute(backend, page_size, shape, path):
    worker = shipped_worker(backend, Capacity(3, 96, page_size, **shape), chunk=20, **path)
    with watch(worker) as seen:
        assert tokens(serve(worker, prompts(4, 60), 16)) == plainly()
    check_nothing_kept(worker)
    for request in seen:
        check_drafts(trained(), request, tuple(shape.values()))
    assert {1, 4} <= accepted_lengths(seen).keys(), "cycles in which none is accepted, and in which all are"
    assert bool(worker.num_graph_steps) == bool(path)


@pytest.mark.parametrize(("preset", "path"), [*product(["eagle3", "eagle3-tree"], ["eager", "graph"])])
def test_a_preset_runs_it(preset, path):
    runtime = {"path": path, "max_bs": 2, "buckets": (2,), "max_context": 64, "max_new_tokens": 12}
    engine = build_engine(load_run_config(preset, runtime=runtime))
    row = run_row(engine, ["import os\nimport ", "class Stack:\n    def push(self, "])
    assert isinstance(engine.drafts[0], Eagle3Model)
    assert (row.identical, row.model, row.path) == (True, "gqa", path)
    assert row.draft == {"eagle3": "eagle3 chain", "eagle3-tree": "eagle3 tree"}[preset]
    assert row.tokens_per_cycle > 2


@torch.no_grad()
@pytest.mark.parametrize(
    "shape", [Shape(1, 3, 4), pytest.param(Shape(4, 3, 16), marks=pytest.mark.full)], ids=["chain", "tree"]
)
def test_a_cycle_gives_at_least_what_the_eagle_draft_does(shape):
    """Along 128 bytes of each held-out file."""
    folder = models.CHECKPOINTS / "gqa"
    target = models.load_target(folder / "target", torch.float32, CPU)
    drafts = (
        (Window, models.load_draft(folder / "draft", torch.float32, CPU)),
        (Eagle3Window, eagle3.load_eagle3(folder / "eagle3", torch.float32, CPU)),
    )
    ids = torch.tensor([list(file[4000:4256]) for file in load_heldout().values()])
    first, end = (torch.full((len(ids),), place) for place in (128, 256))
    eagle, third = (
        summary(walk(start(target, draft, ids), first, end, shape))["tokens_per_cycle"] for start, draft in drafts
    )
    assert third >= eagle


def test_it_is_small_and_has_a_vocabulary_of_its_own():
    config, tensors = json.loads((DRAFT / "config.json").read_text()), trained().tensors
    assert (DRAFT / "model.safetensors").stat().st_size < 2**21
    assert len(tensors["d2t"]) == len(tensors["lm_head.weight"]) == config["draft_vocab_size"] < config["vocab_size"]
