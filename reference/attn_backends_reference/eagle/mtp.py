"""The reference worker of multi-layer MTP: one module a drafted step, in place of EAGLE's one draft for all of them.

DeepSeek-V3's multi-token prediction (DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437, section 2.2). The row of
module k at position p takes the output of module k - 1 there (of the target for k = 0) and token p + k + 1, and
predicts token p + k + 2. Each has KV of its own, in the slots of the target. A cycle drafts in its draft extend: there
are no draft forwards. The last positions of the modules were fed drafted tokens and are run again; `docs/mtp.md`
derives what must be kept for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.runner import Phase, PhaseRunner
from attn_backends_reference.eagle.chains import Chains, chain_verify_phase
from attn_backends_reference.eagle.draft_checks import check_drafts
from attn_backends_reference.eagle.kept_embeddings import KeptEmbeddings
from attn_backends_reference.eagle.launches import Launch, Timings
from attn_backends_reference.eagle.mtp_phases import Rows, Window, WindowInputs, chain, module_phase, window_phase
from attn_backends_reference.eagle.options import DEFAULTS, PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.phases import Accepted, Model, by_name
from attn_backends_reference.eagle.pool import InputPool
from attn_backends_reference.eagle.prefill_phases import ModulesPrefillInputs, modules_prefill_phase
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.requests import DraftShape
from attn_backends_reference.eagle.worker import SpeculativeWorker
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from spec_metadata import (
    CacheGeometry,
    Capacity,
    CommittedState,
    Sampling,
    Step,
    StepKind,
    UniformQuery,
    padding_step,
)
from spec_metadata.upload import to_device

Inputs = TypeVar("Inputs")


class MtpWorker(SpeculativeWorker):
    """Multi-layer MTP: a chain of one drafted token a module, verified by the target in one forward.

    modules: at least num_steps, the first of which run. Raises `UnsupportedStepError` for a shape of drafting that MTP
    does not have, for too small a num_rerun, and for more positions than one of the models has, before anything is
    computed.
    """

    def __init__(
        self,
        target: TargetModel,
        modules: Sequence[DraftModel],
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        _check(target, modules, capacity)
        if options.verifies_by_confidence:
            reasons = ["modules keep no probabilities of what they draft"]
            raise UnsupportedStepError("multi-layer MTP that verifies by confidence", reasons, "EagleWorker")
        if options.draft_window is not None:
            reasons = [f"draft_window={options.draft_window} (modules run in a draft extend, which sees all tokens)"]
            raise UnsupportedStepError("multi-layer MTP", reasons, "EagleWorker")
        if options.adaptive is not None:
            reasons = ["adaptive steps (a module for each step, which all run)"]
            raise UnsupportedStepError("multi-layer MTP", reasons, "EagleWorker")
        super().__init__(target, backends, capacity, geometry, options)
        self._check_lag({StepKind.TARGET_VERIFY: backends.verify, StepKind.DRAFT_EXTEND: backends.draft_extend})
        self._check_window()
        self.modules = tuple(modules[: capacity.num_steps])
        self._module_caches = [module.allocate_caches(backends.prefill, options.cache_dtype) for module in self.modules]
        self.draft_caches = [cache for caches in self._module_caches for cache in caches]
        self.pool = InputPool(capacity, target.hidden_size, target.dtype, self.device)
        verifying = Model(target, self.target_caches, backends.verify)
        self._verify = self._runner(chain_verify_phase(verifying, capacity, self._sampling), backends.verify)
        self._again = CommittedState.of(self._paging(), capacity.max_bs)  # of windows, which begin before its lengths
        extending = self._models(backends.draft_extend)
        num_first = len(extending) if options.draft_graphs == "one" else 1
        further = [module_phase(extending[k], k, capacity) for k in range(num_first, len(extending))]
        phase = modules_prefill_phase(self._models(backends.prefill), capacity)
        self._first_chains = self._prefill_runner(phase, self._rows_again)
        self._kept = None if self.embedding_form is None else KeptEmbeddings(self.embedding_form, capacity)
        self._window = self._window_runner(window_phase(extending[:num_first], capacity))
        self._further = [self._window_runner(phase) for phase in further]
        self._chains = torch.zeros(
            capacity.max_bs + 1, capacity.num_draft_tokens, dtype=torch.int64, device=self.device
        )

    def admit(self, row: int, sampling: Sampling) -> None:
        """A request begins in a table row."""
        super().admit(row, sampling)
        if self._kept is not None:
            self._kept.forget(row)

    @torch.no_grad()
    def cycle(self, rows: Sequence[int], max_committed: Sequence[int]) -> Launch:
        """One cycle, which emits the accepted drafts and the target's own token after them."""
        timings, capacity, index = Timings(self.device), self.capacity, self._index(rows)
        lens, paging = self._load(index)
        verifying = Step.target_verify(capacity.num_draft_tokens, lens, paging, **self._bounds(max_committed))
        accepted = self._run(self._verify, verifying, Chains(self._chains[index]))
        timings.mark("verify")
        starts = [max(committed - capacity.num_rerun, 0) for committed in max_committed]
        again = self._again.load((lens - capacity.num_rerun).clamp_min(0), index)
        extending = Step.draft_extend(UniformQuery(capacity.extend_width), *again, **self._bounds(starts))
        window = self._run(self._window, extending, self._window_inputs(index, lens, accepted))
        for runner in self._further:
            window = self._run(runner, extending, window)
        chains = chain(window.tokens, window.root, capacity.num_steps)
        timings.mark("draft_extend")
        launch = Launch(accepted.tokens, accepted.num_accepted, timings)
        self._commit(index, lens, accepted, chains)
        return launch

    def _window_inputs(self, index: Tensor, lens: Tensor, accepted: Accepted) -> WindowInputs:
        """What was kept of requests, and what a verify returned."""
        num_rerun = self.capacity.num_rerun
        before = lens.long().unsqueeze(1) - num_rerun + torch.arange(num_rerun, device=self.device)
        kept_hidden, kept_tokens = self.pool.read(index.unsqueeze(1), before)
        inputs = WindowInputs(
            num_accepted=accepted.num_accepted,
            tokens=accepted.tokens,
            hidden=accepted.hidden,
            lens=lens,
            kept_hidden=kept_hidden,
            kept_tokens=kept_tokens,
        )
        return inputs if self._kept is None else self._kept.inputs(inputs, index)

    def _commit(self, index: Tensor, lens: Tensor, accepted: Accepted, chains: Tensor) -> None:
        """Take the results of a cycle, all of which has run: one that failed is tried again on what it had read.

        accepted: the verify's result, whose memory is its own: a graph's buffers hold it only if the graph ran.
        """
        ends, offsets = lens + accepted.num_accepted, torch.arange(len(index), device=self.device) * self.max_accepted
        self.pool.keep(index, lens, ends, accepted.hidden.flatten(0, 1), accepted.tokens.flatten(), offsets)
        self._chains[index] = chains
        self._lens[index] = ends

    @torch.no_grad()
    def _draft_prefill(self, chunks: Sequence[Chunk], features: Tensor, first: Tensor) -> None:
        """Run the modules over chunks, each begun earlier by the positions that took tokens not known before.

        All of a prompt is known, so there are some only where the chunk before ended within its last K tokens.
        """
        num_steps, index = self.capacity.num_steps, self._index([chunk.row for chunk in chunks])
        begun = [replace(chunk, start=max(min(chunk.start, len(chunk.prompt) - num_steps), 0)) for chunk in chunks]
        step = self._prefill_step(begun)
        given = Rows.of(step)
        if begun != list(chunks):
            features = self._with_kept(chunks, features, index[given.request], given.request, given.positions)
        tokens, root = self._prompt_tokens(begun, first)
        inputs = ModulesPrefillInputs(**by_name(given), tokens=tokens, root=root, hidden=features)
        chains = self._run(self._first_chains, step, self._with_embeddings(inputs, begun)).tokens
        ends = step.seq_lens + given.last - given.first + 1
        self.pool.keep(index, step.seq_lens, ends, features, tokens[given.request, given.offset], given.first)
        if self._kept is not None:
            self._kept.keep(chunks)
        self._chains[index] = chains

    def _with_kept(
        self, chunks: Sequence[Chunk], hidden: Tensor, rows: Tensor, request: Tensor, positions: Tensor
    ) -> Tensor:
        """[num_tokens, H]: the target's hidden states of chunks begun earlier, kept ones before those of its own step.

        hidden: of the chunks as they are. rows, request, positions: [num_tokens] int64, of the states asked for.
        """
        starts = to_device([chunk.start for chunk in chunks], torch.int64, self.device)[request]
        offsets = [0, *accumulate(len(chunk.tokens) for chunk in chunks[:-1])]
        of_step = to_device(offsets, torch.int64, self.device)[request] + positions - starts
        before, _ = self.pool.read(rows, positions)
        return torch.where((positions < starts).unsqueeze(1), before, hidden[of_step.clamp_min(0)])

    def _prompt_tokens(self, chunks: Sequence[Chunk], first: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens after each position of chunks and the index of the root, as in `Window`.

        first: [bs] int64, the token after each prompt. Of a chunk that does not end its prompt it means nothing: it
        and its drafts go behind everything that is read.
        """
        num_steps = self.capacity.num_steps
        longest = max(len(chunk.tokens) for chunk in chunks)
        num_read = longest + num_steps - 1
        known = [list(chunk.prompt[chunk.start + 1 : chunk.start + 1 + num_read]) for chunk in chunks]
        padded = [token for row in known for token in row + [0] * (num_read + num_steps + 1 - len(row))]
        tokens = to_device(padded, torch.int64, self.device).view(len(chunks), -1)
        root = self._index([len(chunk.tokens) - 1 if chunk.ends_prompt else num_read for chunk in chunks])
        width_of_graphs = max(self.options.prefill_sizes(self._rows_again), default=0)
        tokens = torch.nn.functional.pad(tokens, (0, max(width_of_graphs - longest, 0)))
        return tokens.scatter(1, root.unsqueeze(1), first.unsqueeze(1)), root

    @property
    def _rows_again(self) -> int:
        """Rows that modules run again, at most: a last chunk of one token begins num_steps - 1 before it."""
        return self.capacity.max_bs * (self.capacity.num_steps - 1)

    def _window_runner(self, phase: Phase[Inputs, Window]) -> PhaseRunner[Inputs, Window]:
        if self._kept is not None:
            phase = self._kept.phase(phase)
        return self._runner(phase, self.backends.draft_extend, state=self._again)

    def _models(self, backend: AttentionBackend) -> list[Model[DraftModel]]:
        """The modules on the backend of a phase."""
        return [Model(*both, backend) for both in zip(self.modules, self._module_caches, strict=True)]

    def _check_window(self) -> None:
        """Refuse a backend that can't take a window, before a verify needs it."""
        paging = self.slots.paging(self._index([]))
        step = padding_step(self.capacity.bucket(StepKind.DRAFT_EXTEND, 1), paging, self.capacity)
        backend = self.backends.draft_extend
        reasons = backend.unsupported_reasons(step)
        if reasons:
            rerun = f"{self.max_accepted} rows and the {self.capacity.num_rerun} that run again"
            raise UnsupportedStepError(f"{backend.name} can't take MTP's draft extend, {rerun}", reasons)


def _check(target: TargetModel, modules: Sequence[DraftModel], capacity: Capacity) -> None:
    """Refuse what is not multi-layer MTP, or does not fit these models."""
    num_steps = capacity.num_steps
    check_drafts(target, modules[:num_steps])
    reasons = list[str]()
    if capacity.topk != 1:
        reasons.append(f"topk={capacity.topk} (a module proposes one token: topk=1)")
    if num_steps > len(modules):
        reasons.append(f"num_steps={num_steps} (each step takes a module, and there are {len(modules)})")
    tapping = next((module for module in modules[:num_steps] if module.feature_layers), None)
    if tapping is not None:
        reasons.append(
            f"a draft of the target's states after its layers {list(tapping.feature_layers)}, as EAGLE-3's (an MTP "
            "module takes the one after the final norm)"
        )
    if capacity.num_draft_tokens != num_steps + 1:
        reasons.append(f"num_draft_tokens={capacity.num_draft_tokens} (a chain of {num_steps} has {num_steps + 1})")
    if capacity.num_rerun < num_steps - 1:
        reasons.append(
            f"num_rerun={capacity.num_rerun} (the last {num_steps - 1} positions were fed drafted tokens and run again)"
        )
    longest = capacity.max_context + capacity.draft_room
    limits = {"the target": target.max_positions}
    limits |= {f"module {index}": module.max_positions for index, module in enumerate(modules[:num_steps])}
    shortest = min(limits, key=lambda name: limits[name])
    if longest > limits[shortest]:
        reasons.append(
            f"max_context={capacity.max_context} and {capacity.draft_room} drafted tokens, {longest} positions "
            f"({shortest} has {limits[shortest]})"
        )
    if reasons:
        num_most = min(num_steps, len(modules))
        nearest = (
            f"Capacity(..., topk=1, num_steps={num_most}, num_draft_tokens={num_most + 1}, num_rerun={num_most - 1}), "
            "or EagleWorker with one module for all steps"
        )
        raise UnsupportedStepError(f"multi-layer MTP with {DraftShape.of(capacity)}", reasons, nearest)
