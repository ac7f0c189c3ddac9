"""An EAGLE-3 draft: decoder layers over several of the target's hidden states, with a vocabulary of their own (Li et
al., 2025, https://arxiv.org/abs/2503.01840).

Row ``p`` takes the embedding of token ``p + 1`` and a hidden state, rotates at position ``p`` and predicts token ``p +
2``. Of a row that the target ran, the hidden state is ``fc`` of the states after some layers at ``p``, side by side.
Of a drafted row, it is what its parent row left before the final norm, or after it (``norm_output``). Both inputs are
normed, and the first layer's attention reads them side by side; the residual is the hidden state alone. Further layers
are the target's kind of layer. Attention is Llama's, Qwen3's or, of MLA heads, DeepSeek-V3's.

`head_config` reads the configurations of published heads, `heads` their folders.

This module imports torch and transformers, as ``draft.py`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.models.deepseek import DEEPSEEK
from attn_backends_reference.models.head_config import HeadConfig
from attn_backends_reference.models.llama import LLAMA

ARCHITECTURE = "LlamaForCausalLMEagle3"
MAPS = ("d2t", "t2d")
LAYERS = {
    "llama": (LLAMA, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (LLAMA, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
    "deepseek_v3": (DEEPSEEK, DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding),
}
"""By model_type: the family whose attention it has, transformers' layer and rotary embedding."""
INPUTS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
"""What of an attention layer reads its input."""


class Eagle3Layer(nn.Module):
    """A decoder layer, with what it has of transformers' `block`, whose attention reads an embedding and a hidden state
    side by side.
    """

    def __init__(self, block: Any, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = block.self_attn, block.mlp
        self.input_layernorm, self.post_attention_layernorm = block.input_layernorm, block.post_attention_layernorm
        norm = block.input_layernorm
        self.hidden_norm = type(norm)(norm.weight.shape[0], eps=norm.variance_epsilon)
        self.norm_before_residual = norm_before_residual

    def forward(self, inputs_embeds: Tensor, hidden: Tensor, **attention: Any) -> Tensor:
        """``[B, T, H]`` of two such tensors. attention: of transformers' attention."""
        normed = self.hidden_norm(hidden)
        rows = torch.cat((self.input_layernorm(inputs_embeds), normed), dim=-1)
        mixed, _ = self.self_attn(hidden_states=rows, **attention)
        hidden = (normed if self.norm_before_residual else hidden) + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(nn.Module):
    """The modules of a draft, by published names; the first layer is ``layers.0``, which some folders call
    ``midlayer``.

    Args:
        head: its configuration.
        attn_implementation: the name that transformers' attention interface looks up; the default keeps the
            configuration's own, or ``"sdpa"`` where it has none.
    """

    def __init__(self, head: HeadConfig, attn_implementation: str | None = None) -> None:
        super().__init__()
        config = head.layer
        if attn_implementation is not None or config._attn_implementation is None:
            config._attn_implementation = attn_implementation or "sdpa"
        self.head, self.config = head, config
        self.family, _, rotary = LAYERS[config.model_type]
        first, *further = new_layers(head)
        widen(first.self_attn, 2, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(first, head.norm_before_residual), *further])
        width, norm = config.hidden_size, type(first.input_layernorm)
        self.fc = nn.Linear(head.num_states * head.target_hidden_size, width, bias=bool(head.fc_bias))
        if head.fc_norm:
            sizes = [head.target_hidden_size] * head.num_states
            self.fc_norm = nn.ModuleList([norm(size, eps=config.rms_norm_eps) for size in sizes])
        if head.norm_before_fc:
            self.input_norm = norm(self.fc.in_features, eps=config.rms_norm_eps)
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, head.num_ids, bias=False)
        self.rotary_emb = rotary(config)
        self.d2t = nn.Buffer(torch.zeros(head.num_ids, dtype=torch.int64))
        self.t2d = nn.Buffer(torch.arange(config.vocab_size) < head.num_ids)

    @property
    def target_ids(self) -> Tensor:
        """``[draft_vocab_size]`` int64, the target's id of each of the draft's."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, features: Tensor) -> Tensor:
        """``[..., H]``, a hidden state of the target's states, side by side."""
        if self.head.norm_before_fc:
            features = self.input_norm(features)
        if self.head.fc_norm:
            states = features.chunk(self.head.num_states, dim=-1)
            features = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, inputs_embeds: Tensor, hidden: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """Runs the rows of a chunk.

        Args:
            inputs_embeds: ``[B, T, H]``, the embedding of each row's next token.
            hidden: ``[B, T, H]``, of rows that the target ran `fuse` of its states, else outputs of a draft.
            position_ids: ``[B, T]``, the rows' positions.
            attention: passed to the attention function.

        Returns:
            ``[B, T, H]`` before the final norm, or after it (``norm_output``): hidden states of the next drafted rows.
        """
        attention = {"attention_mask": None, "position_embeddings": self.rotary_emb(hidden, position_ids)} | attention
        first, *further = self.layers
        rows = first(inputs_embeds, hidden, **attention)
        for layer in further:
            rows = layer(rows, **attention)
        return self.norm(rows) if self.head.norm_output else rows

    def normed(self, hidden: Tensor) -> Tensor:
        """Outputs as ``lm_head`` reads them, after the final norm."""
        return hidden if self.head.norm_output else self.norm(hidden)


class Eagle3Model(DraftModel):
    """An EAGLE-3 draft as a worker sees it. Takes over `draft`.

    feature_layers: of the target. embedding: the target's if None. head: the draft's own, `lm_head`, if None.
    """

    _draft: Eagle3Draft

    def __init__(
        self,
        draft: Eagle3Draft,
        target: TargetModel,
        feature_layers: tuple[int, ...],
        embedding: nn.Embedding | None = None,
        head: nn.Linear | None = None,
    ) -> None:
        super().__init__(draft, target, draft.family)
        self.layers = with_windows(self.layers, draft.head)
        self.embedding, self.head = embedding or target.embedding, head or draft.lm_head
        self.feature_layers, self.feature_size = feature_layers, draft.fc.in_features
        self.target_hidden_size = draft.head.target_hidden_size
        self._target_ids = draft.target_ids

    def fuse(self, features: Tensor) -> Tensor:
        """[T, hidden_size] of the target's states, [T, feature_size]."""
        return self._draft.fuse(features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft's vocabulary, [T, draft_vocab_size] in the model's dtype. hidden: [T, hidden_size]."""
        return self.head(self._draft.normed(hidden))

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of the draft's, in any shape."""
        return self._target_ids[ids]


def new_layers(head: HeadConfig) -> list[Any]:
    """transformers' decoder layers of a head, each as wide as it is there, with the head's biases."""
    _, decoder_layer, _ = LAYERS[head.layer.model_type]
    blocks = [decoder_layer(head.layer, index) for index in range(head.layer.num_hidden_layers)]
    for block in blocks:
        widen(block.self_attn, 1, head.qkv_bias)
        for name in ("q_a_layernorm", "kv_a_layernorm"):  # transformers' own epsilon there is 1e-6; SGLang's and vLLM's
            if getattr(block.self_attn, name, None) is not None:  # MLA heads have that of the configuration
                getattr(block.self_attn, name).variance_epsilon = head.layer.rms_norm_eps
    return blocks


def widen(attention: Any, copies: int, bias: bool) -> None:
    """Makes an attention layer read several inputs side by side. bias: whether these projections get one."""
    for name in INPUTS:
        narrow = getattr(attention, name, None)
        if narrow is not None:
            has_bias = bias or narrow.bias is not None
            setattr(attention, name, nn.Linear(copies * narrow.in_features, narrow.out_features, bias=has_bias))


def with_windows(layers: tuple[Any, ...], head: HeadConfig) -> tuple[Any, ...]:
    """Attention layers that see what the head's do."""
    return tuple(replace(layer, window=window) for layer, window in zip(layers, head.windows, strict=True))


def save_eagle3(draft: Eagle3Draft, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes ``config.json`` and ``model.safetensors`` as SafeAILab names them, the weights cast to ``dtype``."""
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft.state_dict().items()}
    save_head(folder, ARCHITECTURE, draft.head, tensors, dtype)


def save_head(
    folder: Path,
    architecture: str,
    head: HeadConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a head's folder. tensors: by published names; those of floats are cast to ``dtype``."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    fields = {"model_type": head.layer.model_type} | dict(head.fields) | own
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    weights = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
