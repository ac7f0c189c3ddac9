"""Differences between vLLM's backends: their modules and classes, their missing kernels, and their metadata."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from attn_backends.conformance.foreign.pages import Rows, leading_slots, seen_by_rows
from attn_backends.conformance.foreign.vllm import stand_ins


def _side_by_side(cache: Tensor) -> tuple[Tensor, Tensor]:
    """[num_blocks, block_size, num_kv_heads, dim] keys and values, where the value of a token lies right after its key.

    cache: [num_blocks, num_kv_heads, block_size, 2 * dim].
    """
    keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values


def _keys_first(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The same, where a block has all of a head's keys before its values."""
    blocks, heads, size, width = cache.shape
    keys, values = cache.view(blocks, heads, 2 * size, width // 2).chunk(2, dim=2)
    return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass(frozen=True)
class Parts:
    """One of vLLM's backends.

    name: as of `--attention-backend`. module: where it is, as of `api.backend_module`. builder, impl: names of its
    classes there. prepare: what its module needs to be imported on a CPU. install: puts stand-ins of its kernels in
    place. attributes: of an impl, made without its constructor. halves: keys and values of a cache that has them.
    """

    name: str
    module: str
    builder: str
    impl: str
    install: Callable[[Any], None]
    prepare: Callable[[Any], None] = stand_ins.nothing
    attributes: dict[str, Any] = field(default_factory=dict)
    halves: Callable[[Tensor], tuple[Tensor, Tensor]] = _side_by_side


MOST_TOKENS = 8192  # that a server schedules at once


@dataclass(frozen=True)
class Listed:
    """Tensors of vLLM's metadata. starts: [bs + 1]. table: [bs, max_blocks]. lens: [bs]."""

    starts: Tensor
    table: Tensor
    lens: Tensor

    @classmethod
    def of(cls, planned: Any) -> Listed:
        """The tensors of metadata, which those of MLA keep for decodes apart; of a right backend's batch."""
        part = getattr(planned, "decode", None) or planned
        table = part.block_table_tensor if hasattr(part, "block_table_tensor") else part.block_table
        return cls(planned.query_start_loc, table, part.seq_lens)

    def copied(self) -> Listed:
        """A copy of the tensors."""
        return Listed(self.starts.clone(), self.table.clone(), self.lens.clone())

    def rows(self, block_size: int) -> Rows:
        """The slots that each row attends to. Reads the device."""
        found: Rows = []
        for blocks, length, width in zip(
            self.table.tolist(), self.lens.tolist(), self.starts.diff().tolist(), strict=True
        ):
            found += seen_by_rows(leading_slots(blocks, block_size, length), width)
        return found


def _install_flashmla(module: Any) -> None:
    module.get_mla_metadata = lambda *args, **named: (SimpleNamespace(), None)
    module.flash_mla_with_kvcache = stand_ins.flash_mla_with_kvcache


def _prepare_flash_attention(api: Any) -> None:
    """vLLM's builds of FlashAttention are not there: its module would be imported without their names."""
    names = ("get_scheduler_metadata", "compile_flash_attn_varlen_func_from_specs", "reshape_and_cache_flash")
    for name in names:
        setattr(api.fa_utils, name, stand_ins.nothing)
    api.fa_utils.flash_attn_varlen_func = stand_ins.flash_attn_varlen_func
    api.fa_utils.is_flash_attn_varlen_func_available = lambda: True


def _install_flash_attention(module: Any) -> None:
    module.get_flash_attn_version = lambda *args, **named: 3
    module.get_scheduler_metadata = stand_ins.scheduler_metadata
    module.flash_attn_varlen_func = stand_ins.flash_attn_varlen_func


def _prepare_flashinfer(api: Any) -> None:
    """FlashInfer without a kernel: modules with the names that are imported from them."""
    package: Any = ModuleType("flashinfer")
    package.__path__, package.__spec__ = [], ModuleSpec("flashinfer", None)
    decode: Any = ModuleType("flashinfer.decode")
    decode.trtllm_batch_decode_with_kv_cache_mla = stand_ins.trtllm_batch_decode_with_kv_cache_mla
    utils: Any = ModuleType("flashinfer.utils")
    utils.get_device_sm_count = utils.get_trtllm_gen_multi_ctas_kv_counter_bytes = lambda *args: 1
    sys.modules |= {module.__name__: module for module in (package, decode, utils)}


def _install_triton_mla(module: Any) -> None:
    module.decode_attention_fwd = stand_ins.decode_attention_fwd


def _install_triton(module: Any) -> None:
    module.triton_reshape_and_cache_flash = stand_ins.reshape_and_cache_flash
    module.unified_attention = stand_ins.flash_attn_varlen_func


def _install_flash_attention_of_keys(module: Any) -> None:
    _install_flash_attention(module)
    module.reshape_and_cache_flash = stand_ins.reshape_and_cache_flash
    module._FA4_DENSE_ATTENTION_KERNEL = stand_ins.flash_attn_varlen_func


def _install_cpu_attention(module: Any) -> None:
    module.ops.cpu_attn_get_scheduler_metadata = stand_ins.nothing
    module.ops.cpu_attn_reshape_and_cache = stand_ins.cpu_attn_reshape_and_cache
    module.ops.cpu_attention_with_kv_cache = stand_ins.cpu_attention_with_kv_cache


FLASHMLA = Parts("FLASHMLA", "mla.flashmla", "FlashMLAMetadataBuilder", "FlashMLAImpl", _install_flashmla)
FLASH_ATTN_MLA = Parts(
    "FLASH_ATTN_MLA",
    "mla.flashattn_mla",
    "FlashAttnMLAMetadataBuilder",
    "FlashAttnMLAImpl",
    _install_flash_attention,
    _prepare_flash_attention,
)
TRITON_MLA = Parts(
    "TRITON_MLA",
    "mla.triton_mla",
    "TritonMLAMetadataBuilder",
    "TritonMLAImpl",
    _install_triton_mla,
)
FLASHINFER_MLA = Parts(
    "FLASHINFER_MLA",
    "mla.flashinfer_mla",
    "FlashInferMLAMetadataBuilder",
    "FlashInferMLAImpl",
    stand_ins.nothing,
    _prepare_flashinfer,
    {"bmm1_scale": None, "bmm2_scale": None, "_mla_counter_max_batch": MOST_TOKENS, "_mla_counter_bytes": None},
)
PLAIN = {"alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "attn_type": "decoder"}
"""Of a layer without extras."""
TRITON_ATTN = Parts(
    "TRITON_ATTN",
    "triton_attn",
    "TritonAttentionMetadataBuilder",
    "TritonAttentionImpl",
    _install_triton,
    attributes={
        **PLAIN,
        **dict.fromkeys(("_is_per_token_head_quant", "_set_kv_ptr_range", "use_alibi_sqrt", "use_td"), False),
        "_kv_quant_mode": 0,
        "chunk_lookback": -1,
        "sliding_window": (-1, -1),
    },
)
FLASH_ATTN = Parts(
    "FLASH_ATTN",
    "flash_attn",
    "FlashAttentionMetadataBuilder",
    "FlashAttentionImpl",
    _install_flash_attention_of_keys,
    _prepare_flash_attention,
    {
        **PLAIN,
        **dict.fromkeys(("fa4_hd256", "supports_quant_query_input"), False),
        "sliding_window": (-1, -1),
        "vllm_flash_attn_version": 3,
    },
)
CPU_ATTN = Parts(
    "CPU_ATTN",
    "cpu_attn",
    "CPUAttentionMetadataBuilder",
    "CPUAttentionBackendImpl",
    _install_cpu_attention,
    attributes={**PLAIN, "sliding_window": -1, "use_zentorch_sdpa": False},
    halves=_keys_first,
)
