"""The block-draft worker on the shipped models: requests get plain decoding's tokens, and drafts are what a whole
recompute of their context gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from attn_backends import UnsupportedStepError
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.eagle.block import BlockWorker
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.models.block import EMBEDDED_BLOCKS, load_block
from spec_metadata import Capacity, StepKind
from tests import serving_laws
from tests.serving_scenes import NEWLINE, arrivals, check_nothing_kept, endless, engine_parts, plain, prompts, tokens
from training.block import logits_of, read_block
from training.models import CHECKPOINTS


class TokenByToken(FA3Backend):
    """A backend without draft blocks."""

    kernels = tuple(
        replace(
            kernel, capabilities={k: able for k, able in kernel.capabilities.items() if k is not StepKind.DRAFT_BLOCK}
        )
        for kernel in FA3Backend.kernels
    )


SHAPE = {"topk": 1, "num_steps": 3, "num_draft_tokens": 4}
GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}


def block_worker(backend: str, capacity: Capacity, *, checking: bool = True, **options: Any) -> BlockWorker:
    """A worker on the shipped gqa target and its block draft."""
    target, _, backends, geometry = engine_parts("gqa", backend, capacity, checking=checking)
    return BlockWorker(target, load_block("gqa-block", target), backends, capacity, geometry, WorkerOptions(**options))


@pytest.mark.parametrize(
    ("backend", "page_size", "path", "lag"),
    [
        ("fa3", 16, GRAPH, 1),
        pytest.param("reference", 1, {}, 0, marks=pytest.mark.full),
        pytest.param("fa3", 4, GRAPH | {"planning": "in_graph"}, 0, marks=pytest.mark.full),
        pytest.param(
            "fa3", 16, GRAPH | {"prefill_buckets": (64,), "prefill_graphs": "full"}, 1, marks=pytest.mark.full
        ),
        pytest.param("fa3", 16, GRAPH | {"prefill_buckets": (64,)}, 1, marks=pytest.mark.full),
    ],
)
def test_requests_join_and_leave_at_random(backend: str, page_size: int, path: dict[str, Any], lag: int) -> None:
    """Greedy and sampled, token for token what plain decoding gives."""
    capacity = Capacity(6, 112, page_size, **SHAPE)
    options = {"checking": path.get("planning") != "in_graph", "eos_tokens": (NEWLINE,), "host_lag": lag}
    worker = block_worker(backend, capacity, chunk=24, seed=2, **options, **path)
    scene = arrivals(20, 25, 80, 20, seed=3)
    figures = serving_laws.check_scene(worker, scene, endless("gqa", scene, 20))
    assert figures["largest_batch"] > 4, "more than the largest bucket"
    assert figures["tokens_per_cycle"] > 1.3, "drafts are accepted"
    assert {"eos", "stop", "length", "cancelled"} <= figures.keys()
    assert bool(worker.num_graph_steps) == bool(path)


@torch.no_grad()
@pytest.mark.parametrize("path", [{}, GRAPH], ids=["eager", "graph"])
def test_what_is_drafted_is_what_the_whole_context_gives(path: dict[str, Any]) -> None:
    """Computed densely, from hidden states of the whole text: a context token too few or too many would show."""
    worker = block_worker("fa3", Capacity(4, 112, 16, **SHAPE), chunk=24, **path)
    drafted, prompt = [], prompts(2, 70)[1]
    run = worker._run

    def seen(runner: Any, step: Any, inputs: Any) -> Any:
        lens = step.seq_lens.tolist()
        value = run(runner, step, inputs)
        if runner.phase.name == "draft":
            drafted.append((lens[0], value.tokens[0].tolist()))
        return value

    worker._run = seen  # type: ignore[method-assign]
    (completion,) = serve(worker, [prompt], 30)
    check_nothing_kept(worker)
    text = torch.tensor([[*prompt, *completion.tokens]])
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gqa" / "target", dtype=torch.float32)
    hidden = model.model(text).last_hidden_state
    places = torch.tensor([length for length, _ in drafted])
    logits = logits_of(read_block(CHECKPOINTS / EMBEDDED_BLOCKS["gqa-block"]), model, hidden, text[:, places], places)
    expected = torch.cat((text[0, places].unsqueeze(1), logits[0].argmax(-1)), dim=1)
    assert [chain for _, chain in drafted] == expected.tolist()
    assert len(drafted) < 29


def test_plain_decoding_and_blocks_agree_with_few_cycles() -> None:
    given = prompts(4, 60)
    expected, _ = plain("gqa", "fa3", Capacity(4, 96, 16), given, 24)
    worker = block_worker("fa3", Capacity(4, 96, 16, **SHAPE))
    found = serve(worker, given, 24)
    assert tokens(found) == tokens(expected)
    assert sum(each.num_cycles for each in found) < 0.8 * sum(len(each.tokens) for each in found)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"topk": 1, "num_steps": 2, "num_draft_tokens": 3}, "block has 4 rows, 3 of which propose a token"),
        ({"topk": 2, "num_steps": 3, "num_draft_tokens": 4}, "block has 4 rows"),
        (SHAPE | {"block_size": 5}, "a block runs once, whole"),
        (SHAPE | {"max_context": 4096}, "the draft has 2048"),
    ],
)
def test_another_shape_of_drafting_is_refused(shape: dict[str, int], reason: str) -> None:
    sizes = {"max_bs": 2, "max_context": 96, "page_size": 16} | shape
    with pytest.raises(UnsupportedStepError, match=reason):
        block_worker("fa3", Capacity(**sizes))


@pytest.mark.parametrize("cut", [{"verify_threshold": 0.5}, {"verify_rows": 4}])
def test_a_verify_that_is_cut_by_confidence_is_refused(cut: dict[str, float]) -> None:
    with pytest.raises(UnsupportedStepError, match="verifying by confidence"):
        block_worker("fa3", Capacity(2, 96, 16, **SHAPE), **cut)


def test_a_backend_without_draft_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match=r"no kernel of it takes a draft_block step.*Instead: EagleWorker"):
        block_worker("tests.test_block_worker:TokenByToken", Capacity(2, 96, 16, **SHAPE))
