"""A driver whose project has a server: one object makes what attention meets of it, and steps are planned with that."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedLatent
from attn_backends.conformance.foreign.driver import ForeignBackend, ForeignStep
from attn_backends.conformance.foreign.pages import copy_pages
from attn_backends.layer import AttentionLayer
from spec_metadata import Bucket, CacheGeometry, Capacity, Step


class ServedBackend(ForeignBackend):
    """A backend of a server. right: whether what is driven is right instead (`control`). parts: of the backend.
    engine_type: of its server. eager_type, captured_type: of its steps. cpu_environment: of its process without a GPU.
    """

    parts: ClassVar[Any]
    right: ClassVar[bool] = False
    engine_type: ClassVar[type[Any]]
    eager_type: ClassVar[type[Any]]
    captured_type: ClassVar[type[Any]]
    cpu_environment: ClassVar[dict[str, str]]

    def __init__(
        self, capacity: Capacity, geometry: CacheGeometry, device: torch.device | str = "cpu", **options: Any
    ) -> None:
        super().__init__(capacity, geometry, device, **options)
        names = {choice.kernel.name for choice in self.choices.values()}
        own = not any(name.startswith("stand_in") for name in names)
        place = capacity, geometry, self.device, *self.model_on(self.device)
        self.engine = self.engine_type(self.parts, *place, has_kernels=own, right=self.right)

    @classmethod
    @abstractmethod
    def model_on(cls, device: torch.device) -> tuple[torch.dtype, AttentionLayer]:
        """The type and the layer of the model that is served on a device."""

    @staticmethod
    def pages_of(cache: Any) -> Tensor:
        """[num_pages, ...] the memory of the suite's cache, as the pool's: [num_pages, page_size, dim] of latents."""
        assert isinstance(cache, PagedLatent), "it takes no other format"
        return cache.latent

    def pairs(self, cache: PagedCache) -> list[tuple[Tensor, Tensor]]:
        """The parts of the suite's cache, each with the pool's of the same shape, pages first."""
        return [(self.pages_of(cache), self.engine.pages)]

    @classmethod
    def control(cls) -> type[ForeignBackend]:
        """The same driver in front of a backend that is right."""
        return type(cls.__name__, (cls,), {"right": True, "__module__": cls.__module__})

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """On a CPU, the project's own kernels of metadata run in Triton's interpreter."""
        return {} if torch.device(device).type == "cuda" else cls.cpu_environment

    def plan_eagerly(self, step: Step) -> ForeignStep:
        """A batch of a server without graphs."""
        planned: ForeignStep = self.eager_type(self.engine, step)
        return planned

    def plan_captured(self, bucket: Bucket) -> ForeignStep:
        """A batch over a graph runner's buffers."""
        planned: ForeignStep = self.captured_type(self.engine, bucket, self.capacity.num_steps)
        return planned

    def bring_in(self, cache: PagedCache) -> None:
        """Copy the cache into the pool, whose page 0 is the reserved one."""
        for ours, theirs in self.pairs(cache):
            copy_pages(ours, theirs, self.geometry.reserved_page)

    def bring_out(self, cache: PagedCache) -> None:
        """Copy the pool into the cache."""
        for ours, theirs in self.pairs(cache):
            copy_pages(theirs, ours, self.geometry.reserved_page)
