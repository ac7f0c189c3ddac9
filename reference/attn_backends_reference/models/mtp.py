"""The multi-token prediction (MTP) modules of a Llama or DeepSeek-V3 target: one for each drafted step.

Module ``k``, counted from 0, takes at row ``p`` two inputs: the embedding of token ``p + k + 1`` and the previous
module's hidden state at ``p`` (for the first the target's). Each is normed, and they are joined in this order. It
rotates at ``p`` and predicts token ``p + k + 2`` (DeepSeek-V3, DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437,
section 2.2). A hidden state is the one after the final norm. The embedding and the output head are the target's.

A checkpoint keeps module ``k`` as ``model.layers.{num_hidden_layers + k}``: the tensors of a decoder layer, and
``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head.norm``. ``num_nextn_predict_layers`` counts the modules
(https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md; read so by SGLang's ``deepseek_nextn.py`` and
vLLM's ``deepseek_mtp.py``).

This module imports torch and transformers, as ``draft.py`` does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from attn_backends_reference.models.draft import DraftHead

ARCHITECTURES = {"llama": "LlamaForCausalLMMTP", "deepseek_v3": "DeepseekV3ForCausalLMMTP"}
"""Of a folder that holds MTP modules and no target."""


class MtpModule(DraftHead):
    """``norm(layer(eh_proj([enorm(embedding), hnorm(hidden)])))``; arguments as `DraftHead`, see `module_config`."""

    def __init__(self, config: PreTrainedConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        width = config.hidden_size
        self.enorm, self.hnorm = (type(self.norm)(width, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)

    def project(self, inputs_embeds: Tensor, hidden: Tensor) -> Tensor:
        """See `DraftHead.project`."""
        return self.eh_proj(torch.cat((self.enorm(inputs_embeds), self.hnorm(hidden)), dim=-1))

    def published(self) -> dict[str, Tensor]:
        """The module's own memory by published names, which name each expert's projections."""
        tensors = {}
        for name, tensor in self.state_dict().items():
            name = name.removeprefix("layers.0.")
            if name == "mlp.experts.gate_up_proj":
                for expert, (gate, up) in enumerate(tensor.unflatten(1, (2, -1))):
                    tensors[f"mlp.experts.{expert}.gate_proj.weight"] = gate
                    tensors[f"mlp.experts.{expert}.up_proj.weight"] = up
            elif name == "mlp.experts.down_proj":
                tensors |= {f"mlp.experts.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
            else:
                tensors[f"shared_head.{name}" if name.startswith("norm.") else name] = tensor
        return tensors


def module_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """The configuration of the checkpoint's module `index`: that of a model which has this one layer.

    The layers of a DeepSeek-V3 model from `first_k_dense_replace` on have experts; modules count on after its layers.
    """
    own = copy.deepcopy(config)
    own.num_hidden_layers = 1
    if hasattr(config, "first_k_dense_replace"):
        own.first_k_dense_replace = int(config.num_hidden_layers + index < config.first_k_dense_replace)
    return own


def save_mtp(
    modules: Sequence[MtpModule], config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes ``config.json`` and ``model.safetensors``, the weights cast to ``dtype``.

    config: of the modules, with the target's ``num_hidden_layers``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = config.to_diff_dict() | {
        "architectures": [ARCHITECTURES[config.model_type]],
        "dtype": str(dtype).removeprefix("torch."),
        "num_nextn_predict_layers": len(modules),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    weights = {
        f"model.layers.{config.num_hidden_layers + index}.{name}": tensor.to("cpu", dtype).contiguous()
        for index, module in enumerate(modules)
        for name, tensor in module.published().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
