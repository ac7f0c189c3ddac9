"""Attention backends for EAGLE speculative decoding: how a step of `spec_metadata` is computed.

Importing this package imports torch, no vendor package, and touches no GPU.
"""

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, KeyValues, Latents, PagedCache, PagedKV, PagedLatent
from attn_backends.contract.capabilities import Capabilities, LseBase
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
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
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.layer import AttentionLayer, AttentionOutput, LatentQuery
from attn_backends.memory.phase_sets import PhaseSet, PhaseSets
from attn_backends.memory.static_memory import StaticMemory
from attn_backends.planning.metadata import ForwardMetadata, Metadata
from attn_backends.registry import get_backend, list_backends
from attn_backends.runner import PassThrough, PerRequest, PerToken, Phase, PhaseRunner, StepResult
from attn_backends.selection.choose import Workload

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
    "CudaGraph",
    "ForwardMetadata",
    "Kernel",
    "KeyValues",
    "LatentQuery",
    "Latents",
    "LayerShape",
    "LseBase",
    "MemoryLimitError",
    "Metadata",
    "PagedCache",
    "PagedKV",
    "PagedLatent",
    "PassThrough",
    "PerRequest",
    "PerToken",
    "Phase",
    "PhaseRunner",
    "PhaseSet",
    "PhaseSets",
    "PlanError",
    "RecordedGraph",
    "Schedule",
    "Scheduled",
    "StaticMemory",
    "StepResult",
    "UnsupportedStepError",
    "Workload",
    "get_backend",
    "list_backends",
]
