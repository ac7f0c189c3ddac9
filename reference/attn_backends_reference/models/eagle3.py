"""The EAGLE-3 draft of a Llama target: one decoder layer over three of the target's hidden states, with a vocabulary of
its own (Li et al., 2025, https://arxiv.org/abs/2503.01840).

Row ``p`` takes the embedding of token ``p + 1`` and a hidden state, rotates at position ``p`` and predicts token
``p + 2``. Of a row that the target ran, the hidden state is ``fc`` of the states behind a low, a middle and a high
layer at ``p``, side by side; of a drafted row, what its parent row left before the final norm. Both inputs are normed,
and the layer's attention reads them side by side; the residual is the hidden state alone.

A folder is as published (https://github.com/SafeAILab/EAGLE, ``eagle/traineagle3/cnets.py``; read so by SGLang's and
vLLM's ``llama_eagle3.py``): ``fc``, ``midlayer``, ``norm``, ``lm_head``, and the maps of the draft's vocabulary,
``d2t`` int64 (draft id i is the target's ``i + d2t[i]``) and ``t2d`` bool (which of the target's ids the draft has).
The published target of n layers keeps its state before the layers 2, n // 2 and n - 3 (``eagle/model``), so behind 1,
n // 2 - 1 and n - 4; other layers are named by ``eagle_config.eagle_aux_hidden_state_layer_ids``, those behind which
the state is taken, as SGLang reads it. SafeAILab's own folders (https://huggingface.co/yuhuili, EAGLE3-*) name their
target's architecture in place of ``LlamaForCausalLMEagle3`` and hold a ``pytorch_model.bin``.

This module imports torch and transformers, as ``draft.py`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from attn_backends.errors import CheckpointError
from attn_backends_reference.models.decoder import DraftModel, TargetModel

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_STATES = 3
MAPS = ("d2t", "t2d")
OTHER_FORMS = ("norm_before_residual", "norm_before_fc", "parallel_drafting", "eagle_aux_hidden_state_layer_ids")
"""Fields of published configurations that ask for a draft of another form, or count layers otherwise (vLLM's)."""


class Eagle3Layer(nn.Module):
    """A Llama decoder layer whose attention reads an embedding and a hidden state side by side."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )

    def forward(self, inputs_embeds: Tensor, hidden: Tensor, **attention: Any) -> Tensor:
        """``[B, T, H]`` of two such tensors. attention: of transformers' attention."""
        rows = torch.cat((self.input_layernorm(inputs_embeds), self.hidden_norm(hidden)), dim=-1)
        mixed, _ = self.self_attn(hidden_states=rows, **attention)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(nn.Module):
    """The modules of a draft, by published names.

    Args:
        config: a Llama configuration with one layer, the target's ``vocab_size`` and perhaps ``draft_vocab_size``.
        attn_implementation: the name that transformers' attention interface looks up; the default keeps the
            configuration's own, or ``"sdpa"`` where it has none.
    """

    def __init__(self, config: PreTrainedConfig, attn_implementation: str | None = None) -> None:
        super().__init__()
        if attn_implementation is not None or config._attn_implementation is None:
            config._attn_implementation = attn_implementation or "sdpa"
        width, num_ids = config.hidden_size, draft_vocab_size(config)
        self.config = config
        self.fc = nn.Linear(NUM_STATES * width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, num_ids, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.d2t = nn.Buffer(torch.zeros(num_ids, dtype=torch.int64))
        self.t2d = nn.Buffer(torch.arange(config.vocab_size) < num_ids)

    @property
    def layers(self) -> tuple[Eagle3Layer, ...]:
        """The decoder layer."""
        return (self.midlayer,)

    @property
    def target_ids(self) -> Tensor:
        """``[draft_vocab_size]`` int64, the target's id of each of the draft's."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def forward(self, inputs_embeds: Tensor, hidden: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """Runs the rows of a chunk.

        Args:
            inputs_embeds: ``[B, T, H]``, the target's embedding of each row's next token.
            hidden: ``[B, T, H]``, of rows that the target ran ``fc`` of its three states, else outputs of a draft.
            position_ids: ``[B, T]``, the rows' positions.
            attention: passed to the attention function.

        Returns:
            ``[B, T, H]`` before the final norm: hidden states of the next drafted rows; ``lm_head(norm(...))`` scores.
        """
        angles = self.rotary_emb(hidden, position_ids)
        return self.midlayer(inputs_embeds, hidden, position_embeddings=angles, **attention)


class Eagle3Model(DraftModel):
    """An EAGLE-3 draft as a worker sees it, with the target's embedding and an output head of its own.

    Takes over `draft`. feature_layers: of the target, three.
    """

    _draft: Eagle3Draft

    def __init__(self, draft: Eagle3Draft, target: TargetModel, feature_layers: tuple[int, ...]) -> None:
        super().__init__(draft, target)
        self.head = draft.lm_head
        self.feature_layers, self.feature_size = feature_layers, draft.fc.in_features
        self._target_ids = draft.target_ids

    def fuse(self, features: Tensor) -> Tensor:
        """[T, hidden_size] of the target's three states, [T, 3 · hidden_size]."""
        return self._draft.fc(features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft's vocabulary, [T, draft_vocab_size] in the model's dtype. hidden: [T, hidden_size]."""
        return self.head(self._draft.norm(hidden))

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of the draft's, in any shape."""
        return self._target_ids[ids]


def draft_vocab_size(config: PreTrainedConfig) -> int:
    """How many of the target's tokens a draft can propose."""
    return getattr(config, "draft_vocab_size", None) or config.vocab_size


def feature_layers(path: Path, config: PreTrainedConfig, num_layers: int) -> tuple[int, ...]:
    """The layers of a target of `num_layers` behind which a draft takes its states, low to high.

    Raises `CheckpointError` if the configuration asks for a draft of another form, or for layers that there are not.
    """
    forms = [name for name in OTHER_FORMS if getattr(config, name, None)]
    if config.num_hidden_layers != 1:
        forms.append(f"num_hidden_layers={config.num_hidden_layers}")
    given = getattr(config, "eagle_config", None) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"eagle_config in {path} is {given!r}; it must be a table")
    if not given.get("use_aux_hidden_state", True):
        forms.append("eagle_config.use_aux_hidden_state=False")
    if forms:
        raise CheckpointError(
            f"{path} asks for {', '.join(forms)}; supported are EAGLE-3 drafts of one layer as SafeAILab publishes them"
        )
    layers = given.get("eagle_aux_hidden_state_layer_ids") or [1, num_layers // 2 - 1, num_layers - 4]
    whole = isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)
    rising = whole and len(layers) == NUM_STATES and layers == sorted(set(layers))
    if not rising or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise CheckpointError(
            f"the draft in {path} takes the states behind the layers {layers} of a target with {num_layers}; it "
            f"needs {NUM_STATES} different ones, from low to high. Targets of fewer than 7 layers need them named: "
            f"eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return tuple(layers)


def check_maps(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises `CheckpointError` unless the maps of a draft's vocabulary are sound and agree."""
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise CheckpointError(f"{path} holds d2t as {d2t.dtype} and t2d as {t2d.dtype}, not int64 and bool")
    ids = torch.arange(len(d2t)) + d2t
    outside = ((ids < 0) | (ids >= len(t2d))).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise CheckpointError(
            f"d2t in {path} maps {len(outside)} draft ids out of the target's vocabulary of {len(t2d)}: the first, "
            f"{first}, to {first} + {int(d2t[first])}"
        )
    named = torch.zeros_like(t2d).index_fill_(0, ids, True)
    if int(named.sum()) != len(d2t) or not torch.equal(named, t2d):
        raise CheckpointError(
            f"d2t in {path} names {int(named.sum())} different target ids for {len(d2t)} draft ids, and t2d "
            f"{int(t2d.sum())}, {int((named & t2d).sum())} of them the same; they must be one set"
        )


def save_eagle3(draft: Eagle3Draft, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes ``config.json`` and ``model.safetensors``, the weights cast to ``dtype``."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = draft.config.to_diff_dict() | {
        "architectures": [ARCHITECTURE],
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    weights = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
