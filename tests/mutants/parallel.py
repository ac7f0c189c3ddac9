"""Mutants of P-EAGLE: where mask rows stand, what they take, which rows propose, and what the next cycle reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends_reference.eagle import parallel
from attn_backends_reference.eagle.parallel import ParallelWorker
from attn_backends_reference.models.peagle import PEagleModel
from spec_metadata import Step
from tests.mutants.mutant import mutant

MASKED, PROPOSE, RUN = PEagleModel.forward_masked, PEagleModel.propose, ParallelWorker._run


@mutant("our own: masks counted from the position after the root, as DFlash's are", "parallel.drafts")
def mask_rows_stand_one_position_further(patch: pytest.MonkeyPatch) -> None:
    """A mask row is rotated at the position after its own."""

    def further(self, tokens, features, is_mask, positions, attention):
        return MASKED(self, tokens, features, is_mask, positions + is_mask.long(), attention)

    patch.setattr(PEagleModel, "forward_masked", further)


@mutant("our own: the draft's cache advanced by all rows that it stored", "parallel.drafts")
def mask_rows_kept_as_committed(patch: pytest.MonkeyPatch) -> None:
    """The next draft extend begins after the mask rows of the last one, whose keys its rows then see."""

    class After(Step):
        @classmethod
        def draft_extend(cls, query, seq_lens, paging, out_cache_loc=None, **host):
            return Step.draft_extend(query, seq_lens + 2, paging)

    patch.setattr(parallel, "Step", After)


@mutant("vLLM #32887: mask_hidden is loaded and then has to reach the mask rows", "parallel.drafts")
def mask_rows_take_the_target_s_states(patch: pytest.MonkeyPatch) -> None:
    """A mask row takes what stands in its place, of a rejected token or none, instead of `mask_hidden`."""

    def without(self, tokens, features, is_mask, positions, attention):
        given = tokens.masked_fill(is_mask, self.mask_token)
        return MASKED(self, given, features, torch.zeros_like(is_mask), positions, attention)

    patch.setattr(PEagleModel, "forward_masked", without)


@mutant("our own: the root's embedding, which EAGLE-3 feeds a drafted row", "parallel.drafts")
def mask_rows_take_a_token(patch: pytest.MonkeyPatch) -> None:
    """A mask row takes the embedding of token 0 instead of the mask's."""

    def zeros(self, tokens, features, is_mask, positions, attention):
        patch.setattr(self, "mask_token", 0)
        return MASKED(self, tokens, features, is_mask, positions, attention)

    patch.setattr(PEagleModel, "forward_masked", zeros)


@mutant("vLLM #57432: a padded width for the active one", "parallel.drafts")
def rejected_rows_taken_for_accepted(patch: pytest.MonkeyPatch) -> None:
    """A draft extend counts the longest path as accepted: masks stand after rejected rows."""

    def longest(self: Any, runner: Any, step: Any, inputs: Any) -> Any:
        if runner.phase.name == "draft_extend":
            inputs = replace(inputs, num_accepted=torch.full_like(inputs.num_accepted, inputs.tokens.shape[1]))
        return RUN(self, runner, step, inputs)

    patch.setattr(ParallelWorker, "_run", longest)


@mutant("our own: the rule of DFlash's blocks, whose root proposes nothing", "parallel.drafts")
def accepted_row_proposes_nothing(patch: pytest.MonkeyPatch) -> None:
    """The first drafted token is the first mask's, not that of the last accepted row."""
    patch.setattr(PEagleModel, "propose", lambda self, hidden: PROPOSE(self, hidden).roll(-1, dims=1))


@mutant("our own: the state of a chunk that ended before its prompt", "parallel.drafts")
def chunk_without_its_states(patch: pytest.MonkeyPatch) -> None:
    """All rows of a prompt's chunk but the last take one state of the target: the one of the chunk's end."""

    def last(self: Any, runner: Any, step: Any, inputs: Any) -> Any:
        if runner.phase.name == "draft_prefill":
            inputs = replace(inputs, features=inputs.features[-1:].expand_as(inputs.features).contiguous())
        return RUN(self, runner, step, inputs)

    patch.setattr(ParallelWorker, "_run", last)
