"""The EAGLE draft head of a Llama or DeepSeek-V3 target: one decoder layer after a projection.

Row ``p`` takes the target's last hidden state at position ``p`` (after the final norm) and the
embedding of token ``p + 1``, rotates at position ``p`` and predicts token ``p + 2``. A drafted row
takes its parent row's output in place of the target's hidden state. The embedding and the output
head are the target's and are not part of this module.

This module imports torch and transformers; nothing else in the package needs to.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from attn_backends_reference.models.folders import load_config

_FAMILIES = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "deepseek_v3": (DeepseekV3DecoderLayer, DeepseekV3RMSNorm, DeepseekV3RotaryEmbedding),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLMEagle",
    "deepseek_v3": "DeepseekV3ForCausalLMEagle",
    "deepseek_v4": "DeepseekV4ForCausalLMMTP",
}


class DraftHead(nn.Module, ABC):
    """A projection of an embedding and a hidden state, the target's decoder layer and a final norm.

    Args:
        config: a Llama or DeepSeek-V3 configuration with ``num_hidden_layers`` 1.
        attn_implementation: the name that transformers' attention interface looks up; the default
            keeps the configuration's own, or ``"sdpa"`` where it has none.
    """

    def __init__(self, config: PreTrainedConfig, attn_implementation: str | None = None) -> None:
        super().__init__()
        if config.model_type not in _FAMILIES:
            raise ValueError(f"no draft for model_type {config.model_type!r}; known: {sorted(_FAMILIES)}")
        if attn_implementation is not None or config._attn_implementation is None:
            config._attn_implementation = attn_implementation or "sdpa"
        layer, norm, rotary = _FAMILIES[config.model_type]
        self.config = config
        self.layers = nn.ModuleList([layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = rotary(config)

    @abstractmethod
    def project(self, inputs_embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, T, H]``, the layer's input, of two such tensors."""

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        **attention: Any,
    ) -> torch.Tensor:
        """Runs the rows of a chunk.

        Args:
            inputs_embeds: ``[B, T, H]``, the target's embedding of each row's next token.
            hidden: ``[B, T, H]``, the target's hidden states or outputs of a draft.
            position_ids: ``[B, T]``, the rows' positions.
            attention: passed to the decoder layer and from there to the attention function
                (``attention_mask``, ``past_key_values`` or an implementation's own arguments).

        Returns:
            ``[B, T, H]``, the rows' outputs after the final norm: input of the target's output
            head and hidden state of the next drafted rows.
        """
        rows = self.project(inputs_embeds, hidden)
        position_embeddings = self.rotary_emb(rows, position_ids)
        for layer in self.layers:
            rows = layer(
                rows,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                **attention,
            )
        return self.norm(rows)


class EagleDraft(DraftHead):
    """``norm(layer(fc([embedding of the next token, hidden])))``; arguments as `DraftHead`, with a dense MLP."""

    def __init__(self, config: PreTrainedConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def project(self, inputs_embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.project`."""
        return self.fc(torch.cat((inputs_embeds, hidden), dim=-1))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> EagleDraft:
        """Loads ``config.json`` and ``model.safetensors`` of a draft folder, in evaluation mode.

        Args:
            folder: a local folder; a hub is never asked. `CheckpointError` if it has no config.json that can be read.
            dtype: the dtype of the weights; by default the one they are stored in.
            attn_implementation: see the constructor.
        """
        config = load_config(Path(folder))
        draft = cls(config, attn_implementation)
        weights = load_file(Path(folder) / "model.safetensors")
        stored = next(iter(weights.values())).dtype
        draft.load_state_dict(weights, strict=True)
        for parameter in draft.parameters():  # the rotary frequencies are buffers that must stay float32
            parameter.data = parameter.data.to(dtype or stored)
        return draft.eval()

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes ``config.json`` and ``model.safetensors``, the weights cast to ``dtype``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        fields = self.config.to_diff_dict()
        fields["architectures"] = [ARCHITECTURES[self.config.model_type]]
        fields["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        weights = {k: v.detach().to("cpu", dtype).contiguous() for k, v in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
