"""The MTP module that DeepSeek publishes with V4 in the target's folder, used for every drafted step.

Row ``p`` takes the embedding of token ``p + 1`` and the target's residual streams after its last layer at ``p``, before
they are joined for the final norm. Each stream begins as ``e_proj(enorm(embedding)) + h_proj(hnorm(stream))``; one
layer runs, which sees a sliding window. Its streams are what drafted rows take of their parents. Joined by an
``hc_head`` of its own and normed, they are what the target's output head reads (SGLang 0.5.23,
models/deepseek_v4_nextn.py; vLLM 0.33.0, models/deepseek_v4/nvidia/mtp.py, which takes zeros for row 0's embedding).

Its tensors are ``mtp.0.`` and what `V4Mtp.published` names; ``emb.tok_emb`` and ``head`` among them are the target's.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders, weights
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.models.deepseek_v4 import DEEPSEEK_V4
from attn_backends_reference.models.fit import cast, check_fit, check_shared
from attn_backends_reference.models.interface import IMPLEMENTATION
from attn_backends_reference.models.quantization import quantization_of

PREFIX = "mtp."
_PUBLISHED = {
    r"^layers\.0\.": "",
    r"^self_attn\.sinks$": "attn.attn_sink",
    r"^self_attn\.q_a_norm": "attn.q_norm",
    r"^self_attn\.kv_proj": "attn.wkv",
    r"^self_attn\.(q|o)_(a|b)_proj": r"attn.w\1_\2",
    r"^self_attn\.": "attn.",
    r"^input_layernorm": "attn_norm",
    r"^post_attention_layernorm": "ffn_norm",
    r"^(attn|ffn)_hc\.": r"hc_\1_",
    r"^hc_head\.hc_": "hc_head_",
    r"^mlp\.": "ffn.",
    r"gate\.e_score_correction_bias$": "gate.bias",
    r"shared_experts\.gate_proj": "shared_experts.w1",
    r"shared_experts\.down_proj": "shared_experts.w2",
    r"shared_experts\.up_proj": "shared_experts.w3",
}
"""transformers' names of a module's tensors, and what they are published as, one after the other."""


class V4Mtp(nn.Module):
    """The module, without the embedding and the output head. config: see `module_config`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm, self.hnorm = DeepseekV4RMSNorm(width, eps=eps), DeepseekV4RMSNorm(width, eps=eps)
        self.e_proj, self.h_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList([DeepseekV4DecoderLayer(config, 0)])
        self.hc_head, self.norm = DeepseekV4HyperHead(config), DeepseekV4RMSNorm(width, eps=eps)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)

    def forward(self, inputs_embeds: Tensor, hidden: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """[1, T, hc_mult * H], the streams of the rows. inputs_embeds: [1, T, H]. hidden: as the result, the target's
        or of parent rows. position_ids: [1, T]. attention: passed to the layer.
        """
        streams = hidden.unflatten(-1, (self.config.hc_mult, -1))
        streams = self.e_proj(self.enorm(inputs_embeds)).unsqueeze(2) + self.h_proj(self.hnorm(streams))
        angles = {"main": self.rotary_emb(inputs_embeds, position_ids=position_ids, layer_type="main")}
        (layer,) = self.layers
        return layer(streams, position_ids=position_ids, position_embeddings=angles, **attention).flatten(2)

    def joined(self, hidden: Tensor) -> Tensor:
        """[T, H], what the output head reads. hidden: [T, hc_mult * H]."""
        return self.norm(self.hc_head(hidden.unflatten(-1, (self.config.hc_mult, -1)).unsqueeze(0))).squeeze(0)

    def published(self) -> dict[str, Tensor]:
        """The module's own memory by published names, which name each expert's projections."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            for found, named in _PUBLISHED.items():
                name = re.sub(found, named, name)
            if name == "ffn.experts.gate_up_proj":
                for expert, (gate, up) in enumerate(tensor.unflatten(1, (2, -1))):
                    tensors |= {f"ffn.experts.{expert}.w1.weight": gate, f"ffn.experts.{expert}.w3.weight": up}
            elif name == "ffn.experts.down_proj":
                tensors |= {f"ffn.experts.{expert}.w2.weight": down for expert, down in enumerate(tensor)}
            else:
                tensors[name] = tensor
        return tensors


class V4MtpModel(DraftModel):
    """The module as a worker sees it. Its hidden states are streams, side by side."""

    _draft: V4Mtp

    def __init__(self, draft: V4Mtp, target: TargetModel) -> None:
        super().__init__(draft, target)
        self.hidden_size = self.feature_size = draft.config.hc_mult * target.hidden_size
        self.feature_layers = (len(target.layers) - 1,)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [T, vocab_size]. hidden: [T, hc_mult * H]."""
        return self.head(self._draft.joined(hidden))


def load_v4_mtp(path: Path, target: TargetModel) -> V4MtpModel:
    """The first module in a target's folder. Raises `CheckpointError` as `load_draft` does, before weights are read
    unless an embedding or output head in the module is not the target's.
    """
    quantization = quantization_of(path, folders.read_fields(path / "config.json"))
    _, config = folders.read_architecture(path, {DEEPSEEK_V4.architecture: DEEPSEEK_V4})
    given = {key: getattr(config, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    its = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "num_hidden_layers": len(target.layers)}
    architectures = DEEPSEEK_V4.architecture, target.family.architecture
    check_fit(path, *(sizes | {"architectures": name} for sizes, name in zip((given, its), architectures, strict=True)))
    stored = weights.read_headers(path, quantization)
    found = sorted({name.split(".")[1] for name in stored.tensors if name.startswith(PREFIX)})
    if found != [str(index) for index in range(config.num_nextn_predict_layers)]:
        raise CheckpointError(
            f"{path} has tensors of the MTP modules {', '.join(found)}; num_nextn_predict_layers, which counts them "
            f"from 0, is {config.num_nextn_predict_layers}"
        )
    module = V4Mtp(module_config(config))
    needed = {f"{PREFIX}0.{name}": tensor for name, tensor in module.published().items()}
    shared = {f"{PREFIX}0.emb.tok_emb.weight": target.embedding.weight, f"{PREFIX}0.head.weight": target.head.weight}
    first = stored.chosen(lambda name: name.startswith(f"{PREFIX}0."))
    tensors = weights.read_checked(first, needed | shared, shared)
    check_shared(path, tensors, shared, target)
    for name, tensor in needed.items():
        tensor.copy_(tensors[name])
    return V4MtpModel(cast(module, target), target)


def module_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Configuration of a model of the module's one layer, without a compressor and with a learned router."""
    own = copy.deepcopy(config)
    own.num_hidden_layers, own.layer_types, own.mlp_layer_types = 1, ["sliding_attention"], ["moe"]
    own._attn_implementation = own._experts_implementation = IMPLEMENTATION
    return own
