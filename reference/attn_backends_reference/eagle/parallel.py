"""The reference worker of P-EAGLE (https://arxiv.org/abs/2602.01469): EAGLE-3's draft extend, which drafts all tokens
of the next cycle in its one forward.

Mask rows stand after those of accepted tokens, in the same causal step. With K drafted tokens a draft extend has 2 * K
rows per request: at most K + 1 accepted ones, and mask rows for the rest, of which K - 1 are read. They lie after the
committed tokens, where the next draft extend begins: it writes each of these positions before it reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import Metadata
from attn_backends.runner import Phase
from attn_backends_reference.eagle.chains import Chains, chain_verify_phase
from attn_backends_reference.eagle.draft_checks import check_drafts
from attn_backends_reference.eagle.launches import Launch, Timings
from attn_backends_reference.eagle.options import DEFAULTS, PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.phases import Accepted, Model, extend_phase
from attn_backends_reference.eagle.prefill_phases import DRAFT_PREFILL, MaskedPrefillInputs
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.worker import SpeculativeWorker, last_rows
from attn_backends_reference.models.decoder import TargetModel
from attn_backends_reference.pieces import Forward, PackedPhase
from spec_metadata import (
    CacheGeometry,
    Capacity,
    PackedQuery,
    Step,
    StepKind,
    UniformQuery,
    padding_step,
    token_positions,
)
from spec_metadata.upload import to_device

if TYPE_CHECKING:
    from attn_backends_reference.models.peagle import PEagleModel


class ParallelWorker(SpeculativeWorker):
    """P-EAGLE: a chain of any number of tokens, drafted in the draft extend and verified by the target in one forward.

    Raises `UnsupportedStepError` for another shape of drafting, for options that it does not have, and for a backend
    that can't take the draft extend, before anything is computed.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: PEagleModel,
        backends: PhaseBackends,
        capacity: Capacity,
        geometry: CacheGeometry,
        options: WorkerOptions = DEFAULTS,
    ) -> None:
        check_drafts(target, [draft])
        _check(draft, capacity, options)
        target = target.tapped(draft.feature_layers)
        super().__init__(target, backends, capacity, geometry, options)
        step = padding_step(capacity.bucket(StepKind.DRAFT_EXTEND, 1), self._paging(), capacity)
        if reasons := backends.draft_extend.unsupported_reasons(step):
            raise UnsupportedStepError(f"{backends.draft_extend.name} can't draft in a draft extend", reasons)
        self._check_lag({StepKind.TARGET_VERIFY: backends.verify, StepKind.DRAFT_EXTEND: backends.draft_extend})
        self.draft, self.draft_caches = draft, draft.allocate_caches(backends.prefill, options.cache_dtype)
        extending, filling = (
            Model(draft, self.draft_caches, each) for each in (backends.draft_extend, backends.prefill)
        )
        verifying = Model(target, self.target_caches, backends.verify)
        self._verify = self._runner(chain_verify_phase(verifying, capacity, self._sampling), backends.verify)
        self._extend = self._runner(masked_extend_phase(extending, capacity), backends.draft_extend)
        masks = capacity.max_bs * (capacity.num_steps - 1)
        self._first_chains = self._prefill_runner(masked_prefill_phase(filling, capacity), masks)
        self._chains = torch.zeros(
            capacity.max_bs + 1, capacity.num_draft_tokens, dtype=torch.int64, device=self.device
        )

    @torch.no_grad()
    def cycle(self, rows: Sequence[int], max_committed: Sequence[int]) -> Launch:
        """One cycle, which emits the accepted drafts and the target's own token after them."""
        timings, capacity, index = Timings(self.device), self.capacity, self._index(rows)
        committed, bounds = self._load(index), self._bounds(max_committed)
        verifying = Step.target_verify(capacity.num_draft_tokens, *committed, **bounds)
        accepted = self._run(self._verify, verifying, Chains(self._chains[index]))
        timings.mark("verify")
        extending = Step.draft_extend(UniformQuery(capacity.extend_width), *committed, **bounds)
        chains = self._run(self._extend, extending, accepted).tokens
        timings.mark("draft_extend")
        launch = Launch(accepted.tokens, accepted.num_accepted, timings)
        self._chains[index] = chains
        self._lens.index_add_(0, index, accepted.num_accepted)
        return launch

    @torch.no_grad()
    def _draft_prefill(self, chunks: Sequence[Chunk], features: Tensor, first: Tensor) -> None:
        """Run the draft over chunks, with mask rows after each: after a prompt, it takes `first`."""
        num_masks, index = self.capacity.num_steps - 1, self._index([chunk.row for chunk in chunks])
        step = self._masked_step(chunks, num_masks)
        tokens = [[*chunk.following, *[0] * num_masks] for chunk in chunks]
        is_mask = [[False] * len(chunk.tokens) + [True] * num_masks for chunk in chunks]
        masked = to_device(list(chain(*is_mask)), torch.bool, self.device)
        inputs = MaskedPrefillInputs(
            tokens=to_device(list(chain(*tokens)), torch.int64, self.device),
            features=features[(~masked).long().cumsum(0) - 1],
            positions=token_positions(step),
            last=last_rows(step),
            is_mask=masked,
        )
        ends_prompt = to_device([chunk.ends_prompt for chunk in chunks], torch.bool, self.device)
        own = inputs.last - num_masks
        inputs.tokens[own] = torch.where(ends_prompt, first, inputs.tokens[own])
        self._chains[index] = self._run(self._first_chains, step, inputs).tokens

    def _masked_step(self, chunks: Sequence[Chunk], num_masks: int) -> Step:
        """The rows of chunks and the mask rows after each."""
        starts = [chunk.start for chunk in chunks]
        query = PackedQuery.of([len(chunk.tokens) + num_masks for chunk in chunks], self.device)
        paging = self.slots.paging(self._index([chunk.row for chunk in chunks]))
        lens = to_device(starts, torch.int32, self.device)
        return Step.prefill(query, lens, paging, max_committed=max(starts), seq_lens_cpu=starts)


def masked_extend_phase(draft: Model[PEagleModel], capacity: Capacity) -> Phase[Accepted, Chains]:
    """The draft catches up over the accepted path, and proposes a token at its last row and at each mask row."""
    model, width, num_drafted = draft.model, capacity.extend_width, capacity.num_steps

    def region(meta: Metadata, accepted: Accepted) -> Chains:
        num_more = width - accepted.tokens.shape[1]
        tokens, features = pad(accepted.tokens, (0, num_more)), pad(accepted.hidden, (0, 0, 0, num_more))
        is_mask = torch.arange(width, device=model.device) >= accepted.num_accepted.unsqueeze(1)
        rows = tokens.flatten(), features.flatten(0, 1), is_mask.flatten()
        out = model.forward_masked(*rows, token_positions(meta.step), draft.attention(meta.at()))
        last = (accepted.num_accepted.long() - 1).clamp_min(0).unsqueeze(1)  # nothing is accepted in a padded request
        proposing = (last + torch.arange(num_drafted, device=model.device)).unsqueeze(2)
        out = out.unflatten(0, (-1, width)).gather(1, proposing.expand(-1, -1, model.hidden_size))
        return Chains(torch.cat((accepted.tokens[:, -1:], model.propose(out)), dim=1))

    uniform = extend_phase(draft, capacity)
    return Phase(uniform.name, region, uniform.safe_inputs, Chains, uniform.bucket)


def masked_prefill_phase(draft: Model[PEagleModel], capacity: Capacity) -> PackedPhase[MaskedPrefillInputs, Chains]:
    """The draft over rows of prompts and the mask rows after them."""
    model, device, num_drafted = draft.model, draft.model.device, capacity.num_steps

    def region(forward: Forward, given: MaskedPrefillInputs) -> Chains:
        rows = given.tokens, given.features, given.is_mask, given.positions
        out = model.forward_masked(*rows, draft.attention(forward))
        behind = torch.arange(1 - num_drafted, 1, device=device)
        proposing = (given.last.unsqueeze(1) + behind).clamp_min(0)  # a padded request has no rows
        root = given.tokens[proposing[:, :1]]
        return Chains(torch.cat((root, model.propose(out[proposing])), dim=1))

    def safe_inputs(num_tokens: int) -> MaskedPrefillInputs:
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        return MaskedPrefillInputs(
            tokens=ids,
            features=torch.zeros(num_tokens, model.feature_size, dtype=model.dtype, device=device),
            positions=ids.clone(),
            last=torch.zeros(capacity.max_bs, dtype=torch.int64, device=device),
            is_mask=ids.bool(),
        )

    return PackedPhase(DRAFT_PREFILL, region, safe_inputs, Chains, capacity.prefill_bucket)


def _check(draft: PEagleModel, capacity: Capacity, options: WorkerOptions) -> None:
    """Refuse what is not one chain of the accepted row and masks, or does not fit the draft."""
    num_steps, reasons = capacity.num_steps, list[str]()
    if (capacity.topk, capacity.num_draft_tokens) != (1, num_steps + 1):
        reasons.append(f"topk={capacity.topk}, num_draft_tokens={capacity.num_draft_tokens} (a mask row proposes one)")
    if (capacity.num_rerun, capacity.extend_width) != (0, 2 * num_steps):
        reasons.append(
            f"num_rerun={capacity.num_rerun}, num_extended={capacity.num_extended} (a draft extend has at most "
            f"{num_steps + 1} accepted rows and {num_steps - 1} masks after them, and runs none again)"
        )
    others = {
        "adaptive steps": options.adaptive is not None,
        "verifying by confidence": options.verifies_by_confidence,
        f"draft_window={options.draft_window}": options.draft_window is not None,
        f"draft_graphs={options.draft_graphs!r}": options.draft_graphs != "one",
        "prompts with embeddings": options.placeholder_token is not None,
    }
    reasons += [f"{name} (EagleWorker or MtpWorker has it)" for name, is_asked in others.items() if is_asked]
    shortest = min((layer.window for layer in draft.layers if layer.window is not None), default=num_steps)
    if shortest < num_steps:
        reasons.append(f"num_steps={num_steps} (a window of {shortest} ends before the row that the masks come after)")
    if reasons:
        nearest = f"Capacity(..., 1, {num_steps}, {num_steps + 1}, num_extended={2 * num_steps}), text, or EagleWorker"
        raise UnsupportedStepError("P-EAGLE", reasons, nearest)
