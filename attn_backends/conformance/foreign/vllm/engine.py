"""vLLM's builders, block tables and cache of one layer, as its runner (`vllm/v1/worker/gpu`) would make them."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import CacheInputs, KeyValues, Latents
from attn_backends.conformance.foreign.pages import Numbers
from attn_backends.conformance.foreign.places import OnCpu
from attn_backends.conformance.foreign.vllm import control, stand_ins
from attn_backends.conformance.foreign.vllm.parts import MOST_TOKENS, Parts
from attn_backends.layer import AttentionLayer
from spec_metadata import CacheGeometry, Capacity, StepKind

API = "attn_backends.conformance.foreign.vllm.api"
LAYER = "layer"
STEPS_HELD = 4  # of whose requests there are rows at once; a step's requests are not those of another one


class Engine:
    """The parts of a server that attention meets. parts: of vLLM's backend. layer: of the one layer that there is.
    has_kernels: whether the backend's own kernels run here. right: with a backend that is right instead (`control`).
    """

    told_head_size = 0

    def __init__(
        self,
        parts: Parts,
        capacity: Capacity,
        geometry: CacheGeometry,
        device: torch.device,
        dtype: torch.dtype,
        layer: AttentionLayer,
        *,
        has_kernels: bool,
        right: bool,
    ) -> None:
        self.parts, self.capacity, self.device, self.dtype, self.right = parts, capacity, device, dtype, right
        self.numbers, self.num_rows, self._row = Numbers(geometry), STEPS_HELD * capacity.max_bs, 0
        self.block_size, self.max_model_len = geometry.page_size, capacity.max_tokens
        self.shape = layer
        self.memory = torch.zeros(geometry.num_pages, *self._block_shape(), dtype=dtype, device=device)
        with self.simulated():
            vllm: Any = import_module(API)
            self.api: Any = vllm.on(device, stand_ins)
            self.tables = self._block_tables()
            if not has_kernels:
                parts.prepare(self.api)
            self.module = vllm.backend_module(parts.module)
            if not has_kernels:
                parts.install(self.module)
        self._builders: dict[bool, Any] = {}
        self._impls: dict[float, Any] = {}
        self.static: dict[StepKind, Any] = {}  # buffers of a kind's graphs
        self.layer = SimpleNamespace(
            **{f"_{name}_scale": torch.ones(1, device=device) for name in "qkv"},
            **{f"_{name}_scale_float": 1.0 for name in "qkv"},
            isa="vec",
        )

    def simulated(self) -> AbstractContextManager[Any]:
        """In which vLLM's code runs; on a CPU, without a CUDA device."""
        return nullcontext() if self.device.type == "cuda" else OnCpu()

    def _block_tables(self) -> Any:
        width = self.api.get_block_table_width(-(-self.max_model_len // self.block_size), self.block_size)
        return self.api.BlockTables([self.block_size], self.num_rows, MOST_TOKENS, [width], self.device)

    def builder_of(self, kind: StepKind) -> Any:
        """The builder that plans a step kind: a speculator has one of its own for the forwards of a draft."""
        drafts = kind is StepKind.DRAFT_DECODE
        if drafts not in self._builders:
            with self.simulated():
                self._builders[drafts] = control.RightBuilder() if self.right else self._builder()
        return self._builders[drafts]

    def _builder(self) -> Any:
        return getattr(self.module, self.parts.builder)(self._spec(), [LAYER], self._config(), self.device)

    def _config(self) -> Any:
        """What builders read of vLLM's configuration."""
        layer, capacity, api = self.shape, self.capacity, self.api
        model = SimpleNamespace(
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            rswa_window=None,
            is_mm_prefix_lm=False,
            is_diffusion=False,
            get_num_attention_heads=lambda parallel: layer.num_heads,
            get_num_kv_heads=lambda parallel: layer.num_kv_heads,
            get_head_size=lambda: self.told_head_size or layer.head_dim,
        )
        parallel = ("decode_context_parallel_size", "cp_kv_cache_interleave_size", "prefill_context_parallel_size")
        sizes = sorted({1, capacity.max_bs, capacity.max_bs * capacity.num_draft_tokens})
        return SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(**dict.fromkeys(parallel, 1)),
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=self.block_size),
            compilation_config=SimpleNamespace(
                cudagraph_mode=api.CUDAGraphMode.FULL_AND_PIECEWISE,
                max_cudagraph_capture_size=sizes[-1],
                cudagraph_capture_sizes=sizes,
                static_forward_context={LAYER: self._model_layer()},
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=capacity.max_bs, max_num_batched_tokens=MOST_TOKENS),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=capacity.num_draft_tokens - 1, parallel_drafting=False, method="mtp"
            ),
            attention_config=SimpleNamespace(
                flash_attn_max_num_splits_for_cuda_graph=32,
                use_prefill_query_quantization=False,
                trtllm_ragged_backend=None,
            ),
            kernel_config=SimpleNamespace(enable_jit_warmup=False),
        )

    def take_rows(self, bs: int) -> Tensor:
        """[bs] int64 rows of the block tables, those after the last that were taken."""
        rows = [(self._row + request) % self.num_rows for request in range(bs)]
        self._row += bs
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def impl_of(self, layer: AttentionLayer) -> Any:
        """vLLM's implementation of attention for layers of a scale."""
        if layer.scale not in self._impls:
            self._impls[layer.scale] = self._impl(layer)
        return self._impls[layer.scale]

    def _bare_impl(self, **attributes: Any) -> Any:
        """vLLM's impl without its constructor, which refuses machines without its kernels."""
        found = getattr(self.module, self.parts.impl)
        impl = found.__new__(found)
        vars(impl).update(kv_cache_dtype="auto", **attributes, **self.parts.attributes)
        return impl

    @property
    def pages(self) -> Tensor:
        """[num_pages, ...] the cache, as the suite has it."""
        return self.memory

    @abstractmethod
    def _block_shape(self) -> tuple[int, ...]:
        """The shape of a block of the cache."""

    @abstractmethod
    def _spec(self) -> Any:
        """vLLM's description of the cache."""

    @abstractmethod
    def _model_layer(self) -> Any:
        """What builders read of the model's layer."""

    @abstractmethod
    def _impl(self, layer: AttentionLayer) -> Any:
        """What attends."""

    @abstractmethod
    def store(self, inputs: CacheInputs, slots: Tensor, layer: AttentionLayer) -> None:
        """Have vLLM write the rows of a forward, as its layer does. slots: [num_tokens] int64."""

    @abstractmethod
    def attend(self, q: Tensor, planned: Any, layer: AttentionLayer) -> Tensor:
        """[num_tokens, num_heads, v_head_dim] what vLLM attends to by its metadata. q: [num_tokens, num_heads, dim]."""


class LatentEngine(Engine):
    """The engine of a layer of latents, absorbed: prompts, which vLLM does not absorb, are not driven."""

    told_head_size = 576  # metadata refuses others, and says nothing more about it

    def _block_shape(self) -> tuple[int, ...]:
        return self.block_size, self.shape.head_dim

    def _spec(self) -> Any:
        sizes = {"num_kv_heads": 1, "head_size": self.shape.head_dim, "dtype": self.dtype}
        return self.api.MLAAttentionSpec(block_size=self.block_size, **sizes)

    def _model_layer(self) -> Any:
        rank = self.shape.v_head_dim
        prefill = SimpleNamespace(get_name=lambda: "none", prepare_metadata=stand_ins.nothing)
        return SimpleNamespace(
            q_lora_rank=None,
            kv_lora_rank=rank,
            qk_nope_head_dim=rank,
            qk_rope_head_dim=self.shape.head_dim - rank,
            v_head_dim=rank,
            num_heads=self.shape.num_heads,
            prefill_backend=SimpleNamespace(clone=lambda: prefill),
            dcp_manager=None,
        )

    def _impl(self, layer: AttentionLayer) -> Any:
        rank = layer.v_head_dim
        if self.right:
            return control.RightMLAImpl(layer.scale, rank)
        rope, on_gpu = layer.head_dim - rank, self.device.type == "cuda"
        return self._bare_impl(
            _sm_count=torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 1,
            scale=layer.scale,
            num_heads=layer.num_heads,
            kv_lora_rank=rank,
            qk_nope_head_dim=rank,
            qk_rope_head_dim=rope,
            need_to_return_lse_for_decode=False,
            dcp_world_size=1,
            dcp_rank=0,
        )

    def store(self, inputs: CacheInputs, slots: Tensor, layer: AttentionLayer) -> None:
        """As `MLAAttention.update_kv_cache`."""
        assert isinstance(inputs, Latents), "its cache is one of latents"
        nope, rope = inputs.latent.tensor_split((layer.v_head_dim,), dim=-1)
        scale = self.layer._k_scale
        self.impl_of(layer).do_kv_cache_update(nope, rope.unsqueeze(1), self.memory, slots, "auto", scale)

    def attend(self, q: Tensor, planned: Any, layer: AttentionLayer) -> Tensor:
        """As `MLAAttention.forward_impl`, whose rows of prompts would go another way."""
        rows = getattr(planned, "num_decode_tokens", q.shape[0])
        if rows != q.shape[0]:
            raise AssertionError(f"vLLM decodes {rows} of {q.shape[0]} rows, and takes the others for prompts")
        parts = tuple(part.contiguous() for part in q.tensor_split((layer.v_head_dim,), dim=-1))
        out: Tensor = self.impl_of(layer).forward_mqa(parts, self.memory, planned, self.layer)[0]
        return out


class KVEngine(Engine):
    """The engine of a layer of keys and values."""

    def _block_shape(self) -> tuple[int, ...]:
        return self.shape.num_kv_heads, self.block_size, 2 * self.shape.head_dim

    def _spec(self) -> Any:
        sizes = {"num_kv_heads": self.shape.num_kv_heads, "head_size": self.shape.head_dim, "dtype": self.dtype}
        return self.api.FullAttentionSpec(block_size=self.block_size, **sizes)

    def _model_layer(self) -> Any:
        return SimpleNamespace()

    def _impl(self, layer: AttentionLayer) -> Any:
        if self.right:
            return control.RightKVImpl(layer.scale, self.parts.halves)
        sizes = {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads, "head_size": layer.head_dim}
        return self._bare_impl(scale=layer.scale, **sizes)

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """[num_pages, page_size, num_kv_heads, dim] keys and values of the cache, as the suite has them."""
        return self.parts.halves(self.memory)

    def store(self, inputs: CacheInputs, slots: Tensor, layer: AttentionLayer) -> None:
        """As `unified_kv_cache_update` of vLLM's attention layer."""
        assert isinstance(inputs, KeyValues), "its cache is one of keys and values"
        self.impl_of(layer).do_kv_cache_update(self.layer, inputs.k, inputs.v, self.memory, slots)

    def attend(self, q: Tensor, planned: Any, layer: AttentionLayer) -> Tensor:
        """As `unified_attention_with_output`."""
        out = torch.empty_like(q)
        self.impl_of(layer).forward(self.layer, q, None, None, self.memory, planned, out)
        return out
