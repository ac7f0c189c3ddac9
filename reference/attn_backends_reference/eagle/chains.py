"""Chains of drafts between the phases of a cycle: what a draft proposes, and what a verify takes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.runner import PerRequest
from attn_backends_reference.eagle.phases import TreeFields
from spec_metadata import Capacity, DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """tokens: [bs, K + 1] int64, the root and the drafts after it."""

    tokens: PerRequest


class ChainTrees:
    """Chains of a capacity as the trees that a verify takes."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        chains = torch.zeros(capacity.max_bs, capacity.num_draft_tokens, dtype=torch.int64, device=device)
        parents = (torch.arange(capacity.num_draft_tokens, device=device) - 1).clamp_min(0).expand_as(chains)
        self._shape = DraftTree.from_parents(chains, parents, capacity.num_steps)

    def of(self, chains: Tensor) -> TreeFields:
        """The trees of chains [bs, num_draft_tokens] int64."""
        bs, shape = len(chains), self._shape
        return TreeFields(chains, shape.parents[:bs], shape.depths[:bs], shape.mask[:bs])
