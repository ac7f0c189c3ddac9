"""A request: what was asked for, how far it is, and what it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING

from attn_backends.errors import AttnBackendsError
from attn_backends_reference.eagle.text import GrowingText
from spec_metadata import Capacity, Sampling

if TYPE_CHECKING:
    from attn_backends_reference.eagle.embeddings import PromptEmbeddings


class RequestError(AttnBackendsError):
    """A request that a server can't take, or can't take back."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of drafting. num_draft_tokens counts the root, which is the last sampled token."""

    topk: int
    num_steps: int
    num_draft_tokens: int

    @classmethod
    def of(cls, capacity: Capacity) -> DraftShape:
        """The shape that a capacity is for."""
        return cls(capacity.topk, capacity.num_steps, capacity.num_draft_tokens)

    def __str__(self) -> str:
        return f"topk={self.topk}, num_steps={self.num_steps}, num_draft_tokens={self.num_draft_tokens}"


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request, beside its prompt.

    max_new_tokens: the context may end it earlier. sampling: greedy by default. stop: strings that end the request; the
    text ends before them, the tokens with the one that completes the string. ignore_eos: continue after the model's
    end-of-text tokens. draft: the shape of drafting that it must get, None for the worker's own.
    """

    max_new_tokens: int = 64
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft: DraftShape | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, Integral):
            raise RequestError(f"max_new_tokens must be a whole number, got {self.max_new_tokens!r}")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if isinstance(self.stop, str):
            raise RequestError(f"stop must be a tuple of strings, got the string {self.stop!r}; write ({self.stop!r},)")
        if not isinstance(self.stop, Sequence) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop must be a tuple of strings, got {self.stop!r}")
        if "" in self.stop:
            raise RequestError(f"a stop string is empty, which would end every text at once; got {list(self.stop)}")
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"sampling must be a Sampling, got {self.sampling!r}")
        if not isinstance(self.draft, DraftShape | None):
            raise RequestError(f"draft must be a DraftShape or None, got {self.draft!r}")


DEFAULT_OPTIONS = RequestOptions()


class FinishReason(StrEnum):
    """The reason why a request ended: an end-of-text token, a stop string, its length, a cancellation, or a step that
    raised and can't be run again.
    """

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class Statistics:
    """Counts and times of a request.

    num_cycles: decode steps or cycles that emitted something, the prefill left out. accepted_by_depth: of each depth,
    how many of its emitted tokens were drafted there. num_shared_tokens: prompt tokens found in pages of other
    requests. seconds: by phase, of all steps that it took part in; a batch takes them together, so requests don't add
    up.
    """

    num_cycles: int = 0
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    num_shared_tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)

    def count_cycle(self, num_emitted: int, num_drafted: int) -> None:
        """Count a cycle that emitted tokens, of which the first num_drafted at most were drafted."""
        self.num_cycles += 1
        self.accepted_by_depth.update(range(1, min(num_emitted, num_drafted) + 1))


@dataclass(eq=False, slots=True)
class Request:
    """A request in a server's hands.

    number: of its submission. limit: tokens that it may emit, from max_new_tokens and the context. growing: its text,
    None without a tokenizer. embeddings: of the prompt's placeholders, None without, and once the prompt is through or
    the request ended. output: tokens emitted so far. finish: None until its end is known.

    Of the server: prefix_keys: what the prompt's pages are known by. row: in the request-to-token table, -1 without
    one. num_prefilled: prompt tokens launched or shared. num_prefills_unread, num_cycles_unread: steps launched that
    the host has not read yet.
    """

    number: int
    prompt: list[int]
    options: RequestOptions
    limit: int
    growing: GrowingText | None = None
    embeddings: PromptEmbeddings | None = None
    output: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    prefix_keys: Sequence[bytes] = ()
    row: int = -1
    num_prefilled: int = 0
    num_prefills_unread: int = 0
    num_cycles_unread: int = 0

    @property
    def text(self) -> str:
        """The output so far, in whole characters, without an end that may become a stop string."""
        if self.growing is None:
            raise RequestError("the server makes no text of tokens; give it `decode`, a tokenizer's for example")
        return self.growing.shown

    @property
    def in_prefill(self) -> bool:
        """Whether prompt tokens are left to launch."""
        return self.num_prefilled < len(self.prompt)

    @property
    def num_committed(self) -> int:
        """Tokens whose KV the target has, as far as the host has read: all but the last sampled one."""
        return len(self.prompt) + max(len(self.output), 1) - 1

    @property
    def is_unread(self) -> bool:
        """Whether it takes part in a step that the host has not read yet."""
        return self.num_prefills_unread + self.num_cycles_unread > 0

    @property
    def is_sure_to_end(self) -> bool:
        """Whether what was launched reaches its limit; prefill and every cycle emit a token at least."""
        return max(len(self.output), 1) + self.num_cycles_unread >= self.limit

    def emit(self, tokens: list[int], eos_tokens: Collection[int]) -> list[int]:
        """Take tokens up to the request's end; returns those it took."""
        for number, token in enumerate(tokens, 1):
            self.output.append(token)
            stopped = self.growing is not None and self.growing.append(token)
            if token in eos_tokens and not self.options.ignore_eos:
                self.end(FinishReason.EOS)
            elif stopped:
                self.end(FinishReason.STOP)
            elif len(self.output) == self.limit:
                self.end(FinishReason.LENGTH)
            if self.finish is not None:
                return tokens[:number]
        return tokens

    def end(self, reason: FinishReason) -> None:
        """Nothing follows."""
        self.finish = reason
        self.embeddings = None
        if self.growing is not None:
            self.growing.end()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. tokens: emitted, the prefill's first token included. num_cycles: steps after the prefill."""

    tokens: list[int]
    num_cycles: int

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens that a step emitted on average; the prefill's own token is not counted."""
        return (len(self.tokens) - 1) / max(self.num_cycles, 1)
