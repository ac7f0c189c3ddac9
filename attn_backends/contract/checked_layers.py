"""Layers that a backend has checked, so that each is checked once and not in every step."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from attn_backends.contract.kernel import LayerShape
from attn_backends.layer import AttentionLayer
from spec_metadata import StepKind


class Use(NamedTuple):
    """The use that a layer was checked for. dtype: of queries, or of rows to store. is_tree: whether drafted tokens are
    read by slot.
    """

    kind: StepKind
    dtype: torch.dtype
    is_tree: bool


class CheckedLayers:
    """Layers that were taken, by identity: for each use of one, the cache that it came with last. Layers and caches are
    frozen, and neither is kept alive.
    """

    def __init__(self) -> None:
        self._taken: WeakKeyDictionary[AttentionLayer, dict[Use, tuple[ref[object], LayerShape]]] = WeakKeyDictionary()

    def shape_of(self, layer: AttentionLayer, cache: object, use: Use) -> LayerShape | None:
        """The shape of a layer that was taken with this very cache; None of one that is to be checked."""
        taken = self._taken.get(layer)
        if taken is None or use not in taken:
            return None
        last, shape = taken[use]
        return shape if last() is cache else None

    def take(self, layer: AttentionLayer, cache: object, use: Use, shape: LayerShape) -> LayerShape:
        """Remember a layer that was checked; returns its shape."""
        self._taken.setdefault(layer, {})[use] = ref(cache), shape
        return shape
