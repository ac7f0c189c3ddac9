"""Serving: requests join and leave between rounds of two steps, one of prefill and one of decoding.

Knows nothing of how a step is computed. `docs/serving.md` says how to use it, and the rules that are kept here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Self

from torch import Tensor

from attn_backends_reference.eagle.embeddings import PromptEmbeddings
from attn_backends_reference.eagle.launches import Launch
from attn_backends_reference.eagle.protocol import Chunk, Worker
from attn_backends_reference.eagle.requests import (
    DEFAULT_OPTIONS,
    Completion,
    FinishReason,
    Request,
    RequestError,
    RequestOptions,
)
from attn_backends_reference.eagle.slots import NO_DIGESTS
from attn_backends_reference.eagle.text import Decode, GrowingText
from spec_metadata import Sampling
from spec_metadata.capacity import ceil_div

Emitted = tuple[Request, list[int]]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step that the host has not read. is_cycle: or of prefill."""

    requests: list[Request]
    launch: Launch
    is_cycle: bool


class Server:
    """Serves requests on one worker, which is its alone. Not thread-safe: one thread submits, cancels and streams.

    decode: token ids to text, for `Request.text` and stop strings. Requests are admitted in the order of submission,
    each when a table row is free and so are all pages that it can come to need; until then it waits. One whose prompt
    begins like a prompt in prefill lets others pass until it can share those pages.
    """

    def __init__(self, worker: Worker, decode: Decode | None = None) -> None:
        self.worker, self._decode = worker, decode
        self._num_submitted = 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission; ended ones too, until all their steps are read
        self._unread: deque[list[_Unread]] = deque()  # of each round
        self._emitted: list[Emitted] = []  # read, and not returned by a round yet
        self._unstreamed: deque[Emitted] = deque()  # of a stream that was left within a round

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and given back what it held."""
        return not self._waiting and not self._running

    def submit(
        self,
        prompt: Sequence[int],
        options: RequestOptions = DEFAULT_OPTIONS,
        multimodal_embeddings: Tensor | None = None,
    ) -> Request:
        """Queue a prompt of token ids. Raises `RequestError` for what can't be served, and nothing was changed then.

        multimodal_embeddings: [num_placeholders, hidden_size], what the target begins the rows of the prompt's
        placeholder tokens with, in their order (`EmbeddingForm`); copied, and read by the host.
        """
        self._check(prompt, options)
        embeddings = self._embeddings(prompt, multimodal_embeddings)
        limit = min(options.max_new_tokens, self.worker.max_context - len(prompt))
        growing = None if self._decode is None else GrowingText(self._decode, options.stop)
        request = Request(self._num_submitted, list(prompt), options, limit, growing, embeddings)
        slots, geometry = self.worker.slots, self.worker.slots.geometry
        num_pages = ceil_div(self._reach(request), geometry.page_size)
        if num_pages >= geometry.num_pages:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {limit} new ones can come to need {num_pages} pages of "
                f"{geometry.page_size} tokens; the cache has {geometry.num_pages - 1}. Ask for fewer, or make it larger"
            )
        request.prefix_keys = slots.prefix_keys(prompt, embeddings.digests if embeddings else NO_DIGESTS)
        self._num_submitted += 1
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; it emits nothing any more. Raises `RequestError` if it has ended already."""
        if request.finish is not None:
            how = "been cancelled" if request.finish is FinishReason.CANCELLED else f"ended ({request.finish})"
            raise RequestError(f"request {request.number} can't be cancelled: it has {how} already")
        if request not in self._waiting and request not in self._running:
            raise RequestError(f"request {request.number} can't be cancelled: it was submitted to another server")
        request.end(FinishReason.CANCELLED)
        if request in self._waiting:
            self._waiting.remove(request)
        self._release_ended()

    def close(self) -> None:
        """Cancel every request and give back what they hold, so that another server can use the worker.

        Steps that were launched are not read. A ``with`` block closes its server, whatever was raised in it.
        """
        for request in (*self._waiting, *self._running):
            if request.finish is None:
                request.end(FinishReason.CANCELLED)
            request.num_prefills_unread = request.num_cycles_unread = 0
        for emitted in (self._waiting, self._unread, self._emitted, self._unstreamed):
            emitted.clear()
        self._release_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self) -> Iterator[Emitted]:
        """Serve until idle; yields (request, its new tokens), at least one token each, as the host reads them.

        Requests may be submitted and cancelled meanwhile; nothing more of a cancelled one is yielded. The next stream
        continues where one was left.
        """
        while self._unstreamed or not self.is_idle:
            while self._unstreamed:
                request, tokens = self._unstreamed.popleft()
                if request.finish is not FinishReason.CANCELLED:
                    yield request, tokens
            if not self.is_idle:
                self._unstreamed.extend(self.round())

    def round(self) -> list[Emitted]:
        """One scheduling round: admit, launch one cycle and one step of prefill, read what is due.

        Raises `RequestError` while another server's requests run on the worker, and nothing was changed then. If a step
        raises, as one does that is out of memory, the next round tries it again, and reads what ran before it. Where a
        step can't be repeated (`Worker.repeats_steps`), its requests have ended (`FinishReason.FAILED`).
        """
        if not self._running and self.worker.slots.in_use:
            raise RequestError(
                "the worker holds requests of another server; let that one finish first, or give each server a worker "
                "of its own"
            )
        self._read_due()
        self._admit()
        launched: list[_Unread] = []
        self._unread.append(launched)  # filled as steps are launched, so that one that raises loses none before it
        launched += self._launch_cycle()
        launched += self._launch_prefill()
        self._read_due()
        self._release_ended()
        emitted, self._emitted = self._emitted, []
        return emitted

    def _check(self, prompt: Sequence[int], options: RequestOptions) -> None:
        worker = self.worker
        if not isinstance(options, RequestOptions):
            raise RequestError(f"options are {options!r}; they must be RequestOptions")
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            raise RequestError(
                f"a prompt is a {type(prompt).__name__}; it must be a sequence of token ids: `tokenizer.encode` of a "
                "text, `.tolist()` of a tensor"
            )
        if not prompt:
            raise RequestError("a prompt is empty; it needs at least one token")
        if len(prompt) >= worker.max_context:
            raise RequestError(
                f"a prompt has {len(prompt)} tokens; a context of {worker.max_context} holds at most "
                f"{worker.max_context - 1} and one new token. Shorten it, or raise max_context"
            )
        for token in prompt:
            if not isinstance(token, Integral):
                raise RequestError(f"a prompt holds {token!r}; token ids are whole numbers")
            if not 0 <= token < worker.vocab_size:
                raise RequestError(f"a prompt holds token {token}; the model knows 0 to {worker.vocab_size - 1}")
        if options.stop and self._decode is None:
            raise RequestError(f"stop strings {list(options.stop)} need text; give the server `decode`")
        if options.draft not in (None, worker.draft_shape):
            own = f"drafts with {worker.draft_shape}" if worker.draft_shape else "does not draft"
            raise RequestError(
                f"a request asks for drafts with {options.draft}; this worker {own}, for all of its requests. Submit "
                "it to a worker of its own shape, or leave `draft` out"
            )

    def _embeddings(self, prompt: Sequence[int], given: Tensor | None) -> PromptEmbeddings | None:
        form = self.worker.embedding_form
        if form is not None:
            return form.take(prompt, given)
        if given is not None:
            raise RequestError(
                "a prompt comes with embeddings; this worker takes token ids alone. Build it with "
                "WorkerOptions(placeholder_token=…), the token that stands for an embedding"
            )
        return None

    def _reach(self, request: Request) -> int:
        """Positions that a request can come to write.

        Its last cycle begins two tokens before its end at most, and with lag one more begins behind what that accepted.
        """
        worker = self.worker
        last = len(request.prompt) + request.limit - 2 + worker.host_lag * (worker.max_accepted - 1)
        return min(last, worker.max_context) + worker.draft_room

    def _max_committed(self, request: Request) -> int:
        """Tokens that a request may have committed by now: each unread cycle, as many as one can."""
        return request.num_committed + request.num_cycles_unread * self.worker.max_accepted

    def _admit(self) -> None:
        slots = self.worker.slots
        for request in list(self._waiting):
            if self._can_share_soon(request):
                continue
            if not slots.can_admit(self._reach(request), request.prefix_keys):
                break
            row = slots.admit(request.prefix_keys)
            num_shared = slots.num_held_tokens(row)
            try:
                slots.reserve(row, self._reach(request))
                self.worker.admit(row, request.options.sampling)
            except BaseException:
                slots.release(row)
                raise
            request.row, request.num_prefilled, request.statistics.num_shared_tokens = row, num_shared, num_shared
            self._waiting.remove(request)
            self._running.append(request)

    def _can_share_soon(self, request: Request) -> bool:
        """Whether a request in prefill is about to commit more pages of this one's prompt than can be shared now."""
        slots = self.worker.slots
        now = slots.num_shared_tokens(request.prefix_keys)
        in_prefill = [other for other in self._running if other.finish is None and other.in_prefill]
        return any(slots.num_common_tokens(request.prefix_keys, other.prefix_keys) > now for other in in_prefill)

    def _launch_cycle(self) -> Iterator[_Unread]:
        """Launch a cycle, without requests that might exceed max_context, given cycles that the host has not read."""
        requests = [
            request
            for request in self._running
            if request.finish is None
            and not request.in_prefill
            and not request.is_sure_to_end
            and self._max_committed(request) <= self.worker.max_context
        ]
        if requests:
            committed = [self._max_committed(request) for request in requests]
            with self._lost_if_it_fails(requests):
                launch = self.worker.cycle([request.row for request in requests], committed)
            for request in requests:
                request.num_cycles_unread += 1
            yield _Unread(requests, launch, is_cycle=True)

    def _launch_prefill(self) -> Iterator[_Unread]:
        requests = [request for request in self._running if request.finish is None and request.in_prefill]
        if requests:
            ends = [min(request.num_prefilled + self.worker.chunk, len(request.prompt)) for request in requests]
            both = zip(requests, ends, strict=True)
            chunks = [Chunk(r.row, r.prompt, r.num_prefilled, end, r.embeddings) for r, end in both]
            with self._lost_if_it_fails(requests):
                launch = self.worker.prefill(chunks)
            for request, end in zip(requests, ends, strict=True):
                request.num_prefilled = end
                request.num_prefills_unread += 1
                self.worker.slots.share(request.row, request.prefix_keys, end)
                if not request.in_prefill:
                    request.embeddings = None
            yield _Unread(requests, launch, is_cycle=False)

    @contextmanager
    def _lost_if_it_fails(self, requests: Sequence[Request]) -> Iterator[None]:
        """End the requests of a step that raises, unless it can be launched again."""
        try:
            yield
        except BaseException:
            if not self.worker.repeats_steps:
                for request in requests:
                    request.end(FinishReason.FAILED)
            raise

    def _read_due(self) -> None:
        """Read rounds until the host is as far behind as it may be."""
        while len(self._unread) > self.worker.host_lag:
            for step in self._unread.popleft():
                self._emitted += self._read(step)

    def _read(self, step: _Unread) -> Iterator[Emitted]:
        tokens, seconds = step.launch.read()
        for request, given in zip(step.requests, tokens, strict=True):
            if step.is_cycle:
                request.num_cycles_unread -= 1
            else:
                request.num_prefills_unread -= 1
            if request.finish is not None:
                continue
            taken = request.emit(given, self.worker.eos_tokens)
            request.statistics.seconds.update(seconds)
            if step.is_cycle:
                request.statistics.count_cycle(len(taken), num_drafted=len(given) - 1)
            if taken:
                yield request, taken

    def _release_ended(self) -> None:
        """Take back what ended requests hold, once no step of theirs is on its way."""
        for request in [request for request in self._running if request.finish is not None and not request.is_unread]:
            self.worker.slots.release(request.row)
            self._running.remove(request)
            request.row = -1
            assert self._running or not self.worker.slots.in_use, "a request kept a row or pages"


def serve(
    worker: Worker,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_progress: Callable[[int], None] | None = None,
    sampling: Sequence[Sampling] | None = None,
) -> list[Completion]:
    """Serve prompts to their end: max_new_tokens, the end-of-text token or the context's last token.

    on_progress gets the number of tokens newly emitted, every round. sampling: of each prompt, greedy without. Whatever
    a step or on_progress raises ends all of them, and the worker can be used again.
    """
    records = [Sampling()] * len(prompts) if sampling is None else sampling
    options = [RequestOptions(max_new_tokens, record) for record in records]
    with Server(worker) as server:
        requests = [server.submit(*both) for both in zip(prompts, options, strict=True)]
        while not server.is_idle:
            emitted = server.round()
            if on_progress is not None:
                on_progress(sum(len(tokens) for _, tokens in emitted))
    return [Completion(request.output, request.statistics.num_cycles) for request in requests]
