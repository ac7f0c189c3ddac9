"""vLLM's CPU platform as a test needs it, an out-of-tree platform. Each override undoes something, and says what."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

GRAPHS = "ATTN_BACKENDS_TESTS_GRAPHS"
"""1 where an engine, in any of its processes, captures full graphs and pieces, as recorded graphs."""


def captures_graphs() -> bool:
    """As of `GRAPHS`."""
    return os.environ.get(GRAPHS) == "1"


def plugin() -> str:
    """Entry point of `vllm.platform_plugins`."""
    return "tests.engines.vllm.platform.Platform"


class Platform(CpuPlatform):
    """What is not overridden is vLLM's own."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """CpuPlatform ignores the name and takes CPU_ATTN or CPU_MLA. Here it counts, and is validated as CUDA's is."""
        backend = selected_backend.get_class()
        capability = DeviceCapability(major=9, minor=0)
        reasons = backend.validate_configuration(device_capability=capability, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {selected_backend} is not valid for this configuration. {reasons}")
        return selected_backend.get_path()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """CpuPlatform forces on MLA, for its own kernel, pages of 16 without chunked prefill or a prefix cache, forbids
        sizes of graphs and asynchronous scheduling, and takes a worker and operators that are compiled.
        """
        cache, scheduler, compilation = (
            vllm_config.cache_config, vllm_config.scheduler_config, vllm_config.compilation_config,
        )  # fmt: skip
        kept = cache.block_size, cache.enable_prefix_caching, scheduler.enable_chunked_prefill
        is_async = scheduler.async_scheduling
        tokens, sizes = scheduler.max_num_batched_tokens, compilation.cudagraph_capture_sizes
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "tests.engines.vllm.worker.Worker"
        super().check_and_update_config(vllm_config)
        cache.block_size, cache.enable_prefix_caching, scheduler.enable_chunked_prefill = kept
        scheduler.async_scheduling = is_async
        scheduler.max_num_batched_tokens, compilation.cudagraph_capture_sizes = tokens, sizes
        compilation.custom_ops = ["none"]  # vLLM's own definitions in torch
        vllm_config.kernel_config.enable_jit_warmup = False  # it samples by a kernel that Triton can't interpret

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """CpuPlatform has no graphs; here recorded ones stand in for CUDA's (recorded_graphs.py)."""
        return captures_graphs()

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """CpuPlatform calls attention by an operator that looks for its layer; a graph must see inside."""
        return False

    @classmethod
    def get_global_graph_pool(cls) -> None:
        """Recorded graphs have no pool."""

    @classmethod
    def import_kernels(cls) -> None:
        """CpuPlatform imports its compiled extension (stand_ins.py)."""
