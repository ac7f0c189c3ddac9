"""A model's inputs to one forward of a scene."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.cache import CacheInputs, KeyValues, Latents


@dataclass(frozen=True)
class ForwardInputs:
    """A model's inputs to one forward."""

    q: Tensor
    stored: CacheInputs
    ancestors: Tensor | None

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        stored = [self.stored.latent] if isinstance(self.stored, Latents) else [self.stored.k, self.stored.v]
        return [self.q, *stored] + ([] if self.ancestors is None else [self.ancestors])

    def as_type(self, dtype: torch.dtype) -> ForwardInputs:
        """Queries and what is stored in another type."""
        if isinstance(self.stored, Latents):
            stored: CacheInputs = Latents(self.stored.latent.to(dtype))
        else:
            stored = KeyValues(self.stored.k.to(dtype), self.stored.v.to(dtype))
        return ForwardInputs(self.q.to(dtype), stored, self.ancestors)

    def take(self, rows: Tensor, requests: Tensor) -> ForwardInputs:
        """The inputs of some query rows, and the ancestors of some requests."""
        if isinstance(self.stored, Latents):
            stored: CacheInputs = Latents(self.stored.latent[rows])
        else:
            stored = KeyValues(self.stored.k[rows], self.stored.v[rows])
        return ForwardInputs(self.q[rows], stored, None if self.ancestors is None else self.ancestors[requests])


def strided(tensor: Tensor) -> Tensor:
    """The same values at stride 2, with others between them."""
    return torch.stack((tensor, tensor + 1), dim=1)[:, 0]
