"""Tiny random models, their plain forward in float32 and float64, and requests that run through a backend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import PagedKV
from attn_backends_reference.models import DraftModel, ForwardAttention, TargetModel
from attn_backends_reference.models.decoder import Family, PagedModel
from attn_backends_reference.models.deepseek import DEEPSEEK, DEEPSEEK_V2, GLM4_MOE_LITE
from attn_backends_reference.models.draft import EagleDraft
from attn_backends_reference.models.llama import GPT_OSS, LLAMA, MISTRAL, MIXTRAL, OLMOE, QWEN2, QWEN3, QWEN3_MOE
from spec_metadata import BlockTable, CacheGeometry, Capacity, Paging, RequestTable, Step

VOCAB, HIDDEN = 64, 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MLA = COMMON | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "num_mtp_layers": 0,
}
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
WINDOW = 6
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
QWEN_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
GPT_OSS_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gqa": (LlamaConfig, GQA),
    "gqa_bias": (
        LlamaConfig,
        GQA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": LINEAR},
    ),
    "mla": (DeepseekV3Config, MLA | {"q_lora_rank": None}),
    "mla_q_lora": (
        DeepseekV3Config,
        MLA | {"q_lora_rank": 24, "attention_bias": True, "rope_interleave": False, "rope_parameters": YARN},
    ),
    "mla_experts": (DeepseekV3Config, MLA | {"q_lora_rank": None, "first_k_dense_replace": 1} | EXPERTS),
    "mla_v2": (DeepseekV2Config, MLA | {"q_lora_rank": None, "rope_parameters": YARN}),
    "mla_v2_experts": (
        DeepseekV2Config,
        MLA | EXPERTS | {"q_lora_rank": 24, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    ),
    "mla_glm": (Glm4MoeLiteConfig, MLA | EXPERTS | {"q_lora_rank": 24}),
    "mistral": (MistralConfig, GQA | {"sliding_window": None}),
    "mistral_window": (MistralConfig, GQA | {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2_windows": (Qwen2Config, COMMON | {"num_key_value_heads": 2, "max_window_layers": 1} | WINDOWED),
    "qwen3": (Qwen3Config, GQA | {"rope_parameters": YARN}),
    "qwen3_bias": (Qwen3Config, GQA | {"attention_bias": True, "max_window_layers": 1} | WINDOWED),
    "qwen3_moe": (Qwen3MoeConfig, GQA | QWEN_EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3_moe_window": (Qwen3MoeConfig, GQA | QWEN_EXPERTS | WINDOWED),
    "mixtral": (MixtralConfig, GQA | GPT_OSS_EXPERTS | {"sliding_window": WINDOW}),
    "olmoe": (OlmoeConfig, COMMON | {"num_experts": 8, "num_key_value_heads": 2, "clip_qkv": 0.5}),
    "gpt_oss": (GptOssConfig, GQA | GPT_OSS_EXPERTS | {"head_dim": 64, "sliding_window": WINDOW}),
}
BACKENDS: dict[str, tuple[type[AttentionBackend], int]] = {
    "reference": (ReferenceBackend, 1),
    "fa3": (FA3Backend, 4),
    "flashinfer_mla": (FlashInferMLABackend, 5),
    "trtllm_mla": (TrtllmMLABackend, 32),
}
FAMILIES = {
    LlamaConfig: LLAMA,
    DeepseekV2Config: DEEPSEEK_V2,
    DeepseekV3Config: DEEPSEEK,
    MistralConfig: MISTRAL,
    Qwen2Config: QWEN2,
    Qwen3Config: QWEN3,
    Qwen3MoeConfig: QWEN3_MOE,
    Glm4MoeLiteConfig: GLM4_MOE_LITE,
    GptOssConfig: GPT_OSS,
    MixtralConfig: MIXTRAL,
    OlmoeConfig: OLMOE,
}


def family_of(name: str) -> Family:
    """The family of a tiny model."""
    kind, _ = CONFIGS[name]
    return FAMILIES[kind]


PAIRS = [
    (model, backend)
    for model in CONFIGS
    for backend, (kind, _) in BACKENDS.items()
    if family_of(model).cache_format in kind.formats
]


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """A fresh configuration."""
    kind, fields = CONFIGS[name]
    return kind(**(fields | changes), attn_implementation="eager")


def randomize(module: nn.Module, seed: int) -> None:
    """Weights large enough that attention, norms and biases all matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        noise = torch.randn(weight.shape, generator=generator)
        if "inv_freq" in name:
            continue
        if weight.ndim == 1:
            weight.data = 0.2 * noise + ("norm" in name)
        else:
            weight.data = 1.5 * noise * weight.shape[-1] ** -0.5


def tiny_target(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 target. changes: of its configuration."""
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes), attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    randomize(model, seed)
    return model.requires_grad_(False)


def tiny_draft(name: str, seed: int = 1) -> EagleDraft:
    """A random float32 draft of the same family and sizes."""
    layers = {"num_hidden_layers": 1} | ({"first_k_dense_replace": 1} if name.startswith("mla") else {})
    draft = EagleDraft(tiny_config(name, **layers), attn_implementation="eager").eval()
    randomize(draft, seed)
    return draft.requires_grad_(False)


def served_target(name: str, model: PreTrainedModel) -> TargetModel:
    """A copy of a model, attending through backends."""
    return TargetModel(family_of(name), copy.deepcopy(model))


def served_draft(draft: EagleDraft, target: TargetModel) -> DraftModel:
    """A copy of a draft, attending through backends."""
    return DraftModel(copy.deepcopy(draft), target)


class LiftedToFloat64(TorchFunctionMode):
    """Runs a float64 model with its casts to float32 (norms, rotary, softmax, router) as casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        lifted = [torch.float64 if x is torch.float32 else x for x in args]
        named = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
        out = func(*lifted, **named)
        assert not (isinstance(out, Tensor) and out.dtype is torch.float32), f"{func} fell back to float32"
        return out


@dataclass
class Errors:
    """Logits of a case through a backend and through transformers in float32, each against float64."""

    ours: float = 0.0
    theirs: float = 0.0
    largest: float = 0.0

    def add(self, ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
        """Rows of logits [n, VOCAB] of the same tokens."""
        assert torch.isfinite(ours).all(), "logits are not finite: unowned memory was read"
        self.ours = max(self.ours, (ours.double() - exact).abs().max().item())
        self.theirs = max(self.theirs, (theirs.double() - exact).abs().max().item())
        self.largest = max(self.largest, exact.abs().max().item())

    def check(self) -> None:
        """At most four times transformers' own float32 error, plus one rounding."""
        budget = 4 * self.theirs + torch.finfo(torch.float32).eps * self.largest
        assert self.ours <= budget, f"{self} is over the budget of {budget}"


@dataclass
class PlainTarget:
    """transformers' forward of whole sequences, without cache, in float32 and float64."""

    single: PreTrainedModel
    double: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        self.double = copy.deepcopy(self.single).double()

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[n, VOCAB] float32 and float64, after each of the tokens [n]."""
        single = self.single(input_ids=tokens[None], use_cache=False).logits[0]
        with LiftedToFloat64():
            return single, self.double(input_ids=tokens[None], use_cache=False).logits[0]


@dataclass
class PlainDraft:
    """The draft module on whole sequences with a causal mask, in float32 and float64."""

    target: PlainTarget
    single: EagleDraft
    double: EagleDraft = field(init=False)

    def __post_init__(self) -> None:
        self.double = copy.deepcopy(self.single).double()

    def logits(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n, VOCAB] float32 and float64 of rows with next tokens [n] and hidden states [n, HIDDEN]."""
        single = self._logits(self.single, self.target.single, tokens, hidden)
        with LiftedToFloat64():
            return single, self._logits(self.double, self.target.double, tokens, hidden.double())

    @staticmethod
    def _logits(draft: EagleDraft, target: PreTrainedModel, tokens: Tensor, hidden: Tensor) -> Tensor:
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        mask = torch.zeros(future.shape, dtype=hidden.dtype).masked_fill(future, float("-inf"))
        positions = torch.arange(len(tokens))[None]
        embeds = target.model.embed_tokens(tokens[None])
        return target.lm_head(draft(embeds, hidden[None], positions, attention_mask=mask[None, None])[0])


class Requests:
    """Requests over a cache of shuffled pages in which everything but the reserved page starts as NaN."""

    def __init__(self, model: PagedModel, backend: str, num_requests: int) -> None:
        kind, page_size = BACKENDS[backend]
        self.model = model
        self.capacity = Capacity(num_requests, 24, page_size, topk=2, num_steps=3, num_draft_tokens=6)
        pages = self.capacity.max_pages
        geometry = CacheGeometry(num_requests * pages + 3, page_size)
        self.backend = kind(self.capacity, geometry, checking=True)
        self.caches = model.allocate_caches(self.backend)
        for cache in self.caches:
            for pool in (cache.k, cache.v) if isinstance(cache, PagedKV) else (cache.latent,):
                pool[1:] = float("nan")
        shuffled = torch.randperm(geometry.num_pages - 1, generator=torch.Generator().manual_seed(2)) + 1
        table = shuffled[: num_requests * pages].reshape(num_requests, pages)
        self.paging: Paging = BlockTable(table, geometry)
        if backend in ("fa3", "reference"):
            slots = (table.unsqueeze(2) * page_size + torch.arange(page_size)).reshape(num_requests, -1)
            padding = torch.zeros_like(slots[:1])
            rows = torch.arange(num_requests, 0, -1)
            self.paging = RequestTable(torch.cat((padding, slots)), rows, geometry)
        self.committed = torch.zeros(num_requests, dtype=torch.int64)

    def attention(self, step: Step, forward: int = 0) -> ForwardAttention:
        """Eager attention of one forward of a step."""
        meta = self.backend.init_forward_metadata(step)
        return ForwardAttention(self.backend, self.caches, meta.at(forward), self.model.layers)


def random_tokens(lens: Sequence[int], seed: int = 3) -> list[Tensor]:
    """A prompt for each request."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lens]
