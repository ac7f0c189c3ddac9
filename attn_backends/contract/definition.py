"""The definition of a backend: what its author writes. What engines call follows from it (`AttentionBackend`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic

import torch

from attn_backends.cache import CacheFormat
from attn_backends.contract.kernel import Kernel, Plan
from spec_metadata import BoundStep, Buffers, BufferSpec, CacheGeometry, Capacity, Step, StepKind


class BackendDefinition(ABC, Generic[Plan]):
    """The part of a backend that its author defines, in a class that derives from `AttentionBackend`.

    name: for messages and results. formats: of caches that it reads. kernels: best first. prefix_only: whether the
    forwards of a draft share one plan, of the committed tokens alone, and read drafted tokens by slot, in a chain too.
    Then `buffers`, `plans` and `write`, and with a fused planner `bind_fused`. They may read capacity, geometry and
    device: of the engine that it was built for.
    """

    capacity: Capacity
    geometry: CacheGeometry
    device: torch.device

    name: ClassVar[str]
    formats: ClassVar[frozenset[CacheFormat]]
    kernels: ClassVar[tuple[Kernel, ...]]
    prefix_only: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """The declared buffers of a step kind, of all forwards."""

    @classmethod
    def page_multiple(cls) -> int:
        """Tokens that every page size must be a multiple of, whatever the kernel."""
        return 1

    @abstractmethod
    def plans(self, step: Step, buffers: Buffers) -> tuple[Plan, ...]:
        """The plan of each forward of a step, as views of buffers that `write` fills. Host only, no device work."""

    @abstractmethod
    def write(self, step: Step, buffers: Buffers) -> None:
        """Write the metadata of all forwards into buffers. Device only, fixed shapes, no host reads."""

    @classmethod
    def has_fused(cls) -> bool:
        """Whether it has a fused planner."""
        return cls.bind_fused is not BackendDefinition.bind_fused

    def bind_fused(self, step: Step, buffers: Buffers, bound: BoundStep | None) -> Callable[[], None]:
        """A launch that reads a bound step and writes its plan and write slots; it may be repeated, and recorded."""
        raise NotImplementedError(f"{self.name} has no fused planner")
