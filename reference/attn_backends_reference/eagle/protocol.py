"""The interface between serving and its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from attn_backends_reference.eagle.embeddings import EmbeddingForm, PromptEmbeddings
from attn_backends_reference.eagle.launches import Launch
from attn_backends_reference.eagle.requests import DraftShape
from attn_backends_reference.eagle.slots import SlotAllocator
from spec_metadata import Sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens [start, end) of the request in a table row, for one prefill forward. embeddings: of the whole
    prompt's placeholders, None if it has none.
    """

    row: int
    prompt: Sequence[int]
    start: int
    end: int
    embeddings: PromptEmbeddings | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """The chunk's tokens."""
        return self.prompt[self.start : self.end]

    @property
    def following(self) -> list[int]:
        """The token after each of the chunk's; 0 for the one that the prompt does not hold."""
        return [*self.prompt[self.start + 1 : self.end + 1], *([0] if self.ends_prompt else [])]

    @property
    def ends_prompt(self) -> bool:
        """Whether the prompt is through."""
        return self.end == len(self.prompt)


class Worker(Protocol):
    """A worker, as serving calls it. A step is launched and read later; rows are those of the table.

    max_context: tokens of a request, prompt and output. draft_room: tokens past the committed ones that a step may
    write. max_accepted: tokens that a cycle commits at most. chunk: prompt tokens of a request in one step. host_lag:
    rounds that the host is behind. eos_tokens: any of them ends a request. draft_shape: how it drafts, None if it does
    not. embedding_form: what embeddings it takes with prompts, None if they are text. repeats_steps: whether a step
    that raised may be launched again; if not, its requests are lost.
    """

    slots: SlotAllocator
    max_context: int
    draft_room: int
    max_accepted: int
    chunk: int
    host_lag: int
    vocab_size: int
    eos_tokens: tuple[int, ...]
    draft_shape: DraftShape | None
    embedding_form: EmbeddingForm | None
    repeats_steps: bool

    def admit(self, row: int, sampling: Sampling) -> None:
        """A request begins in a table row."""

    def prefill(self, chunks: Sequence[Chunk]) -> Launch:
        """Commit the next tokens of prompts; a chunk that ends one emits the first new token."""

    def cycle(self, rows: Sequence[int], max_committed: Sequence[int]) -> Launch:
        """One decode step or cycle, which emits at least one token of each request.

        max_committed: of each, an upper bound on its committed tokens; exact without lag.
        """
