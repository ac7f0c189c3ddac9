"""One attention call of SGLang, on metadata that was planned before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.engines.sglang.layers import Layers, check_extras
from attn_backends.planning.metadata import ForwardMetadata


class Attended:
    """What attends. SGLang pads batches for data parallelism after the real rows: these are neither stored nor
    attended, and their outputs are zero.
    """

    def __init__(self, backend: AttentionBackend, layers: Layers) -> None:
        self.backend, self.layers = backend, layers
        self.meta: ForwardMetadata | None = None

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, stores: bool, extras: Any) -> Tensor:
        """[rows, heads * v_head_dim] of a RadixAttention's queries, which it stores the keys and values of first."""
        assert self.meta is not None, "SGLang plans a batch before it runs it"
        check_extras(layer, extras)
        given, cache = self.layers.of(layer, extras.get("sinks"))
        queries, rows = self.layers.queries(q, layer, extras), self.meta.write_slots.shape[0]
        if stores and k is not None and v is not None:
            self.backend.store(self.layers.entries(k, v, layer, extras, rows), cache, self.meta, given)
        out = self.backend.forward(queries[:rows], cache, self.meta, given).out
        padding = out.new_zeros(queries.shape[0] - rows, *out.shape[1:])
        return (torch.cat((out, padding)) if len(padding) else out).reshape(queries.shape[0], -1)
