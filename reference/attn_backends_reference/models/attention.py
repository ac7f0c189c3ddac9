"""The attention of one forward of one model, as the value that travels through the model's arguments (rule R7).

`ForwardAttention` attends at once; what it launches is part of a graph that captures it. `PiecewiseAttention` stays out
of the graph: it ends a piece of it, and attends between the pieces of every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import PagedCache
from attn_backends.layer import AttentionLayer
from attn_backends.planning.metadata import ForwardMetadata
from attn_backends_reference.pieces import PiecewiseGraph

Rows = TypeVar("Rows")


class Attention(Protocol):
    """The interface that a model's attention layers call."""

    def store(self, layer_index: int, inputs: Any) -> None:
        """Store this forward's rows in the layer's cache, and attend to nothing. inputs: as of `attend`."""

    def attend(self, layer_index: int, q: Tensor, inputs: Any, *further: Any) -> Tensor:
        """Store this forward's rows in the layer's cache, then attend.

        q: [num_tokens, num_heads, head_dim]. inputs: of the same rows, as the backend's cache takes them. further: what
        else its `forward` takes of these rows. Returns [num_tokens, num_heads, v_head_dim] in q's dtype. Raises
        `UnsupportedStepError` if the backend can't take the layer.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ForwardAttention:
    """Everything that the attention layers of one forward need.

    caches, layers: one per attention layer of the model, in order. meta: of this forward, `Metadata.at(i)`.
    """

    backend: AttentionBackend
    caches: Sequence[PagedCache]
    meta: ForwardMetadata
    layers: Sequence[AttentionLayer]

    def store(self, layer_index: int, inputs: Any) -> None:
        """See `Attention`."""
        self.backend.store(inputs, self.caches[layer_index], self.meta, self.layers[layer_index])

    def attend(self, layer_index: int, q: Tensor, inputs: Any, *further: Any) -> Tensor:
        """See `Attention`."""
        self.store(layer_index, inputs)
        return self.backend.forward(q, self.caches[layer_index], self.meta, self.layers[layer_index], *further).out


@dataclass(frozen=True, slots=True, eq=False)
class PiecewiseAttention:
    """The attention of a forward that is captured piecewise, each replay with the metadata of its own step.

    A replay's rows may be fewer than the captured ones: the others are padding, which neither stores nor attends. Their
    outputs are zeros.
    """

    backend: AttentionBackend
    caches: Sequence[PagedCache]
    graph: PiecewiseGraph[ForwardMetadata]
    layers: Sequence[AttentionLayer]

    def store(self, layer_index: int, inputs: Any) -> None:
        """See `Attention`."""

        def store_now(meta: ForwardMetadata) -> None:
            attention = ForwardAttention(self.backend, self.caches, meta, self.layers)
            attention.store(layer_index, first_rows(inputs, meta.write_slots.shape[0]))

        self.graph.cut(store_now)

    def attend(self, layer_index: int, q: Tensor, inputs: Any, *further: Any) -> Tensor:
        """See `Attention`. The capture itself attends to nothing."""
        out = q.new_zeros(q.shape[0], q.shape[1], self.layers[layer_index].v_head_dim)

        def attend_now(meta: ForwardMetadata) -> None:
            num_tokens = meta.write_slots.shape[0]
            attention = ForwardAttention(self.backend, self.caches, meta, self.layers)
            rows = [first_rows(value, num_tokens) for value in (q, inputs, *further)]
            out[:num_tokens].copy_(attention.attend(layer_index, *rows))

        self.graph.cut(attend_now)
        return out


def first_rows(value: Rows, num_tokens: int) -> Rows:
    """The first rows of a tensor, or of every tensor in a dataclass; None stays None."""
    made: Any = value
    if isinstance(value, Tensor):
        made = value[:num_tokens]
    elif is_dataclass(value) and not isinstance(value, type):
        made = type(value)(*(first_rows(getattr(value, field.name), num_tokens) for field in fields(value)))
    return made
