"""Configurations of the shipped models, and the passes that training and evaluation share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV4Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from attn_backends_reference.models.deepseek_v4_draft import MtpDraft
from attn_backends_reference.models.draft import EagleDraft
from attn_backends_reference.models.eagle1 import Eagle1Draft
from attn_backends_reference.models.eagle3 import Eagle3Draft
from attn_backends_reference.models.folders import read_fields
from attn_backends_reference.models.head_config import read_eagle
from attn_backends_reference.models.mtp import MtpModule, module_config
from training import attention, compressed, compressed_plans

CHECKPOINTS = Path("reference/attn_backends_reference/models/checkpoints")
NAMES = ("gqa", "mla", "v4")
COMMON = {
    "vocab_size": 256,
    "hidden_size": 256,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
MLA = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 384,
    "num_mtp_layers": 0,
}
DRAFT_MLP = 256
EAGLE1 = {  # SafeAILab's form
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": DRAFT_MLP,
    "bias": True,
}
MTP_MODULES = 3
MTP = {  # narrower than the target where the kernels allow it
    "first_k_dense_replace": MLA["num_hidden_layers"] + MTP_MODULES,
    "num_mtp_layers": MTP_MODULES,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 128,
}
V4_LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def v4_config(layer_types: list[str]) -> PreTrainedConfig:
    """DeepSeek-V4 with ``layer_types``; the head is as wide as its kernels demand, most else is small."""
    return DeepseekV4Config(
        **COMMON | {"hidden_size": 192},
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_layer_types=["moe"] * len(layer_types),
        num_attention_heads=4,
        head_dim=512,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=48,
        index_n_heads=16,
        index_head_dim=64,
        index_topk=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )


def target_config(name: str) -> PreTrainedConfig:
    """The configuration of the target ``"gqa"``, ``"mla"`` or ``"v4"``."""
    if name == "v4":
        return v4_config(V4_LAYERS)
    if name == "gqa":
        return LlamaConfig(
            **COMMON,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=320,
        )
    return DeepseekV3Config(**COMMON | MLA)


def mtp_config() -> PreTrainedConfig:
    """The configuration of the MTP modules of the target ``"mla"``, with the target's number of layers."""
    return DeepseekV3Config(**COMMON | MLA | MTP)


def draft_config(name: str) -> PreTrainedConfig:
    """Of ``"mla"``, the target's with one layer and the draft's own MLP width; of ``"v4"``, a window alone."""
    if name == "v4":
        return v4_config(["sliding_attention"])
    config = target_config(name)
    config.num_hidden_layers = config.first_k_dense_replace = 1
    config.intermediate_size = DRAFT_MLP
    return config


def is_v4(module: PreTrainedModel | EagleDraft | Eagle1Draft | Eagle3Draft) -> bool:
    """Whether a target or draft is DeepSeek-V4's, with the plans of ``compressed_plans``, not ``attention``."""
    return module.config.model_type == "deepseek_v4"


def plans_of(module: PreTrainedModel | EagleDraft | Eagle1Draft | Eagle3Draft) -> Any:
    """The module with the ``Recorder``, ``Nodes`` and ``Unrolled`` plans of a target or draft."""
    return compressed_plans if is_v4(module) else attention


def new_target(name: str) -> PreTrainedModel:
    """A target with fresh weights on the training attention."""
    config = target_config(name)
    if name == "v4":
        return trainable(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)


def new_draft(name: str) -> EagleDraft | Eagle1Draft:
    """A draft with fresh weights on the training attention; of ``"gqa"`` in SafeAILab's form."""
    if name == "gqa":
        return new_eagle1()
    config = draft_config(name)
    draft = MtpDraft(config) if name == "v4" else EagleDraft(config, attention.NAME)
    initialize(draft, config)
    if name == "v4":  # transformers' modules are empty until a whole model of them is made
        source = AutoModelForCausalLM.from_config(config, dtype=torch.float32).model
        draft.layers, draft.hc_head = source.layers, source.hc_head
        compressed.adopt(draft.layers)
    return draft


def new_eagle1() -> Eagle1Draft:
    """The draft of ``"gqa"`` with fresh weights, which hands the target's hidden state on."""
    draft = Eagle1Draft(read_eagle(COMMON | EAGLE1, "the draft"), attention.NAME)
    initialize(draft, draft.config)
    width = draft.config.hidden_size
    draft.fc.weight.data[:, width:] += torch.eye(width)
    draft.fc.bias.data.zero_()
    return draft


def new_mtp() -> nn.ModuleList:
    """The MTP modules of ``"mla"`` with fresh weights on the training attention."""
    config = mtp_config()
    modules = nn.ModuleList(MtpModule(module_config(config, k), attention.NAME) for k in range(MTP_MODULES))
    initialize(modules, config)
    return modules


def initialize(module: nn.Module, config: PreTrainedConfig) -> None:
    """Draws the projections of a draft."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=config.initializer_range)


def trainable(model: PreTrainedModel) -> PreTrainedModel:
    """A DeepSeek-V4 target on the training forward."""
    compressed.adopt(model.model.layers)
    return model


def load_target(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A stored target, frozen, on the training attention."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type == "deepseek_v4":
        model = trainable(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
        for parameter in model.parameters():  # transformers keeps some in float32
            parameter.data = parameter.data.to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME, dtype=dtype)
    return model.eval().requires_grad_(False).to(device)


def load_draft(folder: Path, dtype: torch.dtype, device: torch.device) -> EagleDraft | Eagle1Draft:
    """A stored draft, frozen, on the training attention."""
    draft: EagleDraft | Eagle1Draft
    if (kind := AutoConfig.from_pretrained(folder).model_type) == "llama":
        draft = Eagle1Draft(read_eagle(read_fields(folder / "config.json"), folder), attention.NAME).eval()
        weights = load_file(folder / "model.safetensors")
        draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
        for parameter in draft.parameters():  # the rotary frequencies are buffers that must stay float32
            parameter.data = parameter.data.to(dtype)
    elif kind == "deepseek_v4":
        draft = MtpDraft.from_pretrained(folder, dtype)
        compressed.adopt(draft.layers)
    else:
        draft = EagleDraft.from_pretrained(folder, dtype, attention.NAME)
    return draft.requires_grad_(False).to(device)


def load_mtp(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.ModuleList:
    """Stored MTP modules, frozen, on the training attention."""
    config = AutoConfig.from_pretrained(folder)
    count, weights = config.num_nextn_predict_layers, load_file(folder / "model.safetensors")
    modules = nn.ModuleList(MtpModule(module_config(config, k), attention.NAME) for k in range(count))
    for layer, module in enumerate(modules, config.num_hidden_layers):
        for name, tensor in module.published().items():
            tensor.copy_(weights[f"model.layers.{layer}.{name}"])
        for parameter in module.parameters():  # the rotary frequencies are buffers that must stay float32
            parameter.data = parameter.data.to(dtype)
    return modules.eval().requires_grad_(False).to(device)


def run_modules(
    modules: Sequence[MtpModule], embeds: Tensor, hidden: Tensor, plans: Sequence[Any] | None = None
) -> list[Tensor]:
    """The outputs of MTP modules over windows, each module's input being the one's before.

    Args:
        modules: ``K`` of them.
        embeds: ``[B, T, H]``, row ``t`` embeds token ``t + 1``.
        hidden: ``[B, T, H]``, the target's hidden states at ``t``.
        plans: what the rows of each module see; all before by default.

    Returns:
        ``K`` times ``[B, T, H]``; row ``t`` of module ``k`` takes token ``t + k + 1`` and predicts the one behind it.
        The last ``k`` rows mean nothing, and no other row sees them.
    """
    positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
    outputs = []
    for index, (module, plan) in enumerate(zip(modules, plans or [None] * len(modules), strict=True)):
        rows = F.pad(embeds[:, index:], (0, 0, 0, index))
        hidden = module(rows, hidden, positions, plan=plan)
        outputs.append(hidden)
    return outputs


def target_hidden(model: PreTrainedModel, ids: Tensor, positions: Tensor, plan: Any = None) -> Tensor:
    """The target's hidden states after its final norm.

    Args:
        model: a target on the training attention.
        ids: ``[B, T]`` token ids.
        positions: ``[B or 1, T]`` positions.
        plan: what the tokens see (``attention.Plan``, for DeepSeek-V4 ``compressed.Plan``); all before by default.

    Returns:
        ``[B, T, H]``, what the output head reads.
    """
    if is_v4(model):
        base, plan = model.model, plan or compressed_plans.Whole()
        rows = base.embed_tokens(ids)
        angles = {kind: base.rotary_emb(rows, positions, layer_type=kind) for kind in ("main", "compress")}
        rows = rows.unsqueeze(2).expand(-1, -1, base.config.hc_mult, -1).contiguous()
        for layer in base.layers:
            rows = layer(rows, position_embeddings=angles, plan=plan)
        return base.norm(base.hc_head(rows))
    return target_features(model, ids, positions, (), plan)[0]


def target_features(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, layers: Sequence[int], plan: Any = None
) -> tuple[Tensor, Tensor]:
    """The hidden states of ``target_hidden``, and those behind some layers; not for DeepSeek-V4.

    Args:
        model, ids, positions, plan: as for ``target_hidden``.
        layers: of the target, low to high.

    Returns:
        ``[B, T, H]`` and ``[B, T, len(layers) * H]``, side by side.
    """
    base = model.model
    rows = base.embed_tokens(ids)
    position_embeddings = base.rotary_emb(rows, positions)
    taken = [rows[..., :0]]
    for index, layer in enumerate(base.layers):
        rows = layer(rows, position_ids=positions, position_embeddings=position_embeddings, plan=plan)
        if index in layers:
            taken.append(rows)
    return base.norm(rows), torch.cat(taken, -1)
