"""What an EAGLE-3 draft must propose, recomputed from position 0: transformers' layers over whole texts with a dense
causal mask, from published tensors. No backend, no cache, nothing that the worker or the draft's own module runs.

A row at position p of a text takes the token p + 1 and three of the target's hidden states at p through `fc`; a drafted
row the output of its parent's row, before the final norm (https://arxiv.org/abs/2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class Oracle:
    """A target, and a draft by its published configuration and tensors. layers: of the target, those that it takes.
    window: (size, sinks, page size) of drafted rows, which see the pages of so many last and first committed tokens.
    """

    target: PreTrainedModel
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    layers: Sequence[int]
    window: tuple[int, int, int] | None = None

    def token_scores(self, text: Sequence[int]) -> Tensor:
        """[len(text) - 1, vocab]: the target's scores of text[1:]."""
        return self.target(input_ids=torch.tensor([text]), use_cache=False).logits[0, :-1]

    def features(self, text: Sequence[int]) -> Tensor:
        """[len(text), 3 H]: what the draft takes of the target at each position."""
        taken: dict[int, Tensor] = {}
        hooks = [
            self.target.model.layers[layer].register_forward_hook(
                lambda _, given, made, layer=layer: taken.update({layer: made})
            )
            for layer in self.layers
        ]
        self.target(input_ids=torch.tensor([text]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([taken[layer][0] for layer in self.layers], dim=-1)

    def log_probs(self, known: Sequence[int], path: Sequence[int], features: Tensor) -> Tensor:
        """[len(path) + 1, vocab]: row i scores what follows the root known[-1] and path[:i]; -inf for tokens that the
        draft lacks. features: at the positions of known and perhaps more.
        """
        embeddings = self.target.model.embed_tokens(torch.tensor([*known[1:], *path]))
        hidden = features[: len(known) - 1] @ self.tensors["fc.weight"].T
        out, committed = self._layer(embeddings[: len(hidden)], hidden, len(hidden)), len(hidden)
        for _ in path:
            hidden = torch.cat((hidden, out[-1:]))
            out = self._layer(embeddings[: len(hidden)], hidden, committed)
        normed = rms_norm(out[len(known) - 2 :], out.shape[1:], self.tensors["norm.weight"], EPSILON)
        scores = (normed @ self.tensors["lm_head.weight"].T).log_softmax(dim=-1)
        (ids,) = self.tensors["t2d"].nonzero(as_tuple=True)
        return torch.full((len(scores), len(self.tensors["t2d"])), float("-inf")).index_copy_(1, ids, scores)

    def tree(self, known: Sequence[int], features: Tensor, topk: int, num_steps: int) -> list[tuple[float, list[int]]]:
        """Every drafted path with the log-probability of its last token and those before: of topk paths a step, each
        continued by its topk best tokens.
        """
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        found = []
        for _ in range(num_steps):
            grown = []
            for score, path in beams:
                best = self.log_probs(known, path, features)[-1].topk(topk)
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                grown += [(score + value, [*path, token]) for value, token in pairs]
            found += grown
            beams = sorted(grown, key=lambda beam: -beam[0])[:topk]
        return found

    def _unseen(self, committed: int) -> list[int]:
        """Committed positions that drafted rows do not see."""
        if self.window is None:
            return []
        size, sinks, page_size = self.window
        pages = {p // page_size for p in range(committed) if p < sinks or p >= committed - size}
        return [p for p in range(committed) if p // page_size not in pages]

    def _layer(self, embeddings: Tensor, hidden: Tensor, committed: int) -> Tensor:
        """[n, H] of the same: the decoder layer over n rows, those behind the committed drafted."""
        own = self._own_modules
        normed = (self._norm("input_layernorm", embeddings), self._norm("hidden_norm", hidden))
        future = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
        future[committed:, self._unseen(committed)] = True
        mask = torch.zeros(future.shape).masked_fill(future, float("-inf"))[None, None]
        angles = own["rotary"](hidden[None], torch.arange(len(hidden))[None])
        mixed, _ = own["attention"](torch.cat(normed, -1)[None], position_embeddings=angles, attention_mask=mask)
        hidden = hidden + mixed[0, :, : hidden.shape[1]]
        return hidden + own["mlp"](self._norm("post_attention_layernorm", hidden))

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, rows.shape[1:], self.tensors[f"midlayer.{name}.weight"], EPSILON)

    @cached_property
    def _own_modules(self) -> dict[str, Any]:
        """transformers' attention of twice the width, whose output is padded, and its MLP."""
        config = LlamaConfig(**self.config, attn_implementation="eager")
        wide = LlamaConfig(**self.config | {"hidden_size": 2 * config.hidden_size}, attn_implementation="eager")
        attention, mlp = LlamaAttention(wide, 0), LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(attention, name).weight.data = self.tensors[f"midlayer.self_attn.{name}.weight"]
        narrow = self.tensors["midlayer.self_attn.o_proj.weight"]
        attention.o_proj.weight.data = torch.cat((narrow, torch.zeros_like(narrow)))
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(mlp, name).weight.data = self.tensors[f"midlayer.mlp.{name}.weight"]
        return {"attention": attention.eval(), "mlp": mlp.eval(), "rotary": LlamaRotaryEmbedding(config)}
