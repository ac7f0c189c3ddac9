"""Mutants of captured prefill: what a piece keeps from before, and what becomes of padded tokens."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from attn_backends.runner import FieldClass, Runner, classify
from attn_backends_reference.models.attention import PiecewiseAttention
from attn_backends_reference.pieces import PiecewiseGraph
from tests.mutants.mutant import mutant


@mutant(
    "SGLang #23613: a replay rebuilt its output by hand and lost a field", "prefill.paths", "prefill.full", graph=True
)
def field_lost_by_a_replay(patch: pytest.MonkeyPatch) -> None:
    """Of a replay, hidden states are those of the capture; the token alone is handed on."""
    run, first = Runner.run, {}

    def lossy(self, step, inputs):
        result = run(self, step, inputs)
        if not hasattr(result.value, "features") or not result.ran_graph:
            return result
        kept = first.setdefault((self, result.bucket), result.value.features.new_zeros(1)).expand_as
        return replace(result, value=replace(result.value, features=kept(result.value.features)))

    patch.setattr(Runner, "run", lossy)


@mutant("an engine's own field never reaches the graph", "prefill.further_fields", graph=True)
def unknown_inputs_left_out(patch: pytest.MonkeyPatch) -> None:
    """A replay copies the inputs that the library itself knows, so a user's are those of the capture."""
    copy = Runner._copy

    def known(self, static, given):
        mine = {field.name: getattr(static, field.name) for field in fields(static) if "embeds" in field.name}
        copy(self, static, replace(given, **{name: value[:0] for name, value in mine.items()}))

    patch.setattr(Runner, "_copy", known)


@mutant("results of the bucket's size", "prefill.paths", "prefill.full", "prefill.further_fields", graph=True)
def tokens_not_trimmed(patch: pytest.MonkeyPatch) -> None:
    """Fields with an entry a token come back padded to the bucket."""
    own = Runner._own

    def padded(self, outputs, step):
        made = own(self, outputs, step)
        per_token = [n for n, kind in classify(type(outputs)).items() if kind is FieldClass.PER_TOKEN]
        return replace(made, **{name: getattr(outputs, name).clone() for name in per_token})

    patch.setattr(Runner, "_own", padded)


@mutant("a static input that only the first piece's replay refreshed", "prefill.paths", graph=True)
def positions_of_the_first_replay(patch: pytest.MonkeyPatch) -> None:
    """Positions stay those of a bucket's first replay."""
    copy, seen = Runner._copy, {}

    def once(self, static, given):
        positions = seen.setdefault(id(static), (static, given.positions.new_zeros(len(static.positions))))[1]
        positions[: len(given.positions)] += given.positions * (not positions.any())
        copy(self, static, replace(given, positions=positions[: len(given.positions)]))

    patch.setattr(Runner, "_copy", once)


@mutant(
    "a padded token counted as real: the last row of the bucket scores the prompt's end",
    "prefill.paths",
    "prefill.full",
    graph=True,
)
def last_row_of_the_bucket(patch: pytest.MonkeyPatch) -> None:
    """The last request's last row is that of the bucket."""
    copy = Runner._copy

    def counted(self, static, given):
        copy(self, static, given)
        if hasattr(static, "last"):
            static.last[len(given.last) - 1] = len(static.positions) - 1

    patch.setattr(Runner, "_copy", counted)


@mutant("padded rows are stored with the real ones", "prefill.paths", graph=True)
def padded_rows_are_stored(patch: pytest.MonkeyPatch) -> None:
    """What follows the real rows of a bucket goes to the cache with them, into the reserved page."""
    attend = PiecewiseAttention.attend

    def whole(self, layer_index, q, inputs, *further):
        out = attend(self, layer_index, q, inputs, *further)
        slots = q.new_zeros(len(q), dtype=torch.int64)
        self.graph.cut(
            lambda meta: self.caches[layer_index].store(inputs, torch.cat((meta.write_slots, slots))[: len(q)])
        )
        return out

    patch.setattr(PiecewiseAttention, "attend", whole)


@mutant("attention is left out between the last pieces", "prefill.paths", "prefill.exact", graph=True)
def last_call_skipped(patch: pytest.MonkeyPatch) -> None:
    """The last attention layer of a replay does not run: its output is zeros."""
    replay = PiecewiseGraph.replay

    def shorter(self, given):
        whole, self._between = self._between, [*self._between[:-1], lambda given: None]
        replay(self, given)
        self._between = whole

    patch.setattr(PiecewiseGraph, "replay", shorter)
