"""Mutants of multimodal prompts: embeddings that get lost, shift wrongly, or are taken for another's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_backends.runner import Runner
from attn_backends_reference.eagle import multimodal
from attn_backends_reference.eagle.kept_embeddings import KeptEmbeddings
from attn_backends_reference.eagle.multimodal import (
    MultimodalDraftPrefillInputs,
    MultimodalModulesPrefillInputs,
    MultimodalPrefill,
)
from attn_backends_reference.eagle.prefill_phases import DRAFT_PREFILL
from attn_backends_reference.eagle.slots import SlotAllocator
from tests.mutants.mutant import mutant

SGLANG = "SGLang: a piecewise prefill lost `mm_input_embeds`, and EAGLE-3 drafted from placeholder ids"


@mutant(SGLANG, "multimodal.graphs", graph=True)
def embeddings_dropped_by_a_replay(patch: pytest.MonkeyPatch) -> None:
    """A replay of the draft's prefill has the placeholders' own embeddings."""
    copy = Runner._copy

    def lossy(self, static, given):
        if self.phase.name == DRAFT_PREFILL and hasattr(given, "is_multimodal"):
            given = replace(given, is_multimodal=given.is_multimodal & False)
        copy(self, static, given)

    patch.setattr(Runner, "_copy", lossy)


@mutant("ids are shifted for the draft, embeddings are not", "multimodal.graphs", "multimodal.modules", graph=True)
def embeddings_not_shifted(patch: pytest.MonkeyPatch) -> None:
    """A draft's row takes the embedding at its own position, as the target's does."""
    for kind, (with_fields, _) in list(multimodal.KINDS.items()):
        patch.setitem(multimodal.KINDS, kind, (with_fields, 0))


@mutant("a mask that is only ever added to", "multimodal.graphs", graph=True)
def mask_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Rows that took an embedding in an earlier replay take one in every later one."""
    copy = Runner._copy

    def added(self, static, given):
        before = static.is_multimodal.clone() if hasattr(static, "is_multimodal") else None
        copy(self, static, given)
        if before is not None:
            static.is_multimodal.logical_or_(before)

    patch.setattr(Runner, "_copy", added)


@mutant("the shift stops at the chunk's end", "multimodal.graphs", graph=True)
def edge_of_a_chunk_lost(patch: pytest.MonkeyPatch) -> None:
    """The last row of a chunk takes the id of the next chunk's first token, but not its embedding."""
    inputs = MultimodalPrefill.inputs

    def cut(self, given, chunks):
        made = inputs(self, given, chunks)
        if chunks and isinstance(made, MultimodalDraftPrefillInputs):
            made.is_multimodal[made.last] = False
        return made

    patch.setattr(MultimodalPrefill, "inputs", cut)


@mutant("the shift of later modules stops at the chunk's end", "multimodal.modules")
def edge_of_a_chunk_lost_to_modules(patch: pytest.MonkeyPatch) -> None:
    """The last rows of a chunk take no embeddings of the next chunk, beyond that of its first token."""
    inputs = MultimodalPrefill.inputs

    def cut(self, given, chunks):
        made = inputs(self, given, chunks)
        if isinstance(made, MultimodalModulesPrefillInputs):
            made.is_behind.zero_()
        return made

    patch.setattr(MultimodalPrefill, "inputs", cut)


@mutant("one embedding a row for all modules", "multimodal.modules")
def modules_take_the_embedding_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """Module k takes the embedding at p + 1 with the token at p + k + 1."""
    taken = MultimodalModulesPrefillInputs.multimodal
    patch.setattr(MultimodalModulesPrefillInputs, "multimodal", lambda self, k: taken(self, 0))


@mutant("a window after a prompt runs its placeholders as tokens", "multimodal.modules")
def embeddings_not_kept_for_windows(patch: pytest.MonkeyPatch) -> None:
    """The last positions of a prompt run again without their embeddings."""
    patch.setattr(KeptEmbeddings, "keep", lambda self, chunks: None)


@mutant("what is kept of a row outlives its request", "multimodal.modules")
def embeddings_kept_of_the_request_before(patch: pytest.MonkeyPatch) -> None:
    """A short prompt's first window takes embeddings that an earlier prompt had at the same positions."""
    patch.setattr(KeptEmbeddings, "forget", lambda self, row: None)


@mutant("prefix caches keyed by placeholder ids: one image answers for another", "multimodal.sharing")
def pages_keyed_by_placeholders(patch: pytest.MonkeyPatch) -> None:
    """A page is shared whatever embeddings its placeholders stand for."""
    keys = SlotAllocator.prefix_keys
    patch.setattr(SlotAllocator, "prefix_keys", lambda self, prompt, digests: keys(self, prompt))
