"""Everything of vLLM that the plug-in uses, imported here alone, of the versions that it was tested with."""

from __future__ import annotations

import vllm

SUPPORTED = ("0.33",)
"""Releases of vLLM whose calls we know, without the patch number."""


def version_reason(installed: str) -> str:
    """The reason why a version of vLLM is refused; empty if it isn't."""
    if ".".join(installed.split(".")[:2]) in SUPPORTED:
        return ""
    return (
        f"vLLM {installed} is installed, and attn_backends was tested with vLLM {', '.join(SUPPORTED)}: its attention "
        "interface changes between releases. Install a supported version"
    )


if reason := version_reason(vllm.__version__):
    raise ImportError(reason)

from vllm.config import (
    VllmConfig,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionLayerBase",
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "MLAAttentionImpl",
    "MultipleOf",
    "VllmConfig",
    "current_platform",
    "get_current_vllm_config",
    "get_current_vllm_config_or_none",
    "get_layers_from_vllm_config",
]
