"""vLLM's metadata builder: one for each group of layers that share a block table."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from attn_backends.adapters import vllm as adapter
from attn_backends.backend import AttentionBackend
from attn_backends.engines.vllm.api import (
    AttentionCGSupport,
    AttentionLayerBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    VllmConfig,
    get_layers_from_vllm_config,
)
from attn_backends.engines.vllm.plans import Plan, Plans
from attn_backends.engines.vllm.ragged_plans import RaggedPlans
from attn_backends.engines.vllm.refusals import asked_kernel, config_reasons, kernel_reasons, refuse
from attn_backends.selection.choose import Workload
from spec_metadata import Capacity

logger = logging.getLogger("vllm.attn_backends")


@dataclass(eq=False)
class GroupMetadata:
    """Metadata that vLLM hands from the builder to the layers of a group.

    backend: of the library, which made the plan. The counts are what vLLM's MLA layer reads: to it every row is a
    decode, so that all of them, prompts too, come absorbed and in one call.
    """

    plan: Plan
    backend: AttentionBackend
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class Builder(AttentionMetadataBuilder[GroupMetadata]):
    """Batches of vLLM -> plans of the group's backend.

    Uniform batches are captured in full graphs; prompts and mixed batches run eagerly or between pieces.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        self.layers = [layers[name] for name in layer_names]
        spec, model = vllm_config.speculative_config, vllm_config.model_config
        self.num_steps = spec.num_speculative_tokens if spec else 1
        schedule = spec.num_speculative_tokens_per_batch_size if spec else None
        self.drafted = {min(number, self.num_steps) for _, _, number in schedule or [(1, 1, self.num_steps)]}
        page_size = kv_cache_spec.block_size
        room = self.num_steps + 1
        self.is_cut = bool(spec and spec.enable_adaptive_verification)
        scheduler = vllm_config.scheduler_config
        max_bs = scheduler.max_num_seqs
        chunk = getattr(self.layers[0], "attention_chunk_size", None)
        if chunk:  # vLLM plans each chunk as a request, on the host, so that a draft loop can't plan itself
            max_bs = 2 * max_bs + scheduler.max_num_batched_tokens // chunk
            self.supports_draft_decode_metadata_update = False
        self.capacity = Capacity(
            max_bs=max_bs,
            max_context=max(1, model.max_model_len - (0 if self.is_cut else room)),
            page_size=page_size,
            num_steps=self.num_steps,
            num_draft_tokens=room,
        )
        impl = self.layers[0].impl
        workload = Workload(
            page_size, [layer.impl.layer for layer in self.layers], model.dtype, impl.cache_dtype, self.capacity
        )
        reasons = config_reasons(vllm_config) + kernel_reasons(impl.library, device, workload)
        refuse(f"{impl.library.name} in vLLM, layers {layer_names[0]} and on", reasons)
        self.workload = workload

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> int | None:
        """Rows of a request at most, where the device divides them: as many as in a verify."""
        spec = vllm_config.speculative_config
        return 1 + spec.num_speculative_tokens if spec else 1

    @cached_property
    def plans(self) -> Plans:
        """Made at the first batch, when the cache is there to say how many pages it has."""
        library = self.layers[0].impl.library
        geometry = adapter.geometry(self.layers[0].kv_cache.shape[0], self.capacity.page_size)
        backend = library(self.capacity, geometry, self.device, kernel=asked_kernel(), workload=self.workload)
        kernels = {str(kind): choice.kernel.name for kind, choice in backend.choices.items()}
        logger.info("%s attends in %s and on: %s, %s", library.name, self.layer_names[0], kernels, self.capacity)
        return (RaggedPlans if self.is_cut else Plans)(backend, {1 + number for number in self.drafted})

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GroupMetadata:
        """Metadata of an eager batch, of one between pieces, or of one that a graph runs, which drops it."""
        return self._given(self.plans.of(common_attn_metadata), common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> GroupMetadata:
        """Metadata of a full graph: the first layer that it records plans, from the buffers of this batch."""
        return self._given(self.plans.capture(common_attn_metadata), common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: GroupMetadata) -> None:
        """Before each forward of a draft loop, eagerly or while it is recorded: its first layer plans it."""
        metadata.plan.expire()

    def _given(self, plan: Plan, common: CommonAttentionMetadata) -> GroupMetadata:
        num_tokens = common.num_actual_tokens
        return GroupMetadata(plan, self.plans.backend, num_tokens, common.num_reqs, num_tokens)
