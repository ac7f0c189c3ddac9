"""Prefill of prompts that come with embeddings: the phases' inputs with fields for them, and what fills these.

A field that is classified is padded, replayed and trimmed like every other, so no runner can lose it. A worker has the
fields if it was built for placeholders (`WorkerOptions.placeholder_token`); one of text neither holds nor copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_backends.runner import PerRequest, PerToken
from attn_backends_reference.eagle.embeddings import EmbeddingForm, PromptEmbeddings
from attn_backends_reference.eagle.phases import by_name
from attn_backends_reference.eagle.prefill_phases import DraftPrefillInputs, ModulesPrefillInputs, PrefillInputs
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.models.decoder import MultimodalRows
from attn_backends_reference.pieces import PackedPhase
from spec_metadata.upload import to_device

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")
Span = tuple[PromptEmbeddings | None, int, int]
"""Positions [start, end) of a prompt and its embeddings, if it has any. They may reach beyond the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalPrefillInputs(PrefillInputs):
    """With the fields of `MultimodalRows` for each row's token."""

    multimodal_embeddings: PerToken
    is_multimodal: PerToken

    @property
    def multimodal(self) -> MultimodalRows:
        """Rows that replace the tokens' embeddings."""
        return MultimodalRows(self.multimodal_embeddings, self.is_multimodal)


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalDraftPrefillInputs(DraftPrefillInputs):
    """With the fields of `MultimodalRows` for the token after each row's position: embeddings shift as tokens do."""

    multimodal_embeddings: PerToken
    is_multimodal: PerToken

    @property
    def multimodal(self) -> MultimodalRows:
        """As of `MultimodalPrefillInputs`."""
        return MultimodalRows(self.multimodal_embeddings, self.is_multimodal)


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalModulesPrefillInputs(ModulesPrefillInputs):
    """With the fields of `MultimodalRows` for the token after each row's, and for those after that of the last row,
    which later modules take: embeddings_behind [bs, K - 1, H], is_behind [bs, K - 1] bool.
    """

    multimodal_embeddings: PerToken
    is_multimodal: PerToken
    embeddings_behind: PerRequest
    is_behind: PerRequest

    def multimodal(self, k: int) -> MultimodalRows:
        """As of `MultimodalPrefillInputs`: what stands k rows further in the same request."""
        if k == 0:
            return MultimodalRows(self.multimodal_embeddings, self.is_multimodal)
        row = self.first[self.request] + self.offset + k
        behind = row - self.last[self.request] - 1
        inside, outside = row.clamp_max(len(row) - 1), (self.request, behind.clamp_min(0))
        is_inside = behind < 0
        return MultimodalRows(
            torch.where(is_inside.unsqueeze(1), self.multimodal_embeddings[inside], self.embeddings_behind[outside]),
            torch.where(is_inside, self.is_multimodal[inside], self.is_behind[outside]),
        )


KINDS: dict[type, tuple[Any, int]] = {
    PrefillInputs: (MultimodalPrefillInputs, 0),
    DraftPrefillInputs: (MultimodalDraftPrefillInputs, 1),
    ModulesPrefillInputs: (MultimodalModulesPrefillInputs, 1),
}
"""Of the inputs of each phase, those with embeddings, and how far after its position a row's token stands."""


@dataclass(frozen=True, slots=True)
class MultimodalPrefill:
    """Gives phases of prefill the fields for embeddings. num_steps: of the modules of MTP."""

    form: EmbeddingForm
    num_steps: int

    def phase(self, phase: PackedPhase[Inputs, Outputs]) -> PackedPhase[Inputs, Outputs]:
        """A phase whose inputs have the fields."""
        return replace(phase, safe_inputs=lambda num_tokens: self.inputs(phase.safe_inputs(num_tokens), ()))

    def inputs(self, inputs: Any, chunks: Sequence[Chunk]) -> Any:
        """The inputs of a phase over chunks with the fields, or of padded rows, which have no chunks."""
        kind, shift = KINDS[type(inputs)]
        given = [(chunk.embeddings, chunk.start + shift, chunk.end + shift) for chunk in chunks]
        further = by_name(self._rows(len(inputs.positions), given))
        if kind is MultimodalModulesPrefillInputs:
            bs, width = len(inputs.root), self.num_steps - 1
            behind = [(embeddings, end, end + width) for embeddings, _, end in given]
            rows = self._rows(bs * width, behind)
            further["embeddings_behind"] = rows.multimodal_embeddings.unflatten(0, (bs, width))
            further["is_behind"] = rows.is_multimodal.unflatten(0, (bs, width))
        return kind(**by_name(inputs), **further)

    def _rows(self, num_rows: int, spans: Sequence[Span]) -> MultimodalRows:
        """The rows of spans, one after another; zeros where no embedding was given."""
        form, places, taken = self.form, list[int](), list[Tensor]()
        begin = 0
        for embeddings, start, end in spans:
            if embeddings is not None:
                positions, rows = embeddings.between(start, end)
                places += [begin + position - start for position in positions]
                taken.append(rows)
            begin += end - start
        made = torch.zeros(num_rows, form.hidden_size, dtype=form.dtype, device=form.device)
        mask = torch.zeros(num_rows, dtype=torch.bool, device=form.device)
        if places:
            index = to_device(places, torch.int64, form.device)
            made.index_copy_(0, index, torch.cat(taken))
            mask.index_fill_(0, index, True)
        return MultimodalRows(made, mask)
