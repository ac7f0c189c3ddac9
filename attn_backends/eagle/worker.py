"""The reference workers: plain decoding, and EAGLE's draft, verify, accept and draft extend, for many requests at once.

They show how a worker drives the backends, and the library's own tests run on them; a serving engine brings its own. A
step reads the device once, for the tokens that it emits. Target and draft keep KV in the same slots, each in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend
from attn_backends.eagle.phases import (
    DraftState,
    Model,
    NextTokens,
    decode_phase,
    draft_phase,
    extend_phase,
    first_drafts,
    verify_phase,
)
from attn_backends.eagle.serving import Request
from attn_backends.eagle.slots import SlotAllocator
from attn_backends.graphs import Graph
from attn_backends.models.decoder import DraftModel, TargetModel
from attn_backends.runner import Phase, PhaseRunner
from spec_metadata import CacheGeometry, Capacity, PackedQuery, Step, UniformQuery, token_positions

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


@dataclass(frozen=True, slots=True)
class PhaseBackends:
    """The backend of each phase; they share one cache geometry and format."""

    prefill: AttentionBackend
    decode: AttentionBackend
    draft: AttentionBackend
    verify: AttentionBackend
    draft_extend: AttentionBackend


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker runs.

    buckets: batch sizes to capture, none to run eagerly. make_graph: what to capture them with. chunk: prompt tokens of
    a request that one prefill forward takes. eos_token: ends a request (None: none does). seed: of the order in which
    pages are given out.
    """

    buckets: tuple[int, ...] = ()
    make_graph: Callable[[], Graph] | None = None
    chunk: int = 512
    eos_token: int | None = None
    seed: int = 0


DEFAULTS = WorkerOptions()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens [start, end) of a request, for one prefill forward."""

    request: Request
    start: int
    end: int

    @property
    def tokens(self) -> list[int]:
        """The chunk's tokens."""
        return self.request.prompt[self.start : self.end]

    @property
    def ends_prompt(self) -> bool:
        """Whether the prompt is through."""
        return self.end == len(self.request.prompt)

    def next_tokens(self, first_token: int | None) -> list[int]:
        """The tokens after each of the chunk's: shifted by one, across chunk edges and into the first new token."""
        shifted = self.request.prompt[self.start + 1 : self.end + 1]
        return shifted if first_token is None else [*shifted, first_token]


def prompt_chunks(requests: Sequence[Request], size: int) -> list[list[Chunk]]:
    """Rounds of chunks: in each the next `size` tokens of every prompt that is not through."""
    longest = max(len(request.prompt) for request in requests)
    return [
        [Chunk(r, start, min(start + size, len(r.prompt))) for r in requests if start < len(r.prompt)]
        for start in range(0, longest, size)
    ]


def last_rows(step: Step) -> Tensor:
    """[bs] int64: the last query row of each request of a packed step."""
    assert isinstance(step.query, PackedQuery)
    return step.query.cu_seqlens[1:].long() - 1


def _longest(requests: Sequence[Request]) -> int:
    return max(request.num_committed for request in requests)


class TargetWorker:
    """What plain and speculative decoding share: the target, its cache, prompts, and the table of requests.

    num_graph_steps, num_eager_steps: how often each phase ran which way.
    """

    def __init__(
        self,
        target: TargetModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        self.target, self.backends, self.capacity, self.options = target, backends, capacity, options
        self.max_context, self.eos_token = capacity.max_context, options.eos_token
        self.device = target.device
        self.slots = SlotAllocator(geometry, capacity, target.device, options.seed)
        self.target_caches = target.allocate_caches(geometry)
        self.num_graph_steps: dict[str, int] = {}
        self.num_eager_steps: dict[str, int] = {}

    @torch.no_grad()
    def target_prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, dict[int, int]]:
        """Run a round of chunks. Returns hidden [num_tokens, H] and, by row, the first token where a prompt ended."""
        step = self._prefill_step(chunks)
        model = Model(self.target, self.target_caches, self.backends.prefill)
        meta = model.backend.init_forward_metadata(step)
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=self.device)
        hidden = self.target.forward(tokens, token_positions(step), model.attention(meta.at()))
        chosen = self.target.logits(hidden[last_rows(step)]).argmax(dim=-1).tolist()
        first = {c.request.row: token for c, token in zip(chunks, chosen, strict=True) if c.ends_prompt}
        return hidden, first

    def _runner(self, phase: Phase[Inputs, Outputs], backend: AttentionBackend) -> PhaseRunner[Inputs, Outputs]:
        paging = self.slots.paging(torch.empty(0, dtype=torch.int64, device=self.device))
        return PhaseRunner(phase, backend, paging, self.options.buckets, self.options.make_graph)

    def _run(self, runner: PhaseRunner[Inputs, Outputs], step: Step, inputs: Inputs) -> Outputs:
        result = runner.run(step, inputs)
        counts = self.num_graph_steps if result.ran_graph else self.num_eager_steps
        counts[runner.phase.name] = counts.get(runner.phase.name, 0) + 1
        return result.value

    def _rows(self, requests: Sequence[Request]) -> Tensor:
        return torch.tensor([request.row for request in requests], device=self.device)

    def _lens(self, requests: Sequence[Request]) -> Tensor:
        lens = [request.num_committed for request in requests]
        return torch.tensor(lens, dtype=torch.int32, device=self.device)

    def _prefill_step(self, chunks: Sequence[Chunk]) -> Step:
        starts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32, device=self.device)
        query = PackedQuery.of([len(chunk.tokens) for chunk in chunks], self.device)
        paging = self.slots.paging(self._rows([chunk.request for chunk in chunks]))
        return Step.prefill(query, starts, paging, max_committed=max(chunk.start for chunk in chunks))


class PlainWorker(TargetWorker):
    """Plain greedy decoding of the target: what speculative decoding must equal."""

    draft_room = 1

    def __init__(
        self,
        target: TargetModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        super().__init__(target, backends, capacity, geometry, options)
        phase = decode_phase(Model(target, self.target_caches, backends.decode), capacity)
        self._decode = self._runner(phase, backends.decode)

    def prefill(self, requests: Sequence[Request]) -> list[int]:
        """Commit the prompts; returns each request's first token."""
        first: dict[int, int] = {}
        for chunks in prompt_chunks(requests, self.options.chunk):
            first |= self.target_prefill(chunks)[1]
        return [first[request.row] for request in requests]

    @torch.no_grad()
    def step(self, requests: Sequence[Request]) -> list[list[int]]:
        """One token for each request."""
        paging, longest = self.slots.paging(self._rows(requests)), _longest(requests)
        step = Step.decode(self._lens(requests), paging, max_committed=longest)
        last = torch.tensor([request.output[-1] for request in requests], device=self.device)
        return [[token] for token in self._run(self._decode, step, NextTokens(last)).tokens.tolist()]


class EagleWorker(TargetWorker):
    """EAGLE: the draft proposes a chain or tree, the target verifies it in one forward."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        super().__init__(target, backends, capacity, geometry, options)
        self.draft, self.draft_room = draft, capacity.draft_room
        self.draft_caches = draft.allocate_caches(geometry)
        drafting = draft_phase(Model(draft, self.draft_caches, backends.draft), capacity)
        verifying = verify_phase(Model(target, self.target_caches, backends.verify), capacity)
        extending = extend_phase(Model(draft, self.draft_caches, backends.draft_extend), capacity)
        self._draft = self._runner(drafting, backends.draft)
        self._verify = self._runner(verifying, backends.verify)
        self._extend = self._runner(extending, backends.draft_extend)
        self._state = drafting.safe_inputs(capacity.max_bs + 1)

    def prefill(self, requests: Sequence[Request]) -> list[int]:
        """Commit the prompts to target and draft; returns each request's first token."""
        first: dict[int, int] = {}
        for chunks in prompt_chunks(requests, self.options.chunk):
            hidden, ended = self.target_prefill(chunks)
            self._draft_prefill(chunks, hidden, ended)
            first |= ended
        return [first[request.row] for request in requests]

    @torch.no_grad()
    def step(self, requests: Sequence[Request]) -> list[list[int]]:
        """One cycle; returns for each request the accepted drafts and the target's own token after them."""
        capacity, rows, lens, longest = self.capacity, self._rows(requests), self._lens(requests), _longest(requests)
        paging = self.slots.paging(rows)
        drafting = Step.draft_decode(capacity.topk, capacity.num_steps, lens, paging, max_committed=longest)
        tree = self._run(self._draft, drafting, self._kept(rows))
        mask = tree.mask if capacity.topk > 1 else None
        width = capacity.num_draft_tokens
        verifying = Step.target_verify(width, lens, paging, tree_mask=mask, max_committed=longest)
        accepted = self._run(self._verify, verifying, tree)
        extending = Step.draft_extend(UniformQuery(capacity.max_accepted), lens, paging, max_committed=longest)
        self._keep(rows, self._run(self._extend, extending, accepted))
        counts = accepted.num_accepted.tolist()
        return [tokens[:count] for tokens, count in zip(accepted.tokens.tolist(), counts, strict=True)]

    @torch.no_grad()
    def _draft_prefill(self, chunks: Sequence[Chunk], hidden: Tensor, ended: dict[int, int]) -> None:
        """Run the draft over a round of chunks: row p takes the target's hidden p and the token p + 1."""
        step = self._prefill_step(chunks)
        model = Model(self.draft, self.draft_caches, self.backends.prefill)
        meta = model.backend.init_forward_metadata(step)
        following = [chunk.next_tokens(ended.get(chunk.request.row)) for chunk in chunks]
        tokens = torch.tensor([token for row in following for token in row], device=self.device)
        out = self.draft.forward(tokens, hidden, token_positions(step), model.attention(meta.at()))
        last = last_rows(step)
        state = first_drafts(self.draft.logits(out[last]), tokens[last], out[last], self.capacity.topk)
        self._keep(self._rows([chunk.request for chunk in chunks]), state)

    def _keep(self, rows: Tensor, state: DraftState) -> None:
        for field in fields(state):
            getattr(self._state, field.name)[rows] = getattr(state, field.name)

    def _kept(self, rows: Tensor) -> DraftState:
        return DraftState(*(getattr(self._state, field.name)[rows] for field in fields(self._state)))
