"""DeepseekV4ForCausalLM and its MTP draft: a window of tokens and entries that stand for blocks of them.

transformers' modules hold the weights and compute everything but attention. What their compressors and indexers project
goes to the backend, which makes entries of it, keeps them and selects among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from attn_backends.compressed_cache import CompressedFormat
from attn_backends.compressed_layer import CompressedInputs, CompressedLayer, Compressor, IndexQuery, Projections
from attn_backends_reference.models.attention import Attention
from attn_backends_reference.models.decoder import Family, TargetModel
from attn_backends_reference.models.deepseek_v4_draft import MtpDraft
from spec_metadata.plans.compressed import Compression


class CompressedAttention(nn.Module):
    """Takes the place of transformers' `DeepseekV4Attention`, `source`, with its weights.

    layer: as the backend sees it.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source, self.compressor = source, source.compressor
        self.indexer = getattr(source.compressor, "indexer", None)
        indexed = self.indexer is not None
        self.layer = CompressedLayer(
            id=source.layer_idx,
            num_heads=source.num_heads,
            num_kv_heads=1,
            head_dim=source.head_dim,
            v_head_dim=source.head_dim,
            scale=source.scaling,
            window=source.sliding_window,
            # A layer refuses those of a float64 model, and FlashMLA takes float32 ones, which each launch would cast.
            sinks=source.sinks.detach().float(),
            compression=self.compressor
            and Compression(self.compressor.compress_rate, overlap=indexed, indexed=indexed),
            compressor=_parameters(self.compressor),
            indexer=_parameters(self.indexer),
            index_topk=getattr(self.indexer, "index_topk", 0),
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        attention: Attention,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, T, hidden]. position_embeddings: by kind, cosine and sine [1, T, rope / 2]."""
        source, x = self.source, hidden_states
        cos, sin = position_embeddings[source.rope_layer_type]
        latent = source.q_a_norm(source.q_a_proj(x))
        q = source.q_b_norm(source.q_b_proj(latent).unflatten(-1, (source.num_heads, -1)))
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2).squeeze(0)
        rows = apply_rotary_pos_emb(source.kv_norm(source.kv_proj(x)).unsqueeze(2), cos, sin, unsqueeze_dim=2)
        inputs = CompressedInputs(rows.flatten(0, 2), _projections(self.compressor, x), _projections(self.indexer, x))
        out = attention.attend(self.layer.id, q, inputs, self._index_query(latent, x, cos, sin))
        out = apply_rotary_pos_emb(out.unsqueeze(0), cos, -sin, unsqueeze_dim=2)
        grouped = source.o_a_proj(out.reshape(1, x.shape[1], source.config.o_groups, -1))
        return source.o_b_proj(grouped.flatten(2)), None

    def _index_query(self, latent: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> IndexQuery | None:
        if self.indexer is None:
            return None
        scorer = self.indexer.scorer
        q = self.indexer.q_b_proj(latent).unflatten(-1, (self.indexer.num_heads, -1))
        weights = scorer.weights_proj(x).float() * (scorer.weights_scaling * scorer.softmax_scale)
        return IndexQuery(apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2).squeeze(0), weights.squeeze(0))


def _parameters(compressor: Any) -> Compressor | None:
    """The parameters of a compressor or indexer."""
    if compressor is None:
        return None
    norm, inv_freq = compressor.kv_norm, compressor.rotary_emb.compress_inv_freq
    return Compressor(compressor.position_bias.detach(), norm.weight.detach(), norm.variance_epsilon, inv_freq)


def _projections(compressor: Any, x: Tensor) -> Projections | None:
    """What a compressor or indexer reads of a layer's input x, [1, T, hidden]."""
    if compressor is None:
        return None
    return Projections(compressor.kv_proj(x).squeeze(0), compressor.gate_proj(x).squeeze(0))


class CompressedTarget(TargetModel):
    """A DeepSeek-V4 target. Its residual is `hc_mult` streams, which the head before the final norm joins; its features
    after a layer are the streams side by side, [T, hc_mult * hidden_size].
    """

    def __init__(self, family: Family, model: PreTrainedModel) -> None:
        # transformers keeps norms and hyper-connections in float32, whose outputs its own projections then refuse
        for parameter in model.parameters():
            parameter.data = parameter.data.to(model.get_output_embeddings().weight.dtype)
        super().__init__(family, model)


def _attach(blocks: Iterable[Any], config: Any) -> tuple[CompressedLayer, ...]:
    layers = []
    for block in blocks:
        block.self_attn = attention = CompressedAttention(block.self_attn)
        layers.append(attention.layer)
    return tuple(layers)


DEEPSEEK_V4 = Family(
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForCausalLMMTP",
    CompressedFormat.COMPRESSED,
    _attach,
    CompressedTarget,
    MtpDraft,
    renamed=True,
)
