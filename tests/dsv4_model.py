"""A tiny random DeepSeek-V4 of transformers whose attention stores and reads through our backend.

`CompressedAttention` takes the place of transformers' attention and keeps its projections, norms and rotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.compressed_cache import CompressedCache
from attn_backends.compressed_layer import CompressedInputs, CompressedLayer, Compressor, IndexQuery, Projections
from attn_backends.kernels.torch_compressed import rotate_tail
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata.plans.compressed import Compression

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


@dataclass(frozen=True)
class Sizes:
    """Of a tiny model. ratio: of the overlapping, indexed layers. long_ratio: of the others."""

    ratio: int = 4
    long_ratio: int = 8
    window: int = 8
    page_size: int = 16
    index_topk: int = 5
    head_dim: int = 32
    rope: int = 8
    num_heads: int = 4

    @property
    def backend(self) -> type[DSV4Backend]:
        """The backend for its ratios."""
        sparse = Compression(self.ratio, overlap=True, indexed=True)
        return DSV4Backend.of((sparse, Compression(self.long_ratio)), self.window)


SMALL = Sizes()
REAL = Sizes(ratio=4, long_ratio=128, window=128, page_size=256, index_topk=16)


def tiny_model(sizes: Sizes, seed: int = 0) -> DeepseekV4ForCausalLM:
    """Random weights, sinks, norms and position biases; 16 index heads, with fewer of which scores tie at zero."""
    torch.manual_seed(seed)
    layer_types = [*KINDS, "compressed_sparse_attention"]
    config = DeepseekV4Config(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        qk_rope_head_dim=sizes.rope,
        q_lora_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=layer_types,
        compress_rates={
            "compressed_sparse_attention": sizes.ratio,
            "heavily_compressed_attention": sizes.long_ratio,
        },
        mlp_layer_types=["moe"] * 4,
        sliding_window=sizes.window,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,
        index_head_dim=2 * sizes.rope,
        index_topk=sizes.index_topk,
        hc_mult=2,
        max_position_embeddings=4096,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    model = DeepseekV4ForCausalLM(config).float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "position_bias")):
            parameter.normal_(0, 1.0)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() > 1:
            parameter.normal_(0, 0.15)
    return model


@dataclass(frozen=True, eq=False)
class CompressedForward:
    """Everything that the attention layers of one forward need."""

    backend: DSV4Backend
    caches: Sequence[CompressedCache]
    meta: ForwardMetadata
    layers: Sequence[CompressedLayer]

    def attend(self, index: int, q: Tensor, inputs: CompressedInputs, query: IndexQuery | None) -> Tensor:
        """Store this forward's rows in a layer's cache, then attend. q: [num_tokens, num_heads, head_dim]."""
        layer, cache = self.layers[index], self.caches[index]
        self.backend.store(inputs, cache, self.meta, layer)
        return self.backend.forward(q, cache, self.meta, layer, query).out


class CompressedAttention(nn.Module):
    """Takes the place of transformers' `DeepseekV4Attention`, `source`, with its weights."""

    def __init__(self, source: Any, compressions: Sequence[Compression]) -> None:
        super().__init__()
        self.source = source
        compressor = source.compressor
        self.inv_freq = inv_freq_of(source).to(source.sinks.device)
        indexer = getattr(compressor, "indexer", None)
        known = {compression.ratio: compression for compression in compressions}
        self.layer = CompressedLayer(
            id=source.layer_idx,
            num_heads=source.num_heads,
            num_kv_heads=1,
            head_dim=source.head_dim,
            v_head_dim=source.head_dim,
            scale=source.scaling,
            window=source.sliding_window,
            sinks=source.sinks.detach(),
            compression=None if compressor is None else known[compressor.compress_rate],
            compressor=None if compressor is None else self._compressor_of(compressor),
            indexer=None if indexer is None else self._compressor_of(indexer),
            index_topk=0 if indexer is None else indexer.index_topk,
        )

    def _compressor_of(self, compressor: Any) -> Compressor:
        norm = compressor.kv_norm
        return Compressor(compressor.position_bias.detach(), norm.weight.detach(), norm.variance_epsilon, self.inv_freq)

    def forward(
        self, hidden_states: Tensor, position_ids: Tensor, attention: CompressedForward, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, T, hidden]. position_ids: [1, T]."""
        source, x, positions = self.source, hidden_states.squeeze(0), position_ids.squeeze(0)
        latent = source.q_a_norm(source.q_a_proj(x))
        q = source.q_b_norm(source.q_b_proj(latent).unflatten(-1, (source.num_heads, -1)))
        q = rotate_tail(q, positions, self.inv_freq)
        rows = rotate_tail(source.kv_norm(source.kv_proj(x)), positions, self.inv_freq)
        compressor = source.compressor
        indexer = getattr(compressor, "indexer", None)
        inputs = CompressedInputs(rows, project(compressor, x), project(indexer, x))
        query = None if indexer is None else self._index_query(indexer, latent, x, positions)
        out = attention.attend(source.layer_idx, q, inputs, query)
        out = rotate_tail(out, positions, self.inv_freq, inverse=True)
        grouped = source.o_a_proj(out.reshape(1, x.shape[0], source.config.o_groups, -1)).flatten(2)
        return source.o_b_proj(grouped), None

    def _index_query(self, indexer: Any, latent: Tensor, x: Tensor, positions: Tensor) -> IndexQuery:
        q = rotate_tail(indexer.q_b_proj(latent).unflatten(-1, (indexer.num_heads, -1)), positions, self.inv_freq)
        scorer = indexer.scorer
        weights = scorer.weights_proj(x).float() * (scorer.weights_scaling * scorer.softmax_scale)
        return IndexQuery(q, weights)


def inv_freq_of(source: Any) -> Tensor:
    """Radians a token of each rotated pair of a layer's rows, entries and queries."""
    rotary = DeepseekV4RotaryEmbedding(source.config)
    assert getattr(rotary, f"{source.rope_layer_type}_attention_scaling") == 1.0
    return getattr(rotary, f"{source.rope_layer_type}_inv_freq")


def project(compressor: Any, x: Tensor) -> Projections | None:
    """What a compressor reads of a layer's input."""
    return None if compressor is None else Projections(compressor.kv_proj(x), compressor.gate_proj(x))
