"""Checks of an indexer's selection where scores are equal, in batches of a few rows and of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_memory, compare_outputs
from attn_backends.conformance.compressed_scenes import CLEAR, CompressedForwardInputs, CompressedScene
from attn_backends.conformance.compressed_worlds import CompressedWorld, is_compressed
from attn_backends.conformance.exercise import Captured, batch_of, run_eagerly, setup_of, world_of
from attn_backends.conformance.situations import eager, graph, one_page_size
from spec_metadata import StepKind

FEW = range(4, 9)  # entries of a row that are easily drawn so that one or two of them score, and the others do not
LENS = (10, 3, 7)  # of verifies: rows of a few entries, of two and of none
PROMPTS = (270, 4)  # rows of two requests, more than the 256 that a kernel may take at a time


class TiedScene(CompressedScene):
    """A batch in which scores are equal: in rows of a few entries all but one or two, in every other one of the rest
    all.
    """

    def _inputs(self, forward: int, bs: int, num_rows: int) -> CompressedForwardInputs:
        given, rng = super()._inputs(forward, bs, num_rows), torch.Generator().manual_seed(forward)
        assert given.index is not None
        for number, row in enumerate(self.rows[forward]):
            q, weights = given.index.q[number], given.index.weights[number]
            scores = self.scores(row, q.cpu(), weights.cpu())
            if len(scores) in FEW:
                weights.copy_(torch.arange(len(weights)) == 0)
                while not _cut_is_tied(self.scores(row, q.cpu(), weights.cpu())):
                    q.copy_(torch.randn(q.shape, generator=rng))
            elif number % 2:
                weights.zero_()
        return given


def _cut_is_tied(scores: Sequence[float]) -> bool:
    """Whether one or two scores are clearly above zero, and all others zero."""
    above = [score for score in scores if score > 0]
    return len(above) in (1, 2) and min(above) > CLEAR


def _tied(subject: Subject) -> list[Case]:
    """Verifies of few rows, eagerly and through graphs, and prompts of many, in layers with selected entries."""
    if not is_compressed(subject.backend):
        return []
    verify = (StepKind.TARGET_VERIFY,)
    found = eager(verify, lens=LENS)(subject) + graph(kinds=verify, captured_lens=(5, 1), lens=LENS)(subject)
    size = f"tokens{sum(PROMPTS)}"
    found += [replace(case, size=size) for case in eager((StepKind.PREFILL,), lens=(0, 9), widths=PROMPTS)(subject)]
    return [case for case in one_page_size(lambda _: found)(subject) if case.layer == "selected"]


@check("compressed.equal_scores", _tied)
def equal_scores(subject: Subject, case: Case) -> Measured:
    """The lower of two entries with equal scores is selected, in steps of more than 256 rows too."""
    world = world_of(setup_of(subject, case))
    assert isinstance(world, CompressedWorld)
    captured = Captured(world, case) if case.path == "graph" else None
    scene = TiedScene(world, batch_of(case), case.seed)
    ran = run_eagerly(scene, case) if captured is None else captured.run(scene, case)
    compare_memory(scene, ran.before, padded=captured is not None)
    return compare_outputs(scene, ran.inputs, ran.outputs)
