"""The parts of SGLang that the driver uses (docs/private-apis.md). Imported where a case runs, never before.

A model runner and a model configuration come from SGLang's own test kit, which its wheel has.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import (
    MLAAttentionCase,
    MockMLAModelRunner,
    TinyMLAModelConfig,
)

__all__ = [
    "CaptureHiddenMode",
    "EagleDraftExtendInput",
    "EagleDraftInput",
    "EagleVerifyInput",
    "ForwardBatch",
    "ForwardMode",
    "MLAAttentionCase",
    "MockMLAModelRunner",
    "RadixAttention",
    "SpeculativeAlgorithm",
    "TinyMLAModelConfig",
    "attention_module",
    "get_context",
    "get_parallel",
    "kit",
    "memory_module",
    "memory_pool",
    "per_step_draft_out_cache_loc",
    "plan_compression",
]


def kit(name: str) -> ModuleType:
    """A module of SGLang's test kit of backends."""
    return import_module(f"sglang.test.kits.attention_unittest.attention_methods.{name}")


def plan_compression(*lens_and_slots: Any, **options: Any) -> Any:
    """SGLang's plan for layers with compressed entries: the slots of ratio 4 are first in it, of ratio 128 fifth."""
    planner = import_module("sglang.kernels.ops.attention.dsv4.metadata_kernel")
    return planner.init_compression_metadata(*lens_and_slots, **options)


def memory_module(name: str) -> ModuleType:
    """One of SGLang's modules of pools."""
    return import_module(f"sglang.srt.mem_cache.{name}")


def attention_module(name: str) -> ModuleType:
    """One of SGLang's modules of backends; the others, which want other packages, are not imported."""
    return import_module(f"sglang.srt.layers.attention.{name}")
