"""Mutants of runner and worker."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from attn_backends.runner import PhaseRunner, StepResult
from attn_backends_reference.eagle import phases
from spec_metadata import Acceptance, Step, widths
from tests.mutants.mutant import mutant


@mutant("SGLang #22832: a pool fed from runner buffers although no graph ran", "runner.results", graph=True)
def result_read_from_graph_buffers(patch: pytest.MonkeyPatch) -> None:
    """The result of an eager step is taken from the buffers of the largest graph."""
    run = PhaseRunner.run

    def from_buffers(self: PhaseRunner, step: Step, inputs: Any) -> StepResult:
        result = run(self, step, inputs)
        if result.ran_graph or not self._captured:
            return result
        return StepResult(self._own(self._captured[max(self._captured)].outputs, step), None)

    patch.setattr(PhaseRunner, "run", from_buffers)


@mutant("SGLang #15399 and #15143: graph outputs handed out without a copy", "runner.results", graph=True)
def results_not_owned(patch: pytest.MonkeyPatch) -> None:
    """A result is a view of the graph's output, which the next replay overwrites."""
    from attn_backends import runner

    patch.setattr(PhaseRunner, "_own", lambda self, outputs, step: runner._trim(outputs, step.bs, step.num_tokens))


@mutant("rejected draft KV stays where the accepted belongs", "worker.lossless")
def accepted_path_not_moved(patch: pytest.MonkeyPatch) -> None:
    """After a tree verify the first nodes stay after the committed tokens, accepted or not."""

    def stay(acceptance: Acceptance, step: Step) -> tuple[Tensor, Tensor]:
        bs, depth = acceptance.path.shape
        kept = step.flat_slots().long().reshape(bs, -1)[:, :depth].reshape(-1)
        return kept, kept

    patch.setattr(phases, "compaction_moves", stay)


@mutant("a random change of one token", "worker.widths")
def any_threshold_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Chains are cut by a threshold that is no probability."""
    patch.setattr(widths, "check_threshold", lambda threshold: None)
