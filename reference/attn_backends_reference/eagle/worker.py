"""The reference workers that drive the backends: plain decoding, and EAGLE's draft, verify, accept and draft extend,
for many requests at once.

They show how a worker drives the backends, and the library's own tests run on them; a serving engine brings its own. A
step is launched without reading the device. Lengths, draft states and how requests sample stay there, in tables with an
entry for each row of the request-to-token table, and the host reads what was emitted when it likes. Target and draft
keep KV in the same slots, each in its cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.errors import UnsupportedStepError
from attn_backends.runner import Phase, PhaseRunner, Runner
from attn_backends_reference.eagle.adaptive import StepPolicy
from attn_backends_reference.eagle.draft_checks import check_eagle
from attn_backends_reference.eagle.draft_window import DraftWindow
from attn_backends_reference.eagle.embeddings import EmbeddingForm
from attn_backends_reference.eagle.launches import Launch, Timings
from attn_backends_reference.eagle.multimodal import MultimodalPrefill
from attn_backends_reference.eagle.options import DEFAULTS, PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.phases import DraftState, Model, Nothing, decode_phase, draft_phase
from attn_backends_reference.eagle.prefill_phases import (
    DraftPrefillInputs,
    Prefilled,
    PrefillInputs,
    draft_prefill_phase,
    prefill_phase,
)
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.ragged import accepted_rows, extend_phase_of, verified_rows, verify_phase_of
from attn_backends_reference.eagle.requests import DraftShape
from attn_backends_reference.eagle.slots import SlotAllocator
from attn_backends_reference.eagle.step_sets import OfPhases, StepSets
from attn_backends_reference.eagle.tables import keep
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.pieces import PackedPhase, PiecewiseRunner, whole
from spec_metadata import (
    CacheGeometry,
    Capacity,
    CommittedState,
    PackedQuery,
    Paging,
    Sampling,
    SamplingParams,
    Step,
    StepKind,
    token_positions,
)
from spec_metadata.upload import to_device

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


class TargetWorker:
    """Base of workers for plain and speculative decoding: the target, its cache, prompts, and the tables of requests.

    num_graph_steps, num_eager_steps: graph and eager steps of each phase, by its name.
    """

    def __init__(
        self,
        target: TargetModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        if capacity.max_context > target.max_positions:
            reasons = [f"max_context={capacity.max_context} (the target has {target.max_positions} positions)"]
            raise UnsupportedStepError("a worker", reasons, f"max_context={target.max_positions}, or less")
        self.target, self.backends, self.capacity, self.options = target, backends, capacity, options
        self.max_context, self.eos_tokens, self.vocab_size = capacity.max_context, options.eos_tokens, target.vocab_size
        self.chunk, self.host_lag = options.chunk, options.host_lag
        self.device = target.device
        placeholder = options.placeholder_token
        self.embedding_form = form = None if placeholder is None else EmbeddingForm.of(target, placeholder)
        self._multimodal = None if form is None else MultimodalPrefill(form, capacity.num_steps)
        self.target_caches = target.allocate_caches(backends.prefill, options.cache_dtype)
        self.slots = SlotAllocator(geometry, capacity, target.device, options.seed)
        self.repeats_steps = isinstance(target.cache_format, CacheFormat)  # others hold states of the last tokens alone
        self.num_graph_steps: dict[str, int] = {}
        self.num_eager_steps: dict[str, int] = {}
        num_rows = capacity.max_bs + 1
        self._lens = torch.zeros(num_rows, dtype=torch.int32, device=target.device)
        self._sampling = SamplingParams.greedy(num_rows, target.device)
        self._committed = CommittedState.of(self._paging(), capacity.max_bs)
        phase = prefill_phase(Model(target, self.target_caches, backends.prefill), capacity, self._sampling)
        self._prefill = self._prefill_runner(phase)

    def admit(self, row: int, sampling: Sampling) -> None:
        """A request begins in a table row."""
        keep(self._sampling, self._index([row]), SamplingParams.of([sampling]))

    @torch.no_grad()
    def target_prefill(self, chunks: Sequence[Chunk]) -> Prefilled:
        """Run chunks of prompts, and let rows whose prompt ends begin to decode.

        The token after a chunk means something where the chunk ends its prompt.
        """
        step, rows = self._prefill_step(chunks), self._index([chunk.row for chunk in chunks])
        self._lens[rows] = to_device([chunk.end for chunk in chunks], torch.int32, self.device)
        inputs = PrefillInputs(
            tokens=to_device([token for chunk in chunks for token in chunk.tokens], torch.int64, self.device),
            positions=token_positions(step),
            last=last_rows(step),
            table_rows=rows,
        )
        return self._run(self._prefill, step, self._with_embeddings(inputs, chunks))

    def _prefill_runner(self, phase: PackedPhase[Inputs, Outputs], more_rows: int = 0) -> Runner[Inputs, Outputs]:
        """more_rows: of all requests, as of `WorkerOptions.prefill_sizes`."""
        options, backend, sizes = self.options, self.backends.prefill, self.options.prefill_sizes(more_rows)
        if self._multimodal is not None:
            phase = self._multimodal.phase(phase)
        if options.prefill_graphs == "piecewise":
            return PiecewiseRunner(phase, backend, sizes, options.make_graph)
        for size in sizes:
            reasons = backend.capture_reasons(self.capacity.prefill_bucket(size))
            if reasons:
                instead = "prefill in pieces ('piecewise'), which any kernel can"
                raise UnsupportedStepError(f"{backend.name} can't capture prefill in full", reasons, instead)
        place = (self._paging(), sizes, options.make_graph, options.planning)
        return PhaseRunner(whole(phase), backend, *place)

    def _with_embeddings(self, inputs: Inputs, chunks: Sequence[Chunk]) -> Inputs:
        """The inputs of a phase of prefill, with what came with the prompts if this worker takes embeddings."""
        return inputs if self._multimodal is None else self._multimodal.inputs(inputs, chunks)

    def _runner(
        self, phase: Phase[Inputs, Outputs], backend: AttentionBackend, *turns: Any, state: CommittedState | None = None
    ) -> PhaseRunner[Inputs, Outputs]:
        """turns: `within` and `sharing` of a phase that takes turns with others. state: of lengths of its own."""
        options = self.options
        how = options.buckets, options.make_graph, options.planning
        return PhaseRunner(phase, backend, state or self._committed, *how, *turns)

    def _paging(self) -> Paging:
        """The table, of no request."""
        return self.slots.paging(self._index([]))

    def _load(self, index: Tensor) -> tuple[Tensor, Paging]:
        """Begin a cycle of the requests in some rows: what its steps are made of. index: [bs] int64."""
        return self._committed.load(self._lens[index], index)

    def _run(self, runner: Runner[Inputs, Outputs], step: Step, inputs: Inputs) -> Outputs:
        result = runner.run(step, inputs)
        counts = self.num_graph_steps if result.ran_graph else self.num_eager_steps
        counts[runner.phase.name] = counts.get(runner.phase.name, 0) + 1
        return result.value

    def _index(self, rows: Sequence[int]) -> Tensor:
        return to_device(rows, torch.int64, self.device)

    def _bounds(self, max_committed: Sequence[int]) -> dict[str, Any]:
        """What the host can tell a step of its lengths: exact ones only while it reads every cycle before the next."""
        exact = tuple(max_committed) if self.host_lag == 0 else None
        return {"max_committed": max(max_committed), "seq_lens_cpu": exact}

    def _prefill_step(self, chunks: Sequence[Chunk]) -> Step:
        starts, widths = [chunk.start for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        cu_seqlens = to_device([0, *accumulate(widths)], torch.int32, self.device)
        query = PackedQuery(cu_seqlens, tuple(widths))
        paging = self.slots.paging(self._index([chunk.row for chunk in chunks]))
        lens = to_device(starts, torch.int32, self.device)
        return Step.prefill(query, lens, paging, max_committed=max(starts), seq_lens_cpu=starts)

    def _check_lag(self, backends: Mapping[StepKind, AttentionBackend]) -> None:
        """Refuse kernels that plan from exact lengths, if the host won't know them."""
        kernels = {kind: backend.kernel_of(kind) for kind, backend in backends.items()}
        reasons = [
            f"kernel {kernel.name} plans {kind} on the host from exact lengths, which the host learns a cycle late"
            for kind, kernel in kernels.items()
            if kernel.capabilities[kind].needs_host_lens
        ]
        if self.host_lag and reasons:
            raise UnsupportedStepError("host_lag=1", reasons, "host_lag=0, or kernels that plan on the device")


class PlainWorker(TargetWorker):
    """Plain decoding of the target: what speculative decoding must equal."""

    draft_room = max_accepted = 1
    draft_shape: DraftShape | None = None

    def __init__(
        self,
        target: TargetModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        super().__init__(target, backends, capacity, geometry, options)
        self._check_lag({StepKind.DECODE: backends.decode})
        self._last_tokens = torch.zeros(capacity.max_bs + 1, dtype=torch.int64, device=self.device)
        model = Model(target, self.target_caches, backends.decode)
        phase = decode_phase(model, capacity, self._sampling, self._last_tokens)
        self._decode = self._runner(phase, backends.decode)

    def prefill(self, chunks: Sequence[Chunk]) -> Launch:
        """Commit the next tokens of prompts; a chunk that ends one emits the first new token."""
        timings = Timings(self.device)
        tokens = self.target_prefill(chunks).tokens
        self._last_tokens[self._index([chunk.row for chunk in chunks])] = tokens
        timings.mark("prefill")
        return Launch(tokens.unsqueeze(1), [int(chunk.ends_prompt) for chunk in chunks], timings)

    @torch.no_grad()
    def cycle(self, rows: Sequence[int], max_committed: Sequence[int]) -> Launch:
        """One token for each request."""
        timings, index = Timings(self.device), self._index(rows)
        step = Step.decode(*self._load(index), **self._bounds(max_committed))
        tokens = self._run(self._decode, step, Nothing()).tokens
        timings.mark("decode")
        launch = Launch(tokens.unsqueeze(1), [1] * len(rows), timings)
        self._last_tokens[index] = tokens
        self._lens[index] += 1
        return launch


class SpeculativeWorker(TargetWorker, ABC):
    """Base of workers that draft, with the draft's KV in the slots of the target."""

    def __init__(
        self,
        target: TargetModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        super().__init__(target, backends, capacity, geometry, options)
        self.draft_room, self.max_accepted = capacity.draft_room, capacity.max_accepted
        self.draft_shape: DraftShape | None = DraftShape.of(capacity)

    def prefill(self, chunks: Sequence[Chunk]) -> Launch:
        """Commit the next tokens of prompts to target and drafts; a chunk that ends one emits the first new token."""
        timings = Timings(self.device)
        prefilled = self.target_prefill(chunks)
        self._draft_prefill(chunks, prefilled.features, prefilled.tokens)
        timings.mark("prefill")
        return Launch(prefilled.tokens.unsqueeze(1), [int(chunk.ends_prompt) for chunk in chunks], timings)

    @abstractmethod
    def _draft_prefill(self, chunks: Sequence[Chunk], features: Tensor, first: Tensor) -> None:
        """Draft over chunks. features: [num_tokens, F], the target's. first: [bs] int64, the tokens after prompts."""


class EagleWorker(SpeculativeWorker):
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
        check_eagle(target, draft, capacity, options)
        target = target.tapped(draft.feature_layers)
        super().__init__(target, backends, capacity, geometry, options)
        steps = (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)
        used = backends.draft, backends.verify, backends.draft_extend
        self._check_lag(dict(zip(steps, used, strict=True)))
        self.draft, self.draft_caches = draft, draft.allocate_caches(backends.prefill, options.cache_dtype)
        phase = draft_prefill_phase(Model(draft, self.draft_caches, backends.prefill), capacity)
        self._first_drafts = self._prefill_runner(phase)
        self._states = DraftState.empty(capacity.max_bs + 1, capacity.topk, draft)
        adaptive = options.adaptive
        self.policy = None if adaptive is None else StepPolicy(adaptive)
        sets = [] if adaptive is None else adaptive.sets
        shapes = [capacity.with_draft(x.topk, x.num_steps, x.num_draft_tokens) for x in sets] or [capacity]
        self._window = DraftWindow.of(options, draft, capacity, self.slots)
        self._drafting = self._committed if self._window is None else self._window.state(capacity.max_bs)
        states, phases = (self._drafting, self._committed, self._committed), [(x, self._phases(x)) for x in shapes]
        self.step_sets = StepSets(phases, used, states, options.buckets, self._runner)

    def _phases(self, capacity: Capacity) -> OfPhases:
        """Those of a cycle that drafts in the shape of a capacity."""
        backends, options, drafts = self.backends, self.options, partial(Model, self.draft, self.draft_caches)
        return (
            draft_phase(drafts(backends.draft), capacity, self._states, self._lens),
            verify_phase_of(Model(self.target, self.target_caches, backends.verify), capacity, options, self._sampling),
            extend_phase_of(drafts(backends.draft_extend), capacity, options, self.capacity.topk),
        )

    @torch.no_grad()
    def cycle(self, rows: Sequence[int], max_committed: Sequence[int]) -> Launch:
        """One cycle, which emits the accepted drafts and the target's own token after them."""
        timings, index, policy = Timings(self.device), self._index(rows), self.policy
        number = 0 if policy is None else policy.choose(len(rows))
        phases, capacity = self.step_sets[number], self.step_sets[number].capacity
        committed, bounds = self._load(index), self._bounds(max_committed)
        tree = self._run(phases.draft, self._draft_step(capacity, committed, index, bounds), Nothing())
        timings.mark("draft")
        mask, (nodes, given) = tree.mask if capacity.topk > 1 else None, verified_rows(tree, capacity, self.options)
        accepted = self._run(phases.verify, Step.target_verify(nodes, *committed, tree_mask=mask, **bounds), given)
        timings.mark("verify")
        extending = Step.draft_extend(accepted_rows(accepted, capacity, self.options), *committed, **bounds)
        state = self._run(phases.extend, extending, accepted)
        self.step_sets.cycle_ends()
        timings.mark("draft_extend")
        on_read = None if policy is None else partial(policy.observe, number)
        launch = Launch(accepted.tokens, accepted.num_accepted, timings, on_read)
        keep(self._states, index, state)
        self._lens.index_add_(0, index, accepted.num_accepted)
        return launch

    def _draft_step(
        self, capacity: Capacity, committed: tuple[Tensor, Paging], index: Tensor, bounds: dict[str, Any]
    ) -> Step:
        """The step that drafts, on all tokens or on a window of them."""
        if self._window is not None:
            committed = self._drafting.load(self._window.read(index, committed[0]), index)
            bounds = self._window.bounds(**bounds)
        return Step.draft_decode(capacity.topk, capacity.num_steps, *committed, **bounds)

    @torch.no_grad()
    def _draft_prefill(self, chunks: Sequence[Chunk], features: Tensor, first: Tensor) -> None:
        """Run the draft over chunks: after a prompt, it takes `first`."""
        step, rows = self._prefill_step(chunks), self._index([chunk.row for chunk in chunks])
        tokens = to_device([token for chunk in chunks for token in chunk.following], torch.int64, self.device)
        ends_prompt = to_device([chunk.ends_prompt for chunk in chunks], torch.bool, self.device)
        last = last_rows(step)
        tokens[last] = torch.where(ends_prompt, first, tokens[last])
        inputs = DraftPrefillInputs(tokens=tokens, features=features, positions=token_positions(step), last=last)
        keep(self._states, rows, self._run(self._first_drafts, step, self._with_embeddings(inputs, chunks)))


def last_rows(step: Step) -> Tensor:
    """[bs] int64: the last query row of each request of a packed step."""
    assert isinstance(step.query, PackedQuery)
    return step.query.cu_seqlens[1:].long() - 1
