"""Chains of drafts between the phases of a cycle: what a draft proposes, and the phase that verifies them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_backends.planning.metadata import Metadata
from attn_backends.runner import PerRequest, Phase
from attn_backends_reference.eagle.phases import Accepted, Model, TreeFields, verify_phase
from attn_backends_reference.models.decoder import TargetModel
from spec_metadata import Capacity, DraftTree, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """tokens: [bs, K + 1] int64, the root and the drafts after it."""

    tokens: PerRequest

    @classmethod
    def empty(cls, bs: int, capacity: Capacity, device: torch.device) -> Chains:
        """Zeros."""
        return cls(torch.zeros(bs, capacity.num_draft_tokens, dtype=torch.int64, device=device))


def chain_verify_phase(
    target: Model[TargetModel], capacity: Capacity, sampling: SamplingParams
) -> Phase[Chains, Accepted]:
    """`verify_phase` of chains, which are trees of one shape."""
    known, device = verify_phase(target, capacity, sampling), target.model.device
    chains = Chains.empty(capacity.max_bs, capacity, device).tokens
    parents = (torch.arange(capacity.num_draft_tokens, device=device) - 1).clamp_min(0).expand_as(chains)
    shape = DraftTree.from_parents(chains, parents, capacity.num_steps)

    def region(meta: Metadata, given: Chains) -> Accepted:
        bs = len(given.tokens)
        return known.region(meta, TreeFields(given.tokens, shape.parents[:bs], shape.depths[:bs], shape.mask[:bs]))

    return Phase(known.name, region, lambda bs: Chains.empty(bs, capacity, device), known.output, known.bucket)
