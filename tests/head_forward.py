"""What a published head computes, in plain torch over whole texts, from its tensors and the facts of its format.

Nothing of transformers' layers, of the loader or of a backend: rotary embeddings, attention, norms and MLP are written
out here. The target alone is transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from tests.eagle3_oracle import Oracle
from tests.head_formats import EPS


@dataclass(frozen=True, eq=False)
class HeadOracle(Oracle):
    """An `Oracle` of a format. config: its facts. tensors: by the names of its folder. layers: the taps, if any."""

    def features(self, text: Sequence[int]) -> Tensor:
        """[len(text), F]: what the head takes of the target at each position."""
        if self.layers:
            return super().features(text)
        return self.target.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0]

    def log_probs(self, known: Sequence[int], path: Sequence[int], features: Tensor) -> Tensor:
        """See `Oracle.log_probs`."""
        own = self.config.get("embedding") or next((n for n in self.tensors if n.endswith("embed_tokens.weight")), None)
        table = self.target.model.embed_tokens.weight if own is None else self.tensors[own]
        embeddings, hidden = table[torch.tensor([*known[1:], *path])], self.joined(features[: len(known) - 1])
        out = self.run(embeddings[: len(hidden)], hidden)
        for _ in path:
            hidden = torch.cat((hidden, self.fed(out[-1:])))
            out = self.run(embeddings[: len(hidden)], hidden)
        scores = self.scores(out[len(known) - 2 :], table).log_softmax(-1)
        ids = torch.arange(scores.shape[1])
        if "d2t" in self.tensors:
            ids = ids + self.tensors["d2t"]
        whole = torch.full((len(scores), self.target.config.vocab_size), float("-inf"), dtype=scores.dtype)
        return whole.index_copy_(1, ids, scores)

    def joined(self, features: Tensor) -> Tensor:
        """[n, H] of the target's states."""
        if self.is_eagle1:
            return features
        if self.config.get("input_norm"):
            features = self.norm("input_norm", features)
        if names := self.config.get("fc_norms"):
            states = features.chunk(len(names), dim=-1)
            features = torch.cat([self.norm(name, state) for name, state in zip(names, states, strict=True)], dim=-1)
        return self.times("fc", features)

    def fed(self, out: Tensor) -> Tensor:
        """What the next drafted row takes of a row's output."""
        return self.norm("norm", out) if self.config.get("feeds_normed") else out

    def scores(self, out: Tensor, embeddings: Tensor) -> Tensor:
        """[n, tokens]."""
        if self.is_eagle1:
            return linear(out, self.target.lm_head.weight)
        normed, kind = self.norm("norm", out), self.config.get("head")
        own = {"target": self.target.lm_head.weight, "embedding": embeddings}
        return linear(normed, own[kind] if kind else self.tensors["lm_head.weight"])

    def run(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[n, H], the layers over n rows."""
        prefix = self.prefix(0)
        if self.is_eagle1:
            rows = self.times("fc", torch.cat((embeddings, hidden), -1))
            residual, inputs = rows, rows
        else:
            normed = self.norm(f"{prefix}hidden_norm", hidden)
            inputs = torch.cat((self.norm(f"{prefix}input_layernorm", embeddings), normed), -1)
            residual = normed if self.config.get("residual_normed") else hidden
        rows = self.behind_attention(0, residual, inputs)
        for index in range(1, self.config.get("num_layers", 1)):
            names = (f"{self.prefix(index)}input_layernorm", f"{self.prefix(index)}hidden_norm")
            name = next(name for name in names if f"{name}.weight" in self.tensors)
            rows = self.behind_attention(index, rows, self.norm(name, rows))
        return rows

    def behind_attention(self, index: int, residual: Tensor, inputs: Tensor) -> Tensor:
        """A layer's output. inputs: what its attention reads."""
        prefix = self.prefix(index)
        attend = self.mla if "mla" in self.config else self.gqa
        rows = residual + attend(f"{prefix}self_attn.", index, inputs)
        normed = self.norm(f"{prefix}post_attention_layernorm", rows)
        act = gelu if self.config.get("act") == "gelu" else silu
        gated = act(self.times(f"{prefix}mlp.gate_proj", normed)) * self.times(f"{prefix}mlp.up_proj", normed)
        return rows + self.times(f"{prefix}mlp.down_proj", gated)

    def gqa(self, prefix: str, index: int, x: Tensor) -> Tensor:
        """Grouped-query attention: 4 heads over 2."""
        q, k, v = (
            self.times(f"{prefix}{name}_proj", x).unflatten(-1, (heads, -1))
            for name, heads in zip("qkv", (4, 2, 2), strict=True)
        )
        if self.config.get("qk_norm"):
            q, k = self.norm(f"{prefix}q_norm", q), self.norm(f"{prefix}k_norm", k)
        cos, sin, _ = rotation(len(x), q.shape[-1], self.config)
        q, k = (rotate_halves(y, cos, sin) for y in (q, k))
        windows = self.config.get("windows", (None,) * (index + 1))
        mixed = attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), q.shape[-1] ** -0.5, windows[index])
        return self.times(f"{prefix}o_proj", mixed.flatten(1))

    def mla(self, prefix: str, index: int, x: Tensor) -> Tensor:
        """Multi-head latent attention, unabsorbed; pairs of neighbours rotate."""
        rank, nope, rope, v_dim = self.config["mla"]
        q = self.times(f"{prefix}q_b_proj", self.norm(f"{prefix}q_a_layernorm", self.times(f"{prefix}q_a_proj", x)))
        q_nope, q_rope = q.unflatten(-1, (4, -1)).split([nope, rope], -1)
        latent, k_rope = self.times(f"{prefix}kv_a_proj_with_mqa", x).split([rank, rope], -1)
        up = self.times(f"{prefix}kv_b_proj", self.norm(f"{prefix}kv_a_layernorm", latent)).unflatten(-1, (4, -1))
        k_nope, v = up.split([nope, v_dim], -1)
        cos, sin, mscale = rotation(len(x), rope, self.config)
        q_rope, k_rope = (rotate_pairs(y, cos, sin) for y in (q_rope, k_rope[:, None].expand(-1, 4, -1)))
        scale = (nope + rope) ** -0.5 * mscale**2
        mixed = attend(torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v, scale, None)
        return self.times(f"{prefix}o_proj", mixed.flatten(1))

    @property
    def is_eagle1(self) -> bool:
        """EAGLE-1 or EAGLE-2."""
        return self.config.get("eagle") == 1

    def prefix(self, index: int) -> str:
        """What a layer's tensors begin with."""
        names = [
            f"{model}{own}" for model in ("", "model.") for own in (f"layers.{index}.", *["midlayer."] * (not index))
        ]
        return next(name for name in names if any(tensor.startswith(name) for tensor in self.tensors))

    def tensor(self, name: str) -> Tensor | None:
        """One of the folder's, which may have `model.` in front."""
        return self.tensors.get(name, self.tensors.get(f"model.{name}"))

    def times(self, name: str, x: Tensor) -> Tensor:
        """A projection, with its bias if it has one."""
        weight = self.tensor(f"{name}.weight")
        assert weight is not None, name
        return linear(x, weight, self.tensor(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """A norm of the root mean square."""
        weight = self.tensor(f"{name}.weight")
        assert weight is not None, name
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """[n, heads, v_dim], causal attention of the last n rows. window: keys that a row sees at most, its own too."""
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (behind >= 0) & (behind < (window or len(k)))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def rotation(length: int, dim: int, facts: Mapping[str, Any]) -> tuple[Tensor, Tensor, float]:
    """Cosines and sines [length, 1, dim / 2], and what scores of latents are scaled by, twice."""
    theta, rope = facts.get("theta", 10000.0), facts.get("rope")
    freqs = theta ** (-torch.arange(0, dim, 2) / dim)
    mscale = 1.0
    if rope is not None:
        original, factor = rope.get("original_max_position_embeddings", 1), rope["factor"]
        turns = original * freqs / (2 * math.pi)
        if rope.get("rope_type") == "linear":
            kept = torch.zeros(())
        elif rope.get("rope_type") == "llama3":  # https://github.com/meta-llama/llama-models, apply_scaling
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        else:  # YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071), as DeepSeek rounds its bounds
            bounds = [
                dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (rope["beta_fast"], rope["beta_slow"])
            ]
            first, last = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
            kept = 1 - ((torch.arange(dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
            mscale = 0.1 * rope["mscale_all_dim"] * math.log(factor) + 1
        freqs = freqs * kept + freqs / factor * (1 - kept)
    angles = torch.arange(length)[:, None, None] * freqs
    return angles.cos(), angles.sin(), mscale


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, dim], whose halves hold the coordinates."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, dim], whose neighbours are coordinates."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
