"""The attention of one forward of one model, as the value that travels through the model's arguments (rule R7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attn_backends.base import AttentionBackend
from attn_backends.cache import CacheInputs, PagedCache
from attn_backends.layer import AttentionLayer
from attn_backends.metadata import ForwardMetadata


@dataclass(frozen=True, slots=True, eq=False)
class ForwardAttention:
    """Everything that the attention layers of one forward need.

    caches, layers: one per attention layer of the model, in order. meta: of this forward, `Metadata.at(i)`.
    """

    backend: AttentionBackend
    caches: Sequence[PagedCache]
    meta: ForwardMetadata
    layers: Sequence[AttentionLayer]

    def attend(self, layer_index: int, q: Tensor, inputs: CacheInputs) -> Tensor:
        """Store this forward's rows in the layer's cache, then attend.

        q: [num_tokens, num_heads, head_dim]. inputs: of the same rows. Returns [num_tokens, num_heads, v_head_dim] in
        q's dtype. Raises `UnsupportedStepError` if the backend can't take the layer.
        """
        layer, cache = self.layers[layer_index], self.caches[layer_index]
        self.backend.store(inputs, cache, self.meta, layer)
        return self.backend.forward(q, cache, self.meta, layer).out
