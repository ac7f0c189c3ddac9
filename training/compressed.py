"""DeepSeek-V4's attention for training and evaluation, dense: a band of keys, compressed entries, one softmax.

transformers' own forward builds a full score matrix and loops over experts. Here the sliding window is a band of
blocks, all experts run on every token, and what a query sees is decided by a plan, as in ``training.attention``:
whole windows, the draft's unrolled training steps, or a chain of nodes behind a recorded prefix.

Shapes: queries ``[B, T, h, D]``; keys, which are also the values, ``[B, T, D]`` for all heads; entries ``[B, n, D]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer, apply_rotary_pos_emb

BLOCK = 128


class Plan(Protocol):
    """Decides what the queries of one forward pass see."""

    def attend(self, module: Any, x: Tensor, residual: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Returns ``[B, T, h, D]`` of the attention layer ``module`` with normed input ``x`` ``[B, T, H]``."""

    def routed(self, scores: Tensor, chosen: Tensor) -> None:
        """Sees a router's scores and its choice, ``[B, T, experts]`` each."""


class Layer(DeepseekV4DecoderLayer):
    """transformers' layer with the training forward; ``adopt`` turns layers into it."""

    def forward(self, streams: Tensor, position_embeddings: dict[str, Any], plan: Plan, **_: Any) -> Tensor:
        """``streams`` and the result are ``[B, T, hc_mult, H]``."""
        post, comb, x = collapse(self.attn_hc, self.input_layernorm, streams)
        out = attention(self.self_attn, x, position_embeddings, plan)
        streams = spread(streams, post, comb, out)
        post, comb, x = collapse(self.ffn_hc, self.post_attention_layernorm, streams)
        out, scores, chosen = mixture(self.mlp, x)
        plan.routed(scores, chosen)
        return spread(streams, post, comb, out)


@contextmanager
def compiled_parts() -> Iterator[None]:
    """Inside, what the layers share is compiled, each part once: compiling a whole model takes minutes."""
    torch._dynamo.config.recompile_limit = 32
    parts = (collapse, spread, mixture, queries, outputs, pool, band)
    for part in parts:
        globals()[part.__name__] = torch.compile(part, dynamic=False)
    try:
        yield
    finally:
        for part in parts:
            globals()[part.__name__] = part


def adopt(layers: Iterable[nn.Module]) -> None:
    """Gives transformers' DeepSeek-V4 layers the training forward; weights and their names stay."""
    for layer in layers:
        layer.__class__ = Layer


def collapse(connection: Any, norm: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A hyper-connection's weights and the normed input of its sublayer."""
    post, comb, x = connection(streams)
    return post, comb, norm(x)


def spread(streams: Tensor, post: Tensor, comb: Tensor, out: Tensor) -> Tensor:
    """The residual streams after a sublayer's output ``out``."""
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(3)).sum(2)
    return (post.unsqueeze(-1) * out.unsqueeze(2) + mixed).to(streams.dtype)


def mixture(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The routed and shared experts' output, the router's scores and its choice; every expert runs on every token."""
    gate, experts = mlp.gate, mlp.experts
    scores = gate.score_fn(F.linear(x, gate.weight).float())
    index = (scores + gate.e_score_correction_bias).topk(gate.top_k, dim=-1).indices
    chosen = torch.zeros_like(scores).scatter(-1, index, 1.0)
    weights = scores * chosen
    weights = weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor
    up = F.linear(x, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (experts.num_experts, -1))
    inner = experts._apply_gate(up) * weights.unsqueeze(-1).to(x.dtype)
    down = experts.down_proj.transpose(0, 1).flatten(1)
    return F.linear(inner.flatten(2), down) + mlp.shared_experts(x), scores, chosen


def attention(module: Any, x: Tensor, angles: dict[str, Any], plan: Plan) -> Tensor:
    """The attention layer ``module`` on its normed input ``x`` ``[B, T, H]``."""
    cos, sin = angles[module.rope_layer_type]
    residual, q, kv = queries(module, x, cos, sin)
    return outputs(module, plan.attend(module, x, residual, q, kv), cos, sin)


def queries(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The latents that queries are made of, queries and keys."""
    residual = module.q_a_norm(module.q_a_proj(x))
    q = module.q_b_norm(module.q_b_proj(residual).unflatten(-1, (module.num_heads, -1)))
    q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
    kv = module.kv_norm(module.kv_proj(x)).unsqueeze(2)
    kv = apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2).squeeze(2)
    return residual, q, kv.to(q.dtype)  # autocast leaves norms in float32


def outputs(module: Any, out: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer's output ``[B, T, H]`` of what its heads read ``[B, T, h, D]``."""
    out = apply_rotary_pos_emb(out, cos, -sin, unsqueeze_dim=2)
    grouped = out.reshape(*out.shape[:2], module.config.o_groups, -1)
    return module.o_b_proj(module.o_a_proj(grouped).flatten(2))


def pool(compressor: Any, kv: Tensor, gate: Tensor, first: Tensor) -> Tensor:
    """Entries ``[B, n, D]`` of ``n`` blocks.

    Args:
        compressor: transformers' compressor or indexer.
        kv, gate: ``[B, n, slots, D]``, what each entry is pooled from; the gates with the position bias.
        first: ``[B or 1, n]``, the position of each block's first token.
    """
    mixed = (kv * gate.float().softmax(2).to(kv.dtype)).sum(2)
    entries = compressor.kv_norm(mixed).to(kv.dtype)
    cos, sin = compressor.rotary_emb(entries, position_ids=first, layer_type="compress")
    return apply_rotary_pos_emb(entries.unsqueeze(2), cos, sin, unsqueeze_dim=2).squeeze(2)


def slots(compressor: Any, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts projections ``[B, T, C]`` into the slots of each complete block, for ``pool``."""
    ratio, width = compressor.compress_rate, compressor.head_dim
    blocks = kv.shape[1] // ratio
    kv, gate = (x[:, : blocks * ratio].unflatten(1, (blocks, ratio)) for x in (kv, gate))
    gate = gate + compressor.position_bias
    if kv.shape[-1] == width:
        return kv, gate
    before = [F.pad(x[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=v) for x, v in ((kv, 0.0), (gate, -torch.inf))]
    return torch.cat((before[0], kv[..., width:]), 2), torch.cat((before[1], gate[..., width:]), 2)


def entries_of(compressor: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All complete blocks' entries of layer inputs ``x`` ``[B, T, H]``, and the projections that they came from."""
    kv, gate = compressor.kv_proj(x), compressor.gate_proj(x)
    ratio = compressor.compress_rate
    first = torch.arange(x.shape[1] // ratio, device=x.device)[None] * ratio
    return pool(compressor, *slots(compressor, kv, gate), first), kv, gate


def index_scores(indexer: Any, x: Tensor, residual: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """How much queries want entries, ``[B, T, n]``. ``keys`` ``[B, n, d]``; ``positions`` ``[B or 1, T]``."""
    q = indexer.q_b_proj(residual).unflatten(-1, (indexer.num_heads, -1))
    cos, sin = indexer.rotary_emb(x, position_ids=positions, layer_type="compress")
    q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2).to(keys.dtype)
    dots = (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3])
    scorer = indexer.scorer
    weights = scorer.weights_proj(x).float() * scorer.weights_scaling
    return ((dots.float().relu() * scorer.softmax_scale) * weights.unsqueeze(-1)).sum(2)


def closed_blocks(positions: Tensor, blocks: int, ratio: int) -> Tensor:
    """``[B or 1, T, blocks]`` bool: the blocks that a query at each position sees."""
    return torch.arange(blocks, device=positions.device) < ((positions + 1) // ratio).unsqueeze(-1)


def best(scores: Tensor, closed: Tensor, topk: int) -> Tensor:
    """``[B, T, n]`` bool: the ``topk`` highest scores among the closed blocks."""
    scores = scores.masked_fill(~closed, -torch.inf)
    if scores.shape[-1] <= topk:
        return closed
    found = scores.topk(topk, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, found, True) & closed


def band(
    q: Tensor,
    kv: Tensor,
    window: int,
    sinks: Tensor,
    entries: Tensor | None = None,
    visible: Tensor | None = None,
    own: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None]:
    """One softmax over a sliding window, entries, single keys of each row and the sinks.

    Args:
        q: ``[B, T, h, D]``.
        kv: ``[B, T, D]``; row ``i`` sees ``i - window + 1`` to ``i``.
        window: at most ``BLOCK``.
        sinks: ``[h]``.
        entries, visible: ``[B, n, D]`` and ``[B or 1, T, n]``.
        own: each ``[B, T, D]``; row ``i`` sees row ``i`` of each.

    Returns:
        ``[B, T, h, D]``, and the entries' weights ``[B, T, h, n]`` if there are entries.
    """
    length, heads, width = q.shape[1:]
    q = q * width**-0.5
    blocks = -(-length // BLOCK)
    rows = F.pad(q, (0, 0, 0, 0, 0, blocks * BLOCK - length)).unflatten(1, (blocks, BLOCK)).flatten(2, 3)
    here = F.pad(kv, (0, 0, 0, blocks * BLOCK - length)).unflatten(1, (blocks, BLOCK))
    keys = torch.cat((F.pad(here[:, :-1], (0, 0, 0, 0, 1, 0)), here), 2)
    near = (rows @ keys.mT).unflatten(2, (BLOCK, heads)).flatten(1, 2)[:, :length]
    row = torch.arange(length, device=q.device)[:, None]
    key = (row // BLOCK - 1) * BLOCK + torch.arange(2 * BLOCK, device=q.device)
    seen = (key >= 0) & (key <= row) & (key > row - window)
    scores = [near.masked_fill(~seen[None, :, None], -torch.inf)]
    if entries is not None and visible is not None:
        far = (q.flatten(1, 2) @ entries.mT).unflatten(1, (length, heads))
        scores.append(far.masked_fill(~visible.unsqueeze(2), -torch.inf))
    scores += [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k in own]
    scores.append(sinks[None, None, :, None].expand(len(q), length, heads, 1))
    sizes = [s.shape[-1] for s in scores]
    with torch.autocast(q.device.type, enabled=False):  # which would keep the weights in float32
        stacked = torch.cat([s.to(q.dtype) for s in scores], -1).softmax(-1)
    weights = stacked.split(sizes, -1)
    spans = F.pad(weights[0], (0, 0, 0, 0, 0, blocks * BLOCK - length)).unflatten(1, (blocks, BLOCK)).flatten(2, 3)
    out = (spans @ keys).unflatten(2, (BLOCK, heads)).flatten(1, 2)[:, :length]
    if entries is not None:
        out = out + (weights[1].flatten(1, 2) @ entries).unflatten(1, (length, heads))
    for weight, k in zip(weights[len(weights) - 1 - len(own) : -1], own, strict=True):
        out = out + weight * k.unsqueeze(2)
    return out, weights[1] if entries is not None else None
