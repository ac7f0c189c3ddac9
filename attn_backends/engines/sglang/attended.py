"""One attention call of SGLang, on metadata that was planned before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_backends.adapters.batch import with_rows
from attn_backends.backend import AttentionBackend
from attn_backends.engines.sglang.layers import Layers, check_extras
from attn_backends.planning.metadata import ForwardMetadata


class Attended:
    """Attention of SGLang's layers on a backend. parts: the metadata of a batch, one or several, whose rows follow one
    another. SGLang pads batches for data parallelism after the real rows: these are neither stored nor attended, and
    their outputs are zero.
    """

    def __init__(self, backend: AttentionBackend, layers: Layers) -> None:
        self.backend, self.layers = backend, layers
        self.parts: Sequence[ForwardMetadata] = ()

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, stores: bool, extras: Any) -> Tensor:
        """[rows, heads * v_head_dim] of a RadixAttention's queries, which it stores the keys and values of first."""
        assert self.parts, "SGLang plans a batch before it runs it"
        check_extras(layer, extras)
        given, cache = self.layers.of(layer, extras.get("sinks"))
        queries, found = self.layers.queries(q, layer, extras), []
        for rows, meta in with_rows(self.parts):
            if stores and k is not None and v is not None:
                self.backend.store(self.layers.entries(k, v, layer, extras, rows), cache, meta, given)
            found.append(self.backend.forward(queries[rows], cache, meta, given).out)
        if num_padded := queries.shape[0] - rows.stop:
            found.append(found[0].new_zeros(num_padded, *found[0].shape[1:]))
        return (torch.cat(found) if len(found) > 1 else found[0]).reshape(queries.shape[0], -1)
