"""Attention backends for EAGLE speculative decoding: how a step of `spec_metadata` is computed.

Importing this package imports torch, no vendor package, and touches no GPU.
"""

from attn_backends.base import AttentionBackend
from attn_backends.cache import CacheFormat, KeyValues, Latents, PagedKV, PagedLatent
from attn_backends.capabilities import Capabilities, LseBase
from attn_backends.errors import (
    AttnBackendsError,
    BackendUnavailableError,
    CaptureError,
    CheckpointError,
    ConfigError,
    MemoryLimitError,
    PlanError,
    UnsupportedStepError,
)
from attn_backends.kernel import Kernel
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.metadata import ForwardMetadata, Metadata
from attn_backends.registry import get_backend, list_backends

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionOutput",
    "AttnBackendsError",
    "BackendUnavailableError",
    "CacheFormat",
    "Capabilities",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "ForwardMetadata",
    "Kernel",
    "KeyValues",
    "Latents",
    "LseBase",
    "MemoryLimitError",
    "Metadata",
    "PagedKV",
    "PagedLatent",
    "PlanError",
    "UnsupportedStepError",
    "get_backend",
    "list_backends",
]
