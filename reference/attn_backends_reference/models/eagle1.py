"""An EAGLE-1 or EAGLE-2 draft as SafeAILab publishes them (``eagle/model/cnets1.py``; Li et al., 2024,
https://arxiv.org/abs/2401.15077 and https://arxiv.org/abs/2406.16858; read so by SGLang's and vLLM's
``llama_eagle.py``).

Row ``p`` takes the embedding of token ``p + 1`` and the target's hidden state at ``p``, after its final norm, or its
parent row's output. ``fc`` joins them for Llama's decoder layers, the first of which has no input norm; no norm follows
the last, and the target's output head reads what it leaves. So it is another model than `draft.EagleDraft`.

This module imports torch and transformers, as ``draft.py`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.models.eagle3 import new_layers, save_head, with_windows
from attn_backends_reference.models.head_config import HeadConfig
from attn_backends_reference.models.llama import LLAMA


class Eagle1Draft(nn.Module):
    """The modules of a draft, by published names.

    Args:
        head: its configuration; ``fc_bias`` is what its tensors have.
        attn_implementation: as of `Eagle3Draft`.
    """

    def __init__(self, head: HeadConfig, attn_implementation: str | None = None) -> None:
        super().__init__()
        config = head.layer
        config._attn_implementation = attn_implementation or config._attn_implementation or "sdpa"
        self.head, self.config = head, config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bool(head.fc_bias))
        self.layers = nn.ModuleList(new_layers(head))
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, inputs_embeds: Tensor, hidden: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """Runs the rows of a chunk; arguments and result as `DraftHead.forward`."""
        rows = self.fc(torch.cat((inputs_embeds, hidden), dim=-1))
        attention = {"attention_mask": None, "position_embeddings": self.rotary_emb(rows, position_ids)} | attention
        for layer in self.layers:
            rows = layer(rows, **attention)
        return rows


class Eagle1Model(DraftModel):
    """An EAGLE-1 or EAGLE-2 draft as a worker sees it, with the target's output head."""

    def __init__(self, draft: Eagle1Draft, target: TargetModel, embedding: nn.Embedding) -> None:
        super().__init__(draft, target, LLAMA)
        self.layers = with_windows(self.layers, draft.head)
        self.embedding = embedding


def save_eagle1(draft: Eagle1Draft, embedding: Tensor, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors`` as SafeAILab names them, in bfloat16. embedding: the target's,
    [vocab_size, H], which their folders hold.
    """
    save_head(folder, "LlamaForCausalLM", draft.head, {"embed_tokens.weight": embedding, **draft.state_dict()})
