"""Embeddings that MTP's windows take again: those of the last positions of prompts.

A window runs the last `num_rerun` positions before the committed length again (`docs/mtp.md`), and after a prompt
these are the prompt's own, whose tokens may be placeholders. A drafted or accepted token never is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends.runner import PerRequest, Phase
from attn_backends_reference.eagle.embeddings import EmbeddingForm
from attn_backends_reference.eagle.mtp_phases import Window, WindowInputs
from attn_backends_reference.eagle.phases import by_name
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.models.decoder import MultimodalRows
from spec_metadata import Capacity
from spec_metadata.upload import to_device

Inputs = TypeVar("Inputs")


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalWindow(Window):
    """With the embeddings of the first R tokens. kept_embeddings: [bs, R, H]. is_kept: [bs, R] bool, where they are."""

    kept_embeddings: PerRequest
    is_kept: PerRequest

    def multimodal(self, k: int) -> MultimodalRows:
        """See `Window`: row j of module k takes token j + k."""
        num_missing = self.hidden.shape[1] - self.is_kept.shape[1] + k
        rows = pad(self.kept_embeddings[:, k:], (0, 0, 0, num_missing))
        return MultimodalRows(rows.flatten(0, 1), pad(self.is_kept[:, k:], (0, num_missing)).flatten())


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalWindowInputs(WindowInputs):
    """`WindowInputs` with the fields of `MultimodalWindow`."""

    kept_embeddings: PerRequest
    is_kept: PerRequest

    def window(self, num_steps: int) -> MultimodalWindow:
        """See `WindowInputs`."""
        window = WindowInputs.window(self, num_steps)
        return MultimodalWindow(**by_name(window), kept_embeddings=self.kept_embeddings, is_kept=self.is_kept)


KINDS: dict[type, Any] = {WindowInputs: MultimodalWindowInputs, Window: MultimodalWindow}


class KeptEmbeddings:
    """Tables with an entry for each row of the request table: embeddings [max_bs + 1, R, H], and positions [max_bs + 1,
    R] int64, the tokens that they belong to. Position p lies at p % R; an entry counts for its own position alone.
    """

    def __init__(self, form: EmbeddingForm, capacity: Capacity) -> None:
        self.num_rerun, size = capacity.num_rerun, (capacity.max_bs + 1, capacity.num_rerun)
        self.embeddings = torch.zeros(*size, form.hidden_size, dtype=form.dtype, device=form.device)
        self.positions = torch.full(size, -1, dtype=torch.int64, device=form.device)

    def phase(self, phase: Phase[Inputs, Window]) -> Phase[Inputs, Window]:
        """A phase over windows whose inputs and results have the fields."""

        def safe_inputs(bs: int) -> Any:
            nothing = self.embeddings.new_zeros(bs, *self.embeddings.shape[1:])
            return _joined(phase.safe_inputs(bs), nothing, nothing.new_zeros(nothing.shape[:2], dtype=torch.bool))

        return replace(phase, safe_inputs=safe_inputs, output=MultimodalWindow)

    def forget(self, row: int) -> None:
        """A request begins in a row."""
        self.positions[row] = -1

    def keep(self, chunks: Sequence[Chunk]) -> None:
        """Take what chunks hold of the last R positions of their prompts."""
        rows, places, taken = list[int](), list[int](), list[Tensor]()
        for chunk in chunks:
            start = max(chunk.start, len(chunk.prompt) - self.num_rerun)
            if chunk.embeddings is not None and start < chunk.end:
                positions, embeddings = chunk.embeddings.between(start, chunk.end)
                rows += [chunk.row] * len(positions)
                places += positions
                taken.append(embeddings)
        if places:
            row, position = (to_device(values, torch.int64, self.positions.device) for values in (rows, places))
            self.embeddings[row, position % self.num_rerun] = torch.cat(taken)
            self.positions[row, position % self.num_rerun] = position

    def inputs(self, inputs: WindowInputs, rows: Tensor) -> WindowInputs:
        """The inputs of a window with the fields. rows: [bs] int64."""
        starts = (inputs.lens.long() - self.num_rerun).clamp_min(0).unsqueeze(1)
        positions = starts + 1 + torch.arange(self.num_rerun, device=rows.device)
        place = rows.unsqueeze(1), positions % self.num_rerun
        return _joined(inputs, self.embeddings[place], self.positions[place] == positions)


def _joined(inputs: Any, embeddings: Tensor, mask: Tensor) -> Any:
    return KINDS[type(inputs)](**by_name(inputs), kept_embeddings=embeddings, is_kept=mask)
