"""Runs of a head of `head_catalogue` for its tests: its target, its scores over a text, and what they must be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import Latents
from attn_backends.registry import get_backend
from attn_backends_reference.models import Attention, DraftModel, ForwardAttention, TargetModel
from spec_metadata import BlockTable, CacheGeometry, Capacity, PackedQuery, Step
from tests import reference_models as rm
from tests.eagle3_models import tiny_target
from tests.head_formats import Format
from tests.head_forward import HeadOracle, attend

BUDGET = 1e-4
"""Of logits: two orders of float32 sums. A key that is ignored moves them by 100 times as much."""
CLOSE = {"rtol": 1e-5, "atol": BUDGET}
"""How near scores are that differ in the order of their sums alone; processors differ in it, and scores reach 100."""
TEXT = rm.random_tokens((40,))[0]
"""Longer than the formats' windows and the original lengths of their rotary embeddings."""


def target_of(format: Format) -> TargetModel:
    """A random target as deep as a format's."""
    return rm.served_target("gqa", copy.deepcopy(tiny_target(format.num_layers)))


def oracle_of(format: Format, tensors: dict[str, Tensor]) -> HeadOracle:
    """The independent forward of a folder's tensors."""
    return HeadOracle(tiny_target(format.num_layers), format.facts, tensors, format.facts.get("taps", ()))


@torch.no_grad()
def log_probs(draft: DraftModel, features: Tensor, attention: Callable[[int, int], Attention]) -> Tensor:
    """Scores over the target's tokens of the rows of `TEXT`, prefilled, and of one that is drafted behind them.

    features: of `TEXT`. attention: of a forward over a request with so many committed tokens and so many more.
    """
    count = len(TEXT) - 1
    out = draft.forward(TEXT[1:], draft.fuse(features[:count]), torch.arange(count), attention(0, count))
    last = draft.forward(TEXT[:1], out[-1:], torch.tensor([count]), attention(count, 1))
    scores = draft.logits(torch.cat((out, last))).log_softmax(-1)
    ids = draft.target_ids(torch.arange(scores.shape[1]))
    return torch.full((len(scores), rm.VOCAB), float("-inf")).index_copy_(1, ids, scores)


def expected_log_probs(oracle: HeadOracle) -> Tensor:
    """What `log_probs` must give."""
    text, features = TEXT.tolist(), oracle.features(TEXT.tolist())
    rows = [oracle.log_probs(text[:end], [], features)[0] for end in range(2, len(text) + 1)]
    return torch.stack([*rows, oracle.log_probs(text, text[:1], features)[-1]])


def paged(draft: DraftModel) -> Callable[[int, int], Attention]:
    """Through a backend, over pages."""
    capacity = Capacity(1, len(TEXT) + 8, 4)
    geometry = CacheGeometry(1 + capacity.max_pages, 4)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    pages, caches = BlockTable(1 + torch.arange(capacity.max_pages)[None], geometry), draft.allocate_caches(backend)

    def of_forward(committed: int, count: int) -> Attention:
        step = Step.prefill(PackedQuery.of((count,)), torch.tensor([committed]), pages)
        return ForwardAttention(backend, caches, backend.init_forward_metadata(step).at(), draft.layers)

    return of_forward


@dataclass
class DenseAttention:
    """Over all rows that it has seen, under each layer's window; without a backend."""

    draft: DraftModel
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, committed: int, count: int) -> Attention:
        """Of a forward."""
        return self

    def attend(self, layer_index: int, q: Tensor, inputs: Any, *further: Any) -> Tensor:
        """See `Attention`."""
        layer = self.draft.layers[layer_index]
        if isinstance(inputs, Latents):
            k, v = inputs.latent[:, None], inputs.latent[:, None, : layer.v_head_dim]
        else:
            k, v = inputs.k, inputs.v
        for kept, rows in ((self.keys, k), (self.values, v)):
            shared = rows.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
            kept[layer_index] = torch.cat((kept[layer_index], shared)) if layer_index in kept else shared
        return attend(q, self.keys[layer_index], self.values[layer_index], layer.scale, layer.window)
