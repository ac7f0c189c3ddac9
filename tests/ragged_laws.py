"""What a worker that verifies by confidence promises of its draft extends; for the tests and for the mutants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from attn_backends.graphs import RecordedGraph
from attn_backends.runner import PhaseRunner, Runner
from attn_backends_reference.eagle.phases import Model, extend_phase
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker
from spec_metadata import BoundedQuery, Capacity, Step, UniformQuery
from tests.serving_scenes import CHAIN, eagle_worker, prompts, tokens

GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}


class Uniformly:
    """A worker's `_run` that extends the draft by all rows of the longest path, too, and compares what it drafts.

    num_rows: of all extends, those that were accepted and those of the longest paths. The uniform extend runs first, so
    that the worker goes on with what the ragged one wrote.
    """

    def __init__(self, worker: EagleWorker) -> None:
        self.run, self.num_rows, backend = worker._run, Counter[str](), worker.backends.draft_extend
        draft = Model(worker.draft, worker.draft_caches, backend)
        self.uniform = PhaseRunner(extend_phase(draft, worker.capacity), backend, worker._paging())

    def __call__(self, runner: Runner, step: Step, inputs: Any) -> Any:
        if runner.phase.name != "draft_extend":
            return self.run(runner, step, inputs)
        assert isinstance(step.query, BoundedQuery)
        assert torch.equal(step.query.widths, inputs.num_accepted)
        expected = self.uniform.run(replace(step, query=UniformQuery(step.width)), inputs).value
        found = self.run(runner, step, inputs)
        assert torch.equal(found.tokens, expected.tokens), "other drafts"
        assert torch.equal(found.root, expected.root), "other roots"
        torch.testing.assert_close(found.hidden, expected.hidden)
        self.num_rows += Counter(accepted=int(inputs.num_accepted.sum()), all=step.bs * step.width)
        return found


def check_drafts(model: str = "gqa", backend: str = "fa3", path: Mapping[str, Any] = GRAPH) -> None:
    """A draft extend over accepted tokens drafts what one over all rows of the longest path does, in float32."""
    worker = eagle_worker(model, backend, Capacity(4, 112, 8, **CHAIN), verify_threshold=0.3, **path)
    compared = Uniformly(worker)
    worker._run = compared
    served = tokens(serve(worker, prompts(4, 60), 14))
    assert [len(each) for each in served] == [14] * 4
    assert 0 < compared.num_rows["accepted"] < compared.num_rows["all"]
    assert bool(worker.num_graph_steps.get("draft_extend")) == bool(path)
