"""The parts of vLLM that the driver uses (docs/private-apis.md). Imported where a case runs, never before."""

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform

_GPU = "vllm.v1.worker.gpu"
_SPECULATOR = f"{_GPU}.spec_decode.target_dependent_ar.speculator"
NAMES = {
    "BlockTables": f"{_GPU}.block_table",
    "CUDAGraphMode": "vllm.config",
    "CommonAttentionMetadata": "vllm.v1.attention.backend",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "InputBatch": f"{_GPU}.input_batch",
    "InputBuffers": f"{_GPU}.input_batch",
    "MLAAttentionSpec": "vllm.v1.kv_cache_interface",
    "buffer_utils": _GPU,
    "fa_utils": "vllm.v1.attention.backends",
    "get_block_table_width": "vllm.v1.worker.block_table",
    "prepare_decode_inputs": _SPECULATOR,
    "prepare_pos_seq_lens": f"{_GPU}.input_batch",
    "update_draft_inputs": _SPECULATOR,
}
"""Names, and the modules that have them, which are imported once their platform is chosen."""


class Platform(CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform without its compiled kernels, which nothing calls here."""

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to import."""


def on(device: torch.device, stand_ins: ModuleType) -> Any:
    """vLLM's names. On a CPU its platform is chosen before anything else of it is imported, there is no memory that
    both sides address, and the compiled writer of latents is a stand-in.
    """
    if device.type == "cpu":
        platforms._current_platform = Platform()
    names = SimpleNamespace(**{name: _found(module, name) for name, module in NAMES.items()})
    if device.type == "cpu":
        names.buffer_utils.is_uva_available = lambda: False
        _found("vllm", "_custom_ops").concat_and_cache_mla = stand_ins.concat_and_cache_mla
    return names


def backend_module(name: str) -> Any:
    """One of vLLM's modules of backends; the others, which want other packages, are not imported."""
    return import_module(f"vllm.v1.attention.backends.{name}")


def _found(module: str, name: str) -> Any:
    found = import_module(module)
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")
