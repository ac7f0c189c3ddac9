"""What SGLang's draft proposes, recomputed from the whole text in float64, on the weights of the folders it loads.

A cycle starts with L committed tokens and the root, the token at L. Row p of the draft takes the embedding of token
p + 1 and a state of position p: for p < L the target's, behind that of the row that it grew from. A branch sees
what its own branch wrote before (`forwards_of`). Llama with EAGLE-3, DeepSeek with a NextN layer.

A DFlash draft takes the root and masks at L and behind, and sees keys and values made of the target's states before. In
a DSpark draft the root's row drafts too, and the token before biases each choice.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]


class Drafted(NamedTuple):
    """tokens: of the chosen candidates, in the order of their indices. chosen: these indices."""

    tokens: list[int]
    chosen: list[int]


class Model:
    """Configuration and weights of a folder."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        loaded = load_file(folder / "model.safetensors")
        self.weights: Weights = {name: w.double() if w.is_floating_point() else w for name, w in loaded.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm."""
        return (
            x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self.weights[f"{name}.weight"]
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Without a bias."""
        return x @ self.weights[f"{name}.weight"].T

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """Gated."""
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(silu(gate) * up, f"{name}.down_proj")

    def qkv(self, x: Tensor, positions: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, heads, dim] each, after RoPE; of DeepSeek expanded from latents."""
        if "kv_lora_rank" in self.config:
            return self._of_latents(x, positions, name)
        dim = self.config["head_dim"]
        q, k, v = (self.linear(x, f"{name}.{part}_proj").view(len(x), -1, dim) for part in "qkv")
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        k, v = (each.repeat_interleave(group, 1) for each in (rotate_halves(k, positions), v))
        return rotate_halves(q, positions), k, v

    def _of_latents(self, x: Tensor, positions: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        heads, rank = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        rope, nope = self.config["qk_rope_head_dim"], self.config["qk_nope_head_dim"]
        q = self.linear(self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"), f"{name}.q_b_proj")
        q_nope, q_rope = q.view(len(x), heads, nope + rope).split((nope, rope), -1)
        latent, k_rope = self.linear(x, f"{name}.kv_a_proj_with_mqa").split((rank, rope), -1)
        kv = self.linear(self.norm(latent, f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj").view(len(x), heads, -1)
        k_rope = rotate_pairs(k_rope.unsqueeze(1), positions).expand(-1, heads, -1)
        k, v = torch.cat((kv[..., :nope], k_rope), -1), kv[..., nope:]
        return torch.cat((q_nope, rotate_pairs(q_rope, positions)), -1), k, v


def _angles(x: Tensor, positions: Tensor) -> Tensor:
    inverse = 10000.0 ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    return (positions.double().unsqueeze(1) * inverse).unsqueeze(1)


def rotate_halves(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of pairs (i, i + dim / 2)."""
    angles, (a, b) = _angles(x, positions), x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def rotate_pairs(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of pairs (2i, 2i + 1)."""
    angles, a, b = _angles(x, positions), x[..., ::2], x[..., 1::2]
    return torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """[rows, heads * dim]. seen: [rows, keys] bool; every row sees all keys if None."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many rows as keys: each sees those before it and its own."""
    return attend(q, k, v, torch.ones(len(q), len(k)).tril().bool())


def target_states(model: Model, text: list[int]) -> list[Tensor]:
    """The states behind the embedding and each layer, [rows, hidden] each."""
    x, positions = model.weights["model.embed_tokens.weight"][text], torch.arange(len(text))
    states = [x]
    for i in range(model.config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        q, k, v = model.qkv(model.norm(x, f"{layer}.input_layernorm"), positions, f"{layer}.self_attn")
        x = x + model.linear(attend_causally(q, k, v), f"{layer}.self_attn.o_proj")
        x = x + model.mlp(model.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        states.append(x)
    return states


class Draft:
    """A draft of one layer. layer: the prefix of its weights. logits: of its output; ids: the target's of its own."""

    def __init__(self, target: Model, model: Model) -> None:
        self.target, self.model = target, model
        self.embed = target.weights["model.embed_tokens.weight"]
        self.head = target.weights.get("lm_head.weight", self.embed)
        self.is_eagle3 = "midlayer.hidden_norm.weight" in model.weights
        self.layer = "midlayer" if self.is_eagle3 else f"model.layers.{model.config['num_hidden_layers']}"
        self.mlp = f"{self.layer}.mlp" if self.is_eagle3 else f"{self.layer}.mlp.experts.0"

    def states(self, text: list[int]) -> Tensor:
        """What row p < len(text) takes of the target."""
        states = target_states(self.target, text)
        if not self.is_eagle3:
            return self.target.norm(states[-1], "model.norm")
        behind = self.model.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return self.model.linear(torch.cat([states[layer + 1] for layer in behind], -1), "fc")

    def rows(self, tokens: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """What a residual adds to, and queries, keys and values."""
        embedded = self.embed[tokens]
        if self.is_eagle3:
            normed = (
                self.model.norm(embedded, "midlayer.input_layernorm"),
                self.model.norm(states, "midlayer.hidden_norm"),
            )
            return states, self.model.qkv(torch.cat(normed, -1), positions, "midlayer.self_attn")
        normed = (self.model.norm(embedded, f"{self.layer}.enorm"), self.model.norm(states, f"{self.layer}.hnorm"))
        x = self.model.linear(torch.cat(normed, -1), f"{self.layer}.eh_proj")
        return x, self.model.qkv(
            self.model.norm(x, f"{self.layer}.input_layernorm"), positions, f"{self.layer}.self_attn"
        )

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The states that the next rows take, and logits."""
        x = x + self.model.linear(attended, f"{self.layer}.self_attn.o_proj")
        x = x + self.model.mlp(self.model.norm(x, f"{self.layer}.post_attention_layernorm"), self.mlp)
        if self.is_eagle3:
            return x, self.model.linear(self.model.norm(x, "norm"), "lm_head")
        x = self.model.norm(x, f"{self.layer}.shared_head.norm")
        return x, x @ self.head.T

    def ids(self, tokens: Tensor) -> Tensor:
        """The target's ids."""
        return tokens + self.model.weights["d2t"][tokens] if self.is_eagle3 else tokens

    def drafted(self, text: list[int], topk: int, num_steps: int, num_nodes: int) -> Drafted:
        """What follows a text, whose last token is the root."""
        length = len(text) - 1
        x, (q, k, v) = self.rows(torch.tensor(text[1:]), self.states(text[:-1]), torch.arange(length))
        states, logits = self.finish(x, attend_causally(q, k, v))
        probabilities, best = likely(logits[-1:], topk)
        tokens, states = self.ids(best)[0], states[-1:].expand(topk, -1)
        scores = probabilities[0]
        all_scores, all_tokens = [scores], [tokens]
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(topk)]
        for i in range(1, num_steps):
            x, (q, own_k, own_v) = self.rows(tokens, states, torch.full((topk,), length + i - 1))
            outs = []
            for branch in range(topk):
                seen[branch].append((own_k[branch : branch + 1], own_v[branch : branch + 1]))
                keys, values = (
                    torch.cat((old, *new)) for old, new in zip((k, v), zip(*seen[branch], strict=True), strict=True)
                )
                outs.append(attend(q[branch : branch + 1], keys, values))
            states, logits = self.finish(x, torch.cat(outs))
            probabilities, best = likely(logits, topk)
            children, child_tokens = (scores.unsqueeze(1) * probabilities).flatten(), self.ids(best).flatten()
            scores, kept = children.topk(topk)
            tokens, states = child_tokens[kept], states[torch.div(kept, topk, rounding_mode="floor")]
            all_scores.append(children)
            all_tokens.append(child_tokens)
        chosen = torch.cat(all_scores).topk(num_nodes - 1).indices.sort().values
        return Drafted(torch.cat(all_tokens)[chosen].tolist(), chosen.tolist())

    def chain_logits(self, text: list[int], tokens: list[int]) -> list[Tensor]:
        """[vocabulary] of each forward of a chain that drafted these tokens after a text: all behind the first's."""
        length = len(text) - 1
        x, (q, k, v) = self.rows(torch.tensor(text[1:]), self.states(text[:-1]), torch.arange(length))
        states, _ = self.finish(x, attend_causally(q, k, v))
        states, found = states[-1:], []
        for i, token in enumerate(tokens[:-1]):
            x, (q, own_k, own_v) = self.rows(torch.tensor([token]), states, torch.tensor([length + i]))
            k, v = torch.cat((k, own_k)), torch.cat((v, own_v))
            states, logits = self.finish(x, attend(q, k, v))
            found.append(logits[0])
        return found


def likely(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The probabilities and indices of the most likely, [rows, topk] each; SGLang gives a chain's the probability 1."""
    best = logits.softmax(-1).topk(topk)
    return torch.ones_like(best.values) if topk == 1 else best.values, best.indices


class BlockDraft:
    """A DFlash or DSpark draft. Its embedding and head are the target's."""

    def __init__(self, target: Model, model: Model) -> None:
        self.target, self.model, self.config = target, model, model.config["dflash_config"]

    def drafted(self, text: list[int], topk: int, num_steps: int, num_nodes: int) -> Drafted:
        """What follows a text, whose last token is the root: one token of each mask; of DSpark also one of the root."""
        model, states = self.model, target_states(self.target, text[:-1])
        taken = torch.cat([states[layer + 1] for layer in self.config["target_layer_ids"]], -1)
        context = model.norm(model.linear(taken, "fc"), "hidden_norm")
        embedding = self.target.weights["model.embed_tokens.weight"]
        is_biased = "markov_head.markov_w1.weight" in model.weights
        num_rows = num_nodes - is_biased
        x = embedding[[text[-1], *[self.config["mask_token_id"]] * (num_rows - 1)]]
        places = torch.arange(len(context) + num_rows)
        for i, kind in enumerate(model.config["layer_types"]):
            layer = f"layers.{i}"
            rows = torch.cat((context, model.norm(x, f"{layer}.input_layernorm")))
            q, k, v = model.qkv(rows, places, f"{layer}.self_attn")
            window = model.config["sliding_window"] if kind == "sliding_attention" else len(places)
            seen = places > places[-num_rows:, None] - window
            x = x + model.linear(attend(q[-num_rows:], k, v, seen), f"{layer}.self_attn.o_proj")
            x = x + model.mlp(model.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        logits = model.norm(x[1 - num_nodes :], "norm") @ self.target.weights.get("lm_head.weight", embedding).T
        tokens = text[-1:]
        for row in logits:
            tokens.append(int((row + self._bias(tokens[-1]) if is_biased else row).argmax()))
        return Drafted(tokens[1:], list(range(num_nodes - 1)))

    def _bias(self, token: int) -> Tensor:
        weights = self.model.weights
        return weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][token]


@lru_cache
def draft_of(target: Path, draft: Path) -> Draft | BlockDraft:
    """The models of two folders."""
    models = Model(target), Model(draft)
    return BlockDraft(*models) if "dflash_config" in models[1].config else Draft(*models)
