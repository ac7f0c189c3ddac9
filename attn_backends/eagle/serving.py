"""Serving requests to their end: admission, prefill, steps until done. Knows nothing of how a step is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attn_backends.eagle.slots import SlotAllocator
from spec_metadata import InvalidStepError


@dataclass(slots=True)
class Request:
    """A request being served. row: in the request-to-token table. output: tokens emitted so far. num_cycles: steps that
    emitted them, the prefill left out.
    """

    prompt: list[int]
    max_new_tokens: int
    row: int = -1
    output: list[int] = field(default_factory=list)
    num_cycles: int = 0
    done: bool = False

    @property
    def num_committed(self) -> int:
        """Tokens whose KV the target has: all but the last sampled one."""
        return len(self.prompt) + len(self.output) - 1


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. tokens: emitted, the prefill's first token included. num_cycles: steps after the prefill."""

    tokens: list[int]
    num_cycles: int

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens that a step emitted on average; the prefill's own token is not counted."""
        return (len(self.tokens) - 1) / max(self.num_cycles, 1)


class Worker(Protocol):
    """What serving needs of a worker. draft_room: tokens past the committed ones that a step may write."""

    slots: SlotAllocator
    max_context: int
    draft_room: int
    eos_token: int | None

    def prefill(self, requests: Sequence[Request]) -> list[int]:
        """Commit the prompts; returns each request's first token."""

    def step(self, requests: Sequence[Request]) -> list[list[int]]:
        """One decode step or cycle; returns what each request emitted, at least one token."""


def serve(
    worker: Worker,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Serve prompts to their end: max_new_tokens, the end-of-text token or the context's last token.

    Requests join when a table row is free and leave when done. on_progress gets the number of tokens newly emitted.
    """
    requests = [_admissible(worker, prompt, max_new_tokens) for prompt in prompts]
    waiting, active = list(requests), list[Request]()
    while waiting or active:
        joining = waiting[: worker.slots.num_free_rows]
        waiting = waiting[len(joining) :]
        num_before = sum(len(request.output) for request in requests)
        if joining:
            for request in joining:
                request.row = worker.slots.admit()
                worker.slots.reserve(request.row, len(request.prompt))
            for request, token in zip(joining, worker.prefill(joining), strict=True):
                _emit(worker, request, [token])
            active += joining
        running = [request for request in active if not request.done]
        for request in running:
            worker.slots.reserve(request.row, request.num_committed + worker.draft_room)
        if running:
            for request, tokens in zip(running, worker.step(running), strict=True):
                request.num_cycles += 1
                _emit(worker, request, tokens)
        for request in [request for request in active if request.done]:
            worker.slots.release(request.row)
            active.remove(request)
        if on_progress is not None:
            on_progress(sum(len(request.output) for request in requests) - num_before)
    return [Completion(request.output, request.num_cycles) for request in requests]


def _admissible(worker: Worker, prompt: Sequence[int], max_new_tokens: int) -> Request:
    if not prompt:
        raise InvalidStepError("a prompt is empty; it needs at least one token")
    if len(prompt) >= worker.max_context:
        raise InvalidStepError(
            f"a prompt has {len(prompt)} tokens; a context of {worker.max_context} holds at most "
            f"{worker.max_context - 1} and one new token. Shorten it, or raise max_context"
        )
    if max_new_tokens < 1:
        raise InvalidStepError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    return Request(list(prompt), min(max_new_tokens, worker.max_context - len(prompt)))


def _emit(worker: Worker, request: Request, tokens: list[int]) -> None:
    """Append tokens up to the request's end."""
    for token in tokens:
        request.output.append(token)
        if len(request.output) == request.max_new_tokens or token == worker.eos_token:
            request.done = True
            return
