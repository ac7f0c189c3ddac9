"""Prefill as regions of device work over packed rows: the target's, EAGLE's draft, and the modules of multi-layer MTP.

Beside attention, a region takes all of its step from its inputs, so it can be captured piecewise at a number of tokens
and run for any step of fewer. Padded rows are after the real ones, and nothing real is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.runner import PerRequest, PerToken
from attn_backends_reference.eagle.chains import Chains
from attn_backends_reference.eagle.mtp_phases import Modules, Rows, chain, draft_over
from attn_backends_reference.eagle.phases import (
    DraftState,
    Model,
    NextTokens,
    best_drafts,
    next_tokens,
)
from attn_backends_reference.eagle.tables import kept
from attn_backends_reference.models.decoder import DraftModel, MultimodalRows, TargetModel
from attn_backends_reference.pieces import Forward, PackedPhase
from spec_metadata import Capacity, SamplingParams

PREFILL, DRAFT_PREFILL = "prefill", "draft_prefill"


@dataclass(frozen=True, slots=True, eq=False)
class PrefillInputs:
    """Rows of prompts. tokens, positions: [num_tokens] int64. last: [bs] int64, the last row of each request.
    table_rows: [bs] int64, where the worker's tables have what is kept of each.
    """

    tokens: PerToken
    positions: PerToken
    last: PerRequest
    table_rows: PerRequest

    @property
    def multimodal(self) -> MultimodalRows | None:
        """Rows that replace the tokens' embeddings: None, because prompts are text."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled(NextTokens):
    """The token after each request's rows, and what a draft takes of the target. features: [num_tokens, F]."""

    features: PerToken


@dataclass(frozen=True, slots=True, eq=False)
class DraftPrefillInputs:
    """tokens: [num_tokens] int64, the one after each row's. features: [num_tokens, F], the target's. positions, last:
    as in `PrefillInputs`.
    """

    tokens: PerToken
    features: PerToken
    positions: PerToken
    last: PerRequest

    @property
    def multimodal(self) -> MultimodalRows | None:
        """As of `PrefillInputs`."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class MaskedPrefillInputs(DraftPrefillInputs):
    """After each request's rows the mask rows, which end with its last row. is_mask: [num_tokens] bool."""

    is_mask: PerToken


@dataclass(frozen=True, slots=True, eq=False)
class ModulesPrefillInputs(Rows):
    """tokens: [bs, N + 2K] int64 of at most N rows per request, and root: [bs] int64, as in `Window`. hidden:
    [num_tokens, H], the target's.
    """

    tokens: PerRequest
    root: PerRequest
    hidden: PerToken

    def multimodal(self, k: int) -> MultimodalRows | None:
        """As of `PrefillInputs`, of the tokens that module k takes."""
        return None


def prefill_phase(
    target: Model[TargetModel], capacity: Capacity, sampling: SamplingParams
) -> PackedPhase[PrefillInputs, Prefilled]:
    """One target forward over rows of prompts, and its choice after the last of each. sampling: the table of how
    requests sample.
    """
    device = target.model.device

    def region(forward: Forward, given: PrefillInputs) -> Prefilled:
        attention = target.attention(forward)
        hidden, features = target.model.forward_features(given.tokens, given.positions, attention, given.multimodal)
        logits = target.model.logits(hidden[given.last])
        params = kept(sampling, given.table_rows)
        return Prefilled(next_tokens(logits, params, given.positions[given.last]), features)

    def safe_inputs(num_tokens: int) -> PrefillInputs:
        ids, last = _ids(num_tokens, device), _ids(capacity.max_bs, device)
        return PrefillInputs(tokens=ids, positions=ids.clone(), last=last, table_rows=last.clone())

    return PackedPhase(PREFILL, region, safe_inputs, Prefilled, capacity.prefill_bucket)


def draft_prefill_phase(draft: Model[DraftModel], capacity: Capacity) -> PackedPhase[DraftPrefillInputs, DraftState]:
    """The draft over rows of prompts: row p takes the target's features p and token p + 1. It scores depth 1 at the
    last row of each request.
    """
    model = draft.model

    def region(forward: Forward, given: DraftPrefillInputs) -> DraftState:
        attention = draft.attention(forward)
        rows = model.fuse(given.features)
        out = model.forward(given.tokens, rows, given.positions, attention, given.multimodal)
        hidden = out[given.last]
        log_probs, tokens = best_drafts(model, hidden, capacity.topk)
        return DraftState(root=given.tokens[given.last], tokens=tokens, log_probs=log_probs, hidden=hidden)

    def safe_inputs(num_tokens: int) -> DraftPrefillInputs:
        ids, last = _ids(num_tokens, model.device), _ids(capacity.max_bs, model.device)
        features = torch.zeros(num_tokens, model.feature_size, dtype=model.dtype, device=model.device)
        return DraftPrefillInputs(tokens=ids, features=features, positions=ids.clone(), last=last)

    return PackedPhase(DRAFT_PREFILL, region, safe_inputs, DraftState, capacity.prefill_bucket)


def modules_prefill_phase(modules: Modules, capacity: Capacity) -> PackedPhase[ModulesPrefillInputs, Chains]:
    """All modules over rows of prompts, each on what the one before made of them."""
    model, num_steps, bs = modules[0].model, capacity.num_steps, capacity.max_bs

    def region(forward: Forward, given: ModulesPrefillInputs) -> Chains:
        tokens, _ = draft_over(
            modules, forward, given, given.tokens, given.hidden, given.root, multimodal=given.multimodal
        )
        return Chains(chain(tokens, given.root, num_steps))

    def safe_inputs(num_tokens: int) -> ModulesPrefillInputs:
        of_rows, of_requests = _ids(num_tokens, model.device), _ids(bs, model.device)
        return ModulesPrefillInputs(
            positions=of_rows,
            request=of_rows.clone(),
            offset=of_rows.clone(),
            first=of_requests,
            last=of_requests.clone(),
            tokens=torch.zeros(bs, num_tokens + 2 * num_steps, dtype=torch.int64, device=model.device),
            root=of_requests.clone(),
            hidden=torch.zeros(num_tokens, model.hidden_size, dtype=model.dtype, device=model.device),
        )

    return PackedPhase(DRAFT_PREFILL, region, safe_inputs, Chains, capacity.prefill_bucket)


def _ids(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device=device)
