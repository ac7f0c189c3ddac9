"""A block draft in the manner of DFlash (https://arxiv.org/abs/2602.06036, as SGLang's ``dflash_worker_v2.py`` and
vLLM's ``dflash/speculator.py`` read it). One forward drafts all tokens: a row for the root and one mask row for each.

After L committed tokens the root stands at position L and mask j at L + j, where it predicts the token. All rows of a
block see one another, and a context: of each committed token keys and values that every layer makes of the target's
last hidden state there, ``hidden_norm(fc(hidden))``. No row of the draft itself ever stands there. The embedding and
the output head are the target's, the mask's embedding is the draft's own.

This module imports torch and transformers, as ``draft.py`` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

ARCHITECTURE = "LlamaForCausalLMBlockDraft"


class BlockDraft(nn.Module):
    """The modules of a draft.

    Args:
        config: Llama's, with ``block_size``, the rows of a block, beside.
        feature_size: columns of what it takes of the target; those of a hidden state if None.
    """

    parts: tuple[Any, Any, Any] = (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding)

    def __init__(self, config: PreTrainedConfig, feature_size: int | None = None) -> None:
        super().__init__()
        layer, norm, rotary = self.parts
        config._attn_implementation = config._attn_implementation or "sdpa"
        self.config, width = config, config.hidden_size
        self.block_size: int = config.block_size
        self.fc = nn.Linear(feature_size or width, width, bias=False)
        self.hidden_norm = norm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.rotary_emb = rotary(config)
        self.mask = nn.Parameter(torch.zeros(width))

    def context(self, hidden: Tensor, position_ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys, rotated, and values ``[B, T, num_kv_heads, head_dim]`` of each layer.

        Args:
            hidden: ``[B, T, F]``, the target's last hidden states, after its final norm, or the features it takes.
            position_ids: ``[B, T]``, where they stand.
        """
        rows = self.hidden_norm(self.fc(hidden))
        cos, sin = (x.unsqueeze(-2) for x in self.rotary_emb(rows, position_ids))
        layers: Iterable[Any] = self.layers
        for attention in (layer.self_attn for layer in layers):
            keys, values = (
                proj(rows).unflatten(-1, (-1, attention.head_dim)) for proj in (attention.k_proj, attention.v_proj)
            )
            keys = attention.k_norm(keys) if hasattr(attention, "k_norm") else keys
            yield keys * cos + rotate_half(keys) * sin, values

    def embed_block(self, root: Tensor) -> Tensor:
        """``[..., block_size, H]``, the rows of blocks whose roots are embedded as ``[..., H]``."""
        masks = self.mask.expand(*root.shape[:-1], self.block_size - 1, -1)
        return torch.cat((root.unsqueeze(-2), masks), dim=-2)

    def forward(self, rows: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """``[B, T, H]``, what the target's output head reads, of such rows. attention: passed to the decoder layers."""
        attention = {
            "position_embeddings": self.rotary_emb(rows, position_ids),
            "position_ids": position_ids,
        } | attention
        for layer in self.layers:
            rows = layer(rows, **attention)
        return self.norm(rows)


def save_block(draft: BlockDraft, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes ``config.json`` and ``model.safetensors``, the weights cast to ``dtype``."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = draft.config.to_diff_dict() | {
        "architectures": [ARCHITECTURE],
        "block_size": draft.block_size,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
