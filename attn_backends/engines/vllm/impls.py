"""One layer's attention: grouped-query layers, and MLA layers on absorbed queries."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import KeyValues, PagedKV, PagedLatent
from attn_backends.engines.vllm.api import (
    AttentionImpl,
    MLAAttentionImpl,
    current_platform,
    get_current_vllm_config,
)
from attn_backends.engines.vllm.attended import Attended, counter
from attn_backends.engines.vllm.builder import GroupMetadata
from attn_backends.engines.vllm.refusals import config_reasons, kernel_reasons, layer_reasons, page_size_of, refuse
from attn_backends.layer import AttentionLayer, LatentQuery
from attn_backends.planning.metadata import ForwardMetadata
from attn_backends.selection.choose import Workload


class _Layer:
    """What both kinds of layer have in common. library: the backend that attends."""

    library: ClassVar[type[AttentionBackend]]
    layer: AttentionLayer
    cache_dtype: torch.dtype

    def take(self, layer: AttentionLayer, kv_cache_dtype: str, reasons: list[str]) -> None:
        """Hold a layer, or refuse it, before any weight is loaded. reasons: against it already."""
        config, dtype = get_current_vllm_config(), torch.get_default_dtype()
        self.layer = layer
        self.cache_dtype = torch.float8_e4m3fn if kv_cache_dtype.startswith("fp8") else dtype
        self._attended: Attended | None = None
        self._pages: tuple[ref[Tensor], PagedKV | PagedLatent] | None = None
        self._is_ready = False
        workload = Workload(page_size_of(config), [layer], dtype, self.cache_dtype)
        reasons = reasons + config_reasons(config)
        reasons += kernel_reasons(self.library, torch.device(current_platform.device_type), workload)
        refuse(f"{self.library.name} in vLLM", reasons)

    def pages(self, vllm_layer: Any) -> PagedKV | PagedLatent:
        """Views of the cache of vLLM's layer, made once for each that it binds, and dropped where it drops that."""
        cache = vllm_layer.kv_cache
        if self._pages is None or self._pages[0]() is not cache:
            alias = cache.detach()  # views of the cache itself would keep it
            typed = alias if alias.dtype is self.cache_dtype else alias.view(self.cache_dtype)
            self._pages = ref(cache, self._drop), self.view(typed)
        return self._pages[1]

    def _drop(self, dead: ref[Tensor]) -> None:
        self._pages = None

    @abstractmethod
    def view(self, kv_cache: Tensor) -> PagedKV | PagedLatent:
        """A cache of vLLM's as pages; no copy."""

    def scales_of(self, vllm_layer: Any) -> tuple[float, float]:
        """What vLLM's layer divides keys and values by where it stores them in 8 bits."""
        return vllm_layer._k_scale_float, vllm_layer._v_scale_float

    def begin(self, vllm_layer: Any, given: GroupMetadata, device: torch.device) -> list[tuple[slice, ForwardMetadata]]:
        """What the rows of this forward attend with. vllm_layer: vLLM's own, which has the scales of an 8-bit cache."""
        parts = given.plan.current()
        if not self._is_ready:
            if self.cache_dtype is torch.float8_e4m3fn:
                k_scale, v_scale = self.scales_of(vllm_layer)
                self.layer = replace(self.layer, k_scale=k_scale, v_scale=v_scale)
            self._attended, self._is_ready = counter(vllm_layer.layer_name, self.library.name, device), True
        if self._attended is not None:
            self._attended.add([meta for _, meta in parts])
        return parts


class GroupedQueryImpl(_Layer, AttentionImpl[GroupMetadata]):
    """Attention on vLLM's pages of keys and values, which lie side by side in a token's entry."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self._sinks = sinks
        sizes = (num_heads, self.num_kv_heads, head_size, head_size)
        given = None if sinks is None else sinks.detach()
        layer = AttentionLayer(0, *sizes, self.scale, window=sliding_window, sinks=given)
        reasons = layer_reasons(attn_type, alibi_slopes, logits_soft_cap, kv_sharing_target_layer_name, others)
        self.take(layer, kv_cache_dtype, reasons)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks that were loaded."""
        if self._sinks is not None:
            self.layer = replace(self.layer, sinks=self._sinks.detach())

    def view(self, kv_cache: Tensor) -> PagedKV:
        """A view of vLLM's cache, [blocks, KV heads, block size, 2 * head_size]."""
        return PagedKV(*kv_cache.transpose(1, 2).split(self.head_size, dim=-1))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: GroupMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store and attend. The tensors may have more rows than the batch. Without metadata, in vLLM's profile run,
        the output is zeros.
        """
        if attn_metadata is None:
            return output.fill_(0)
        backend, cache = attn_metadata.backend, self.pages(layer)
        for rows, meta in self.begin(layer, attn_metadata, query.device):
            backend.store(KeyValues(key[rows], value[rows]), cache, meta, self.layer)
            output[rows] = backend.forward(query[rows], cache, meta, self.layer).out
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store rows that attend nowhere, as a block draft's context. Those of slot -1 go to vLLM's null block."""
        scales = self.scales_of(layer) if self.cache_dtype is torch.float8_e4m3fn else (1.0, 1.0)
        self.pages(layer).store(KeyValues(key, value), slot_mapping.clamp_min(0), *scales)


class LatentImpl(_Layer, MLAAttentionImpl[GroupMetadata]):
    """MLA on vLLM's pages of latents; vLLM stores them itself, by its own slots.

    is_sparse with supports_dense_mha_prefill off makes vLLM look for no kernel of prompts, and absorb the queries of
    every row.
    """

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    can_return_lse_for_decode: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        layer = AttentionLayer(0, num_heads, 1, head_size, kv_lora_rank, self.scale, window=sliding_window)
        sparse = {"indexer": others.get("indexer")}
        reasons = layer_reasons(attn_type, alibi_slopes, logits_soft_cap, kv_sharing_target_layer_name, sparse)
        self.take(layer, kv_cache_dtype, reasons)

    def scales_of(self, vllm_layer: Any) -> tuple[float, float]:
        """A latent is key and value at once."""
        return vllm_layer._k_scale_float, vllm_layer._k_scale_float

    def view(self, kv_cache: Tensor) -> PagedLatent:
        """A view of vLLM's cache, [blocks, block size, rank + rope]."""
        return PagedLatent(kv_cache, self.layer.v_head_dim)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: GroupMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend. q: [num_tokens, num_heads, rank + rope], or its two parts. Returns the output in the latent, and the
        log-sum-exp.
        """
        backend, cache = attn_metadata.backend, self.pages(layer)
        found = []
        for rows, meta in self.begin(layer, attn_metadata, kv_c_and_k_pe_cache.device):
            query = LatentQuery(*(part[rows] for part in q)) if isinstance(q, tuple) else q[rows]
            found.append(backend.forward(query, cache, meta, self.layer))
        if len(found) == 1:
            return found[0]
        return torch.cat([part.out for part in found]), torch.cat([part.lse for part in found])
