"""SGLang's model runner, pools and backends of one model, as its server would have made them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attn_backends.conformance.foreign.pages import Numbers
from attn_backends.conformance.foreign.places import OnCpu
from attn_backends.conformance.foreign.sglang import control, stand_ins
from attn_backends.conformance.foreign.sglang.parts import Parts
from attn_backends.layer import AttentionLayer
from spec_metadata import CacheGeometry, Capacity, StepKind

API = "attn_backends.conformance.foreign.sglang.api"
SERVED_BY = {
    StepKind.PREFILL: "target",
    StepKind.TARGET_VERIFY: "target",
    StepKind.DECODE: "decode",
    StepKind.DRAFT_EXTEND: "extend",
    StepKind.DRAFT_DECODE: "draft",
}
"""Which of a server's backends runs a step. A target of speculative decoding captures verifies, one without it decodes;
a draft model has a backend for each of its two steps.
"""
STEPS_HELD = 4  # of whose requests there are rows at once; a step's requests are not those of another one
MARGIN = 4
"""A server's prompt and output end at context_len - 2 (`max_req_len - input_len - 1` new tokens at most, of a
max_req_len of context_len - 1), so a step that adds to them has at most context_len - 4 in the cache.
"""
WIDER = 256  # tokens that a backend may round a table up by
ROOM = 4  # tokens that a row of SGLang's request table has past the context, beside the drafted ones


class Engine:
    """The parts of a server that attention meets. parts: of SGLang's backend. layer: of the one layer that there is.
    has_kernels: whether the backend's own kernels run here. right: with backends and a pool that are
    right instead (`control`).
    """

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
        self.parts, self.capacity, self.device, self.right = parts, capacity, device, right
        self.numbers, self.num_rows, self._row = Numbers(geometry), STEPS_HELD * capacity.max_bs, 0
        with self.simulated():
            self.api: Any = import_module(API)
            self.api.get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)
            self.runner = self._runner(geometry, dtype, layer)
            self.api.get_context().override("the conformance suite", page_size=geometry.page_size)
        self.layer = self.api.RadixAttention(
            layer.num_heads, layer.head_dim, layer.scale, 1, layer_id=0, v_head_dim=layer.v_head_dim
        )
        self._backends: dict[str, Any] = {}
        self._captures: set[str] = set()
        self._static: dict[StepKind, dict[str, Tensor]] = {}
        if not has_kernels:
            stand_ins.Grid.max_kv_len = capacity.max_kv_len + WIDER
            parts.install(self.api)
        if device.type == "cpu":
            for name in ("set_mla_kv_buffer_triton", "set_mla_kv_buffer_dcp_sharded_triton"):
                setattr(self.api.memory_pool, name, stand_ins.write_latents)

    def simulated(self) -> AbstractContextManager[Any]:
        """In which SGLang's code runs; on a CPU, without a CUDA device."""
        return nullcontext() if self.device.type == "cuda" else OnCpu()

    def _runner(self, geometry: CacheGeometry, dtype: torch.dtype, layer: AttentionLayer) -> Any:
        api, capacity, rank = self.api, self.capacity, layer.v_head_dim
        rope, nodes = layer.head_dim - rank, capacity.num_draft_tokens
        config = api.TinyMLAModelConfig(
            num_heads=layer.num_heads,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            hidden_size=64,
            context_len=capacity.max_context + MARGIN,
        )
        config.scaling = layer.scale
        batch = api.MLAAttentionCase(
            "suite",
            self.parts.name,
            api.ForwardMode.TARGET_VERIFY,
            layer.num_heads,
            geometry.page_size,
            (1,) * self.num_rows,
            (nodes,) * self.num_rows,
        )
        runner = api.MockMLAModelRunner(
            case=batch,
            model_config=config,
            dtype=dtype,
            device=self.device.type,
            max_context_len=capacity.max_context + MARGIN + ROOM + nodes,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            disable_cuda_graph=False,
        )
        runner.token_to_kv_pool = api.memory_pool.MLATokenToKVPool(
            size=(geometry.num_pages - 1) * geometry.page_size,
            page_size=geometry.page_size,
            dtype=dtype,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            layer_num=1,
            device=self.device.type,
            enable_memory_saver=False,
        )
        runner.init_kv_index_translator()
        return runner

    def take_rows(self, bs: int) -> Tensor:
        """[bs] rows of the request table, of which row 0 is what padding uses: those after the last that were taken."""
        rows = [1 + (self._row + request) % self.num_rows for request in range(bs)]
        self._row += bs
        return torch.tensor(rows, device=self.device)

    def backend_of(self, kind: StepKind) -> Any:
        """The backend that runs a step kind, made when it is first asked for."""
        role = SERVED_BY[kind]
        if role not in self._backends:
            with self.simulated():
                self._backends[role] = self._make(role)
        return self._backends[role]

    def _make(self, role: str) -> Any:
        if not self.right:
            return self.parts.make(self.api, role, self.runner, self.capacity.num_steps)
        if role == "draft":
            return control.RightDraftBackend(self.runner, self.capacity.num_steps)
        return control.RightBackend(self.runner)

    def static_of(self, kind: StepKind, width: int, num_steps: int) -> dict[str, Tensor]:
        """The static buffers of a kind's graphs; the backend's own are made with them."""
        role, most = SERVED_BY[kind], self.capacity.max_bs
        if role not in self._captures:
            self._captures.add(role)
            with self.simulated():
                self.backend_of(kind).init_cuda_graph_state(most, most * width)
        if kind not in self._static:
            sizes = {"req_pool_indices": most, "seq_lens": most, "positions": most * width}
            sizes["out_cache_loc"] = most * width * num_steps
            made = {name: torch.zeros(size, dtype=torch.int64, device=self.device) for name, size in sizes.items()}
            made["seq_lens_cpu"] = torch.zeros(most, dtype=torch.int64)
            self._static[kind] = made
        return self._static[kind]

    @property
    def pages(self) -> Tensor:
        """[num_pages, page_size, dim] the pool's memory."""
        memory: Tensor = self.runner.token_to_kv_pool.kv_buffer[0]
        return memory.view(-1, self.capacity.page_size, memory.shape[-1])
