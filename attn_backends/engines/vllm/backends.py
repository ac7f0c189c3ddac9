"""The classes after the registered names: what each tells vLLM that it can do."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_backends.backend import AttentionBackend as LibraryBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.engines.vllm.api import (
    AttentionBackend,
    MultipleOf,
    current_platform,
    get_current_vllm_config_or_none,
)
from attn_backends.engines.vllm.builder import Builder
from attn_backends.engines.vllm.impls import GroupedQueryImpl, LatentImpl
from attn_backends.engines.vllm.refusals import (
    ANY_PAGE_SIZE,
    config_reasons,
    kernel_reasons,
    refuse,
    takes_ragged_verifies,
)
from attn_backends.selection.choose import Workload
from spec_metadata import StepKind


class _Registered(AttentionBackend):
    """What all have in common. name: as it is registered. impl: of its layers. block_sizes: of the cache."""

    name: ClassVar[str]
    impl: ClassVar[type[GroupedQueryImpl] | type[LatentImpl]]
    block_sizes: ClassVar[list[Any]]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    def __init_subclass__(cls) -> None:
        """vLLM derives classes from ours whose builder is given other batches than the engine's, before any weight is
        loaded: those of Llama 4's chunks are served, all others refused.
        """
        if cls.get_builder_cls() is not Builder and not cls.__name__.startswith("ChunkedLocalAttention_"):
            refuse(f"{cls.name} in vLLM", [f"attention of the kind {cls.__name__}, which was not tested"])

    @classmethod
    def get_name(cls) -> str:
        """As it is registered."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[GroupedQueryImpl] | type[LatentImpl]:
        """The class of its layers."""
        return cls.impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The class that plans."""
        return Builder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Tokens of a block."""
        return cls.block_sizes

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Whether verifies may be cut on the device."""
        device = torch.device(current_platform.device_type)
        return takes_ragged_verifies(cls.impl.library, device, Workload(ANY_PAGE_SIZE))

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Caches that other engines read or write: none was tried."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        *others: Any,
        **more: Any,
    ) -> str | None:
        """Why an engine is refused, in our words; None if it isn't."""
        config = get_current_vllm_config_or_none()
        return "; ".join(cls.reasons_against(dtype, kv_cache_dtype, block_size) + config_reasons(config)) or None

    @classmethod
    def reasons_against(cls, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None) -> list[str]:
        """Values of a model that are not served, with those that are, where vLLM says only "not supported"; and why no
        kernel of the backend runs here.
        """
        device = torch.device(current_platform.device_type)
        sizes = [f"multiples of {getattr(size, 'base', size)}" for size in cls.block_sizes]
        is_cache = cls.supports_kv_cache_dtype(kv_cache_dtype)
        takes: dict[str, tuple[bool, list[Any]]] = {
            f"block_size {block_size}": (cls.supports_block_size(block_size), sizes),
            f"dtype {dtype}": (cls.supports_dtype(dtype), cls.supported_dtypes),
            f"kv_cache_dtype {kv_cache_dtype}": (is_cache, cls.supported_kv_cache_dtypes),
        }
        wrong = [f"{name} (it takes {', '.join(map(str, known))})" for name, (ok, known) in takes.items() if not ok]
        return wrong + kernel_reasons(cls.impl.library, device, Workload(block_size or ANY_PAGE_SIZE))


def _library(backend: type[LibraryBackend], base: Any) -> Any:
    return type(f"{backend.__name__}{base.__name__}", (base,), {"library": backend, "__module__": __name__})


class FA3(_Registered):
    """`ATTN_BACKENDS_FA3`: grouped-query models on `fa3`."""

    name = "ATTN_BACKENDS_FA3"
    impl = _library(FA3Backend, GroupedQueryImpl)
    block_sizes: ClassVar[list[Any]] = [MultipleOf(16)]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows of layers."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """The rows of block drafts, which see one another."""
        device = torch.device(current_platform.device_type)
        return not kernel_reasons(cls.impl.library, device, Workload(ANY_PAGE_SIZE), [StepKind.DRAFT_BLOCK])


class _OnLatents(_Registered):
    @classmethod
    def is_mla(cls) -> bool:
        """MLA models."""
        return True


class FA3OnLatents(_OnLatents):
    """`ATTN_BACKENDS_FA3_MLA`: MLA models on `fa3`."""

    name = "ATTN_BACKENDS_FA3_MLA"
    impl = _library(FA3Backend, LatentImpl)
    block_sizes: ClassVar[list[Any]] = [MultipleOf(16)]


class TrtllmMLA(_OnLatents):
    """`ATTN_BACKENDS_TRTLLM_MLA`: MLA models on `trtllm_mla`."""

    name = "ATTN_BACKENDS_TRTLLM_MLA"
    impl = _library(TrtllmMLABackend, LatentImpl)
    block_sizes: ClassVar[list[Any]] = [64, 32]


class FlashInferMLA(_OnLatents):
    """`ATTN_BACKENDS_FLASHINFER_MLA`: MLA models on `flashinfer_mla`."""

    name = "ATTN_BACKENDS_FLASHINFER_MLA"
    impl = _library(FlashInferMLABackend, LatentImpl)
    block_sizes: ClassVar[list[Any]] = [MultipleOf(16)]
