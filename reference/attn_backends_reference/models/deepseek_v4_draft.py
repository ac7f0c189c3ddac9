"""The MTP draft layer of a DeepSeek-V4 target, used for every drafted step as an EAGLE draft is.

As in DeepSeek-V3's multi-token prediction (DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437, section 2.2), row ``p``
joins the normed embedding of token ``p + 1`` and the normed hidden state at ``p``. Then it runs one decoder layer,
which sees a sliding window only. The hidden state is the target's after its final norm, one row of ``hidden_size``, so
that a drafted row can take its parent row's output in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from attn_backends_reference.models.draft import EagleDraft


class MtpDraft(EagleDraft):
    """``norm(head(layer(fc([enorm(embedding of the next token), hnorm(hidden)]))))``; loaded and saved as EagleDraft.

    Args:
        config: a DeepSeek-V4 configuration whose layers are all ``"sliding_attention"``.
        attn_implementation: the name that transformers' attention interface looks up; the default keeps the
            configuration's own, or ``"eager"`` where it has none.
    """

    def __init__(self, config: PreTrainedConfig, attn_implementation: str | None = None) -> None:
        nn.Module.__init__(self)
        if set(config.layer_types) != {"sliding_attention"}:
            raise ValueError(f"an MTP draft sees a sliding window only, not layer_types {config.layer_types}")
        if attn_implementation is not None or config._attn_implementation is None:
            config._attn_implementation = attn_implementation or "eager"
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm, self.hnorm = DeepseekV4RMSNorm(width, eps=eps), DeepseekV4RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([DeepseekV4DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.hc_head = DeepseekV4HyperHead(config)
        self.norm = DeepseekV4RMSNorm(width, eps=eps)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        **attention: Any,
    ) -> torch.Tensor:
        """Runs the rows of a chunk; arguments and result as `EagleDraft.forward`."""
        rows = self.fc(torch.cat((self.enorm(inputs_embeds), self.hnorm(hidden)), dim=-1))
        streams = rows.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        angles = {"main": self.rotary_emb(rows, position_ids=position_ids, layer_type="main")}
        for layer in self.layers:
            streams = layer(streams, position_ids=position_ids, position_embeddings=angles, **attention)
        return self.norm(self.hc_head(streams))
