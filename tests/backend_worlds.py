"""Backends and the worlds that their tests run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch, ForwardInputs, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import ForwardMetadata, Metadata
from spec_metadata import StepKind
from tests.checks import check_identical

KV, LATENT = CacheFormat.KV, CacheFormat.LATENT
BACKENDS = [
    (FlashInferMLABackend, LATENT, (1, 4, 16, 64)),
    (TrtllmMLABackend, LATENT, (32, 64)),
    (FA3Backend, KV, (1, 4, 16, 64)),
    (FA3Backend, LATENT, (1, 16)),
    (ReferenceBackend, KV, (1, 16)),
    (ReferenceBackend, LATENT, (4,)),
]
MID = [Setup(backend, format, 32) for backend, format, _ in BACKENDS]
GRAPH_KINDS = [StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND]


def ready(setup: Setup) -> tuple[World, ForwardMetadata, ForwardInputs]:
    """A decode step of two requests, planned."""
    world = World(setup)
    scene = Scene(world, Batch(StepKind.DECODE, (5, 3)))
    scene.reset_memory()
    return world, world.backend.init_forward_metadata(scene.step()).at(), scene.inputs()[0]


@contextmanager
def nothing_written(world: World, meta: Metadata | None = None) -> Iterator[None]:
    """Inside, neither the cache nor captured buffers may change."""
    tensors = [world.memory, *(meta.buffers.values() if meta else ())]
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        check_identical("memory", tensor, old)


def assert_refused(world: World, batch: Batch, reason: str) -> None:
    """An eager step that is refused for a reason, with nothing written."""
    scene = Scene(world, batch)
    scene.reset_memory()
    with nothing_written(world), pytest.raises(UnsupportedStepError, match=reason):
        world.backend.init_forward_metadata(scene.step())
