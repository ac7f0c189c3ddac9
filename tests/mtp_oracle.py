"""What multi-layer MTP must draft and emit, recomputed from position 0: transformers' modules over whole texts with a
dense causal mask. No backend, no cache, no page, nothing that the worker runs.

Module k = 0, 1, … at position p takes the output of module k - 1 there (module 0 the target's hidden state) and the
token p + k + 1, and scores the token p + k + 2 (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

NEAR = 1e-4
"""Scores this close are a tie, which two orders of float32 sums may break either way."""


@dataclass(frozen=True, eq=False)
class Oracle:
    """A target and its MTP modules, by their published names: `enorm`, `hnorm`, `eh_proj`, a decoder layer, a norm."""

    target: PreTrainedModel
    modules: Sequence[Any]

    def token_scores(self, text: Sequence[int]) -> Tensor:
        """[len(text) - 1, vocab]: the target's scores of text[1:]."""
        return self.target.lm_head(self._hidden(self._padded([text])))[0, :-1]

    def draft_scores(self, text: Sequence[int], lens: Sequence[int], drafts: Sequence[Sequence[int]]) -> Tensor:
        """[len(lens), K, vocab]: scores of the drafts of cycles of one request.

        lens: committed tokens before each cycle: the drafts of a cycle with n follow the root text[n]. A later draft is
        scored as following the earlier drafts given, so every one is judged for itself.
        """
        num_steps, ends = len(drafts[0]), torch.tensor(lens)
        hidden = self._hidden(self._padded([text])).expand(len(lens), -1, -1)[:, : max(lens)]
        length = hidden.shape[1]
        known = torch.zeros(len(lens), length + num_steps, dtype=torch.int64)
        for row, end, drafted in zip(known, lens, drafts, strict=True):
            row[: end + num_steps] = torch.tensor([*text[: end + 1], *drafted[:-1]])
        known = known.to(hidden.device)
        scores = []
        for k, module in enumerate(self.modules[:num_steps]):
            embeddings = self.target.model.embed_tokens(known[:, k + 1 : k + 1 + length])
            hidden = self._module(module, embeddings, hidden)
            scores.append(self.target.lm_head(hidden[torch.arange(len(lens)), ends - 1]))
        return torch.stack(scores, dim=1)

    def _hidden(self, tokens: Tensor) -> Tensor:
        """[n, T, H], the target's hidden states after its final norm."""
        return self.target.model(input_ids=tokens, use_cache=False).last_hidden_state

    def _padded(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[n, longest]: what follows a text's end changes nothing before it."""
        padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        return padded.to(self.target.device)

    def _module(self, module: Any, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[n, T, H] of the same: a module's hidden states after its norm."""
        length = hidden.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        mask = torch.zeros(future.shape, device=hidden.device).masked_fill(future, float("-inf"))[None, None]
        rows = module.eh_proj(torch.cat((module.enorm(embeddings), module.hnorm(hidden)), dim=-1))
        angles = module.rotary_emb(rows, torch.arange(length, device=hidden.device)[None])
        (layer,) = module.layers
        return module.norm(layer(rows, attention_mask=mask, position_embeddings=angles))
