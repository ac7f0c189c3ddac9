"""Mutants of EAGLE-3: which states of the target a draft takes and where they get lost, what a drafted row takes, and
whose vocabulary a token is of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends.runner import PhaseRunner
from attn_backends_reference.eagle import phases
from attn_backends_reference.models.decoder import TargetModel
from attn_backends_reference.models.eagle3 import Eagle3Model
from attn_backends_reference.pieces import PiecewiseRunner
from tests.mutants.mutant import mutant


def change_features(patch: pytest.MonkeyPatch, change: Callable[[TargetModel, Tensor, Tensor], Tensor]) -> None:
    """Give drafts something else: (target, hidden, features) -> features."""
    forward = TargetModel.forward_features

    def changed(self, *given):
        hidden, features = forward(self, *given)
        return hidden, change(self, hidden, features) if self.feature_layers else features

    patch.setattr(TargetModel, "forward_features", changed)


@mutant("vLLM and SGLang map a draft's ids by d2t; a head that is served without it", "eagle3.chain")
def draft_ids_taken_for_the_target_s(patch: pytest.MonkeyPatch) -> None:
    """A draft's ids are verified, and embedded, as they are."""
    patch.setattr(Eagle3Model, "target_ids", lambda self, ids: ids)


@mutant("d2t holds offsets; SGLang adds the draft's id", "eagle3.chain")
def offsets_taken_for_ids(patch: pytest.MonkeyPatch) -> None:
    """d2t is read as if it held the target's ids."""
    patch.setattr(Eagle3Model, "target_ids", lambda self, ids: self._draft.d2t[ids])


@mutant("EAGLE-1's habit: the state after the final norm", "eagle3.chain")
def last_state_for_all_three(patch: pytest.MonkeyPatch) -> None:
    """All three states are the target's last one."""
    change_features(patch, lambda target, hidden, features: hidden.repeat(1, 3))


@mutant("SGLang's layers are counted after, vLLM's before: one off in either", "eagle3.chain")
def states_one_layer_early(patch: pytest.MonkeyPatch) -> None:
    """The states are taken before the layers, not after them."""
    tapped = TargetModel.tapped
    patch.setattr(TargetModel, "tapped", lambda self, layers: tapped(self, [max(layer - 1, 0) for layer in layers]))


@mutant("states stacked in the order in which they were asked for last", "eagle3.chain")
def states_from_high_to_low(patch: pytest.MonkeyPatch) -> None:
    """The three states stand side by side from high to low."""
    change_features(patch, lambda target, hidden, features: features.unflatten(1, (3, -1)).flip(1).flatten(1))


@mutant("EAGLE-1 feeds back what its head reads, EAGLE-3 the state before the norm", "eagle3.chain")
def drafted_rows_take_normed_states(patch: pytest.MonkeyPatch) -> None:
    """A drafted row takes its parent's state after the final norm."""
    forward = Eagle3Model.forward
    patch.setattr(Eagle3Model, "forward", lambda self, *given: self._draft.norm(forward(self, *given)))
    patch.setattr(Eagle3Model, "logits", lambda self, hidden: self.head(hidden))


@mutant("a tree's rows and those of its accepted path have the same shape", "eagle3.tree")
def states_of_the_first_nodes(patch: pytest.MonkeyPatch) -> None:
    """A draft extend takes the states of a tree's first nodes, not those of the accepted path."""
    accept, moves, real = phases.accept, phases.compaction_moves, []

    def first(tree, target_tokens, max_accepted):
        made = accept(tree, target_tokens, max_accepted)
        real.append(made)
        return replace(made, path=torch.arange(max_accepted, device=made.path.device).expand_as(made.path))

    patch.setattr(phases, "accept", first)
    patch.setattr(phases, "compaction_moves", lambda _, step: moves(real.pop(), step))


@mutant("a softmax over the wrong dimension", "eagle3.tree")
def scores_normalised_together(patch: pytest.MonkeyPatch) -> None:
    """Paths of a tree are ranked by scores that are normalised over all rows of a step, not each row's vocabulary."""

    def together(draft, hidden, topk):
        scores = draft.logits(hidden).float()
        log_probs, ids = (scores - scores.flatten().logsumexp(0)).topk(topk, dim=-1)
        return log_probs, draft.target_ids(ids)

    patch.setattr(phases, "best_drafts", together)


@mutant("SGLang #23613: a replay's output was made by hand and lost a field", "eagle3.graphs", graph=True)
def states_lost_by_replay(patch: pytest.MonkeyPatch) -> None:
    """What a graph's verify returns has zeros in place of the target's states."""
    own = PhaseRunner._own

    def without(self, outputs, step):
        made, lost = own(self, outputs, step), any(outputs is kept.outputs for kept in self._captured.values())
        if lost and self.phase.name == "verify":
            made.hidden.zero_()
        return made

    patch.setattr(PhaseRunner, "_own", without)


@mutant(
    "SGLang #23613: under piecewise graphs a prefill lost a field, and EAGLE-3 drafted on", "eagle3.graphs", graph=True
)
def states_lost_by_captured_prefill(patch: pytest.MonkeyPatch) -> None:
    """What a piecewise prefill returns has zeros in place of the target's states."""
    own = PiecewiseRunner._own

    def without(self, outputs, step):
        made, lost = own(self, outputs, step), any(outputs is kept.outputs for kept in self._captured.values())
        if lost and self.phase.name == "prefill":
            made.features.zero_()
        return made

    patch.setattr(PiecewiseRunner, "_own", without)


@mutant("a result is cut from padded to real size at the wrong end", "eagle3.graphs", graph=True)
def states_trimmed_at_the_wrong_end(patch: pytest.MonkeyPatch) -> None:
    """Of a padded batch's states the last rows are kept, which are the padding's."""
    own = PhaseRunner._own

    def last(self, outputs, step):
        made = own(self, outputs, step)
        if self.phase.name == "verify":
            made.hidden.copy_(outputs.hidden[len(outputs.hidden) - step.bs :])
        return made

    patch.setattr(PhaseRunner, "_own", last)
