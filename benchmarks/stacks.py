"""Stacks of attention layers with their projections, of published models' shapes, for the worker to run.

Norms, projections, rotation, store, attention and output projection of every layer, and nothing between: a layer's MLP
is what a cycle spends most of its time in, and would hide what is measured. Weights are random and all layers of a
stack share one set of them; each has a cache of its own. A small vocabulary keeps the output head out of the way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, KeyValues, Latents, PagedCache
from attn_backends.layer import AttentionLayer
from attn_backends_reference.models.attention import Attention
from attn_backends_reference.models.decoder import DraftModel, Family, MultimodalRows, PagedModel, TargetModel
from benchmarks.shapes import DTYPE

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes of a stack. query_rank: of MLA's projection of queries. nope, rope: of a head's query and key; grouped
    queries rotate all of it. rank: of a latent, 0 for grouped queries. value: of a head's value and output.
    """

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    nope: int
    rope: int
    value: int
    rank: int = 0
    query_rank: int = 0
    vocabulary: int = 4096

    @property
    def format(self) -> CacheFormat:
        """What its layers store."""
        return CacheFormat.LATENT if self.rank else CacheFormat.KV

    @property
    def layer(self) -> AttentionLayer:
        """Its first layer."""
        size = self.nope + self.rope
        entry = (self.rank + self.rope, self.rank) if self.rank else (size, self.value)
        return AttentionLayer(0, self.num_heads, self.num_kv_heads, *entry, size**-0.5)


def _deepseek_v3(num_heads: int) -> StackShape:
    sizes = {"nope": 128, "rope": 64, "value": 128, "rank": 512, "query_rank": 1536}
    return StackShape(f"DeepSeek-V3, {num_heads} heads", 7168, 61, num_heads, 1, **sizes)


SHAPES = (
    _deepseek_v3(16),
    _deepseek_v3(128),
    StackShape("Llama-3-70B", 8192, 80, 64, 8, nope=0, rope=128, value=128),
)


class Projected(nn.Module):
    """The weights of one attention layer, which all layers of a stack share."""

    def __init__(self, shape: StackShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape, self._dtype, self._device = shape, dtype, device
        heads, size = shape.num_heads, shape.nope + shape.rope
        if shape.rank:
            self.q_a = self._random(shape.query_rank, shape.hidden)
            self.q_b = self._random(heads * size, shape.query_rank)
            self.kv_a = self._random(shape.rank + shape.rope, shape.hidden)
            self.w_uk = self._random(heads, shape.nope, shape.rank)
            self.w_uv = self._random(heads, shape.value, shape.rank)
        else:
            kv_width = shape.num_kv_heads * (size + shape.value)
            self.qkv = self._random(heads * size + kv_width, shape.hidden)
        self.output = self._random(shape.hidden, heads * shape.value)

    def forward(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention, index: int) -> Tensor:
        """The residual stream [T, hidden] behind layer `index`. rotation: cosine and sine, [T, 1, rope] each."""
        normed = rms_norm(rows, rows.shape[-1:], eps=EPS)
        attend = self._latent if self.shape.rank else self._grouped
        return rows + linear(attend(normed, rotation, attention, index).flatten(1), self.output)

    def _latent(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention, index: int) -> Tensor:
        shape = self.shape
        compressed = rms_norm(linear(rows, self.q_a), (shape.query_rank,), eps=EPS)
        nope, rope = linear(compressed, self.q_b).unflatten(1, (shape.num_heads, -1)).split([shape.nope, shape.rope], 2)
        latent, key = linear(rows, self.kv_a).split([shape.rank, shape.rope], 1)
        q = torch.cat((torch.einsum("thn,hnr->thr", nope, self.w_uk), _rotated(rope, rotation)), -1)
        normed = rms_norm(latent, (shape.rank,), eps=EPS)
        stored = torch.cat((normed, _rotated(key.unsqueeze(1), rotation).squeeze(1)), -1)
        return torch.einsum("thr,hvr->thv", attention.attend(index, q, Latents(stored)), self.w_uv)

    def _grouped(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention, index: int) -> Tensor:
        shape, size = self.shape, self.shape.nope + self.shape.rope
        widths = [shape.num_heads * size, shape.num_kv_heads * size, shape.num_kv_heads * shape.value]
        q, k, v = linear(rows, self.qkv).split(widths, 1)
        q, k = (_rotated(x.unflatten(1, (-1, size)), rotation) for x in (q, k))
        return attention.attend(index, q, KeyValues(k, v.unflatten(1, (-1, shape.value))))

    def _random(self, *sizes: int) -> nn.Buffer:
        return nn.Buffer(torch.randn(sizes, dtype=self._dtype, device=self._device) * sizes[-1] ** -0.5)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x: [T, heads, rope], each half of which holds one part of the pairs."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _Angles:
    """Cosine and sine of every position up to a last one."""

    def __init__(self, rope: int, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = 10000.0 ** (-torch.arange(0, rope, 2, device=device) / rope)
        angles = torch.arange(num_positions, device=device).unsqueeze(1) * frequencies
        self.cos, self.sin = (x.repeat(1, 2).to(dtype).unsqueeze(1) for x in (angles.cos(), angles.sin()))

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 1, rope] each. positions: [T] int64."""
        return self.cos[positions], self.sin[positions]


class _Stack(PagedModel):
    """What target and draft share. Its caches are made once, so that workers which take turns have one set of them."""

    def __init__(self, shape: StackShape, num_positions: int, embedding: nn.Embedding, head: nn.Linear) -> None:
        layers = tuple(replace(shape.layer, id=index) for index in range(shape.num_layers))
        family = Family(shape.name, shape.name, shape.format, lambda *_: layers, TargetModel, DraftModel)  # type: ignore[arg-type]
        sizes = {"vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "max_position_embeddings": num_positions}
        PagedModel.__init__(self, family, SimpleNamespace(**sizes), (), embedding, head)
        self.feature_size = shape.hidden
        self._weights = Projected(shape, self.dtype, self.device)
        self._angles = _Angles(shape.rope, num_positions, self.dtype, self.device)
        self._caches: list[PagedCache] = []

    def allocate_caches(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> list[PagedCache]:
        """Those of the first call."""
        if not self._caches:
            self._caches += PagedModel.allocate_caches(self, backend, dtype)
        return self._caches

    def _run(self, rows: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        rotation = self._angles.of(positions)
        for index in range(len(self.layers)):
            rows = self._weights(rows, rotation, attention, index)
        return rms_norm(rows, rows.shape[-1:], eps=EPS)


class StackTarget(_Stack, TargetModel):
    """A stack as a target. num_positions: tokens of a request, drafted ones included."""

    def __init__(self, shape: StackShape, num_positions: int, device: torch.device) -> None:
        embedding = nn.Embedding(shape.vocabulary, shape.hidden, dtype=DTYPE, device=device)
        head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, dtype=DTYPE, device=device)
        super().__init__(shape, num_positions, embedding.requires_grad_(False), head.requires_grad_(False))

    def forward_features(
        self, tokens: Tensor, positions: Tensor, attention: Attention, multimodal: MultimodalRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `TargetModel`; features are the hidden states."""
        hidden = self._run(self.embed(tokens, multimodal), positions, attention)
        return hidden, hidden


class StackDraft(_Stack, DraftModel):
    """One layer of a stack as its draft, after a projection of embeddings and hidden states."""

    def __init__(self, shape: StackShape, target: StackTarget) -> None:
        super().__init__(replace(shape, num_layers=1), target.max_positions, target.embedding, target.head)
        self._fuse = nn.Linear(2 * shape.hidden, shape.hidden, bias=False, dtype=self.dtype, device=self.device)
        self._fuse.requires_grad_(False)
        self.target_hidden_size = shape.hidden

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: Attention,
        multimodal: MultimodalRows | None = None,
    ) -> Tensor:
        """See `DraftModel`."""
        return self._run(self._fuse(torch.cat((self.embed(tokens, multimodal), hidden), -1)), positions, attention)


def stack(shape: StackShape, num_positions: int, device: torch.device) -> tuple[StackTarget, StackDraft]:
    """A target and its draft, the same for the same arguments on the same device."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        target = StackTarget(shape, num_positions, device)
        return target, StackDraft(shape, target)


def shapes_of(formats: Collection[object]) -> list[StackShape]:
    """The stacks whose caches a backend takes."""
    return [shape for shape in SHAPES if shape.format in formats]
