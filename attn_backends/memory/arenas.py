"""The buffers of one backend: of captured steps in static memory, and what its kernels' vendors plan into beside it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

import torch

from attn_backends.contract.kernel import Held, Kernel, LayerShape, Workspaces
from attn_backends.errors import CaptureError
from attn_backends.memory.static_memory import StaticMemory
from spec_metadata import (
    Arena,
    Bucket,
    Buffers,
    BufferSpec,
    CacheGeometry,
    Capacity,
    Extent,
    Paging,
    StepKind,
    TokenBucket,
)
from spec_metadata.buffers import allocation_size

_CAPTURED = (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)


@dataclass(eq=False)
class Arenas:
    """Where a backend's buffers lie. Uniform buckets of a kind are prefix views of one arena; a bucket of packed rows
    has its own, because there is no largest. Captured phases whose vendors' workspaces are of one size plan into the
    same, one after the other as in static memory.

    owner: the backend's name. specs: a bucket, and a table of the engine's form -> the static buffers of a captured
    step. kinds: of steps that it has a kernel for. The rest as the backend has it.
    """

    owner: str
    capacity: Capacity
    geometry: CacheGeometry
    device: torch.device
    specs: Callable[[Bucket | TokenBucket, Paging], tuple[BufferSpec, ...]]
    kinds: Iterable[StepKind]
    memory: StaticMemory
    checking: bool
    _captured: dict[tuple[Bucket | TokenBucket, type], Arena] = field(default_factory=dict, init=False)
    _workspaces: dict[Hashable, tuple[Arena, Held]] = field(default_factory=dict, init=False)
    _scratch: dict[str, Arena] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.memory.join(self._largest_phase)

    def extent(self, bucket: Bucket | TokenBucket) -> Extent:
        """The sizes of a captured step."""
        return Extent.of_bucket(bucket, self.capacity, self.geometry.num_pages)

    def largest_buckets(self) -> list[Bucket]:
        """The largest bucket of each phase that can be captured."""
        return [self.capacity.bucket(kind, self.capacity.max_bs) for kind in self.kinds if kind in _CAPTURED]

    def sizes(self, paging: Paging) -> dict[StepKind, dict[str, int]]:
        """Bytes of the static buffers of each phase that can be captured. paging: a table of the engine's form."""
        buckets = self.largest_buckets()
        return {b.kind: {spec.name: spec.num_bytes(self.extent(b)) for spec in self.specs(b, paging)} for b in buckets}

    def captured(self, bucket: Bucket | TokenBucket, paging: Paging) -> Arena:
        """The arena of a bucket in static memory, as it was allocated; what else lay in the memory is lost."""
        self.check()
        self.memory.let_to(None)
        largest = replace(bucket, bs=self.capacity.max_bs)
        key = (largest, type(paging))
        if key not in self._captured:
            specs, extent = self.specs(largest, paging), self.extent(largest)
            size = allocation_size(specs, extent, checking=self.checking)
            sizes = {spec.name: spec.num_bytes(extent) for spec in specs}
            block = self.memory.block(f"{self.owner} ({largest})", size, sizes, paging, self.device)
            self._captured[key] = Arena(specs, extent, self.device, checking=self.checking, memory=block)
        else:
            self._captured[key].reset()
        return self._captured[key]

    def of_kernel(
        self, kernel: Kernel, extent: Extent, bucket: Bucket | TokenBucket | None, shape: LayerShape
    ) -> Workspaces:
        """What a kernel plans into for one shape of layers, and its scratch. bucket: of a captured step, None of an
        eager one. Beside the static memory: the host plans into it too.
        """
        if bucket is None:
            own, held = Arena(kernel.workspaces, extent, self.device), Held()
        else:
            largest = self.extent(replace(bucket, bs=self.capacity.max_bs))
            key = kernel.name, shape, tuple(spec.sizes(largest) for spec in kernel.workspaces)
            if key not in self._workspaces:
                made = Arena(kernel.workspaces, largest, self.device, checking=self.checking)
                self._workspaces[key] = made, Held()
            own, held = self._workspaces[key]
        if kernel.name not in self._scratch:
            self._scratch[kernel.name] = Arena(kernel.scratch, extent, self.device)
        buffers = {**own.view(extent), **self._scratch[kernel.name].view(extent)}
        return Workspaces(Buffers(buffers, extent), held)

    def check(self) -> None:
        """In checking mode: raise if anybody wrote next to a static buffer."""
        tenant = self.memory.tenant
        workspaces = (arena for arena, _ in self._workspaces.values())
        self.check_guards([*workspaces, *([tenant.arena] if tenant else [])])

    def check_guards(self, arenas: Iterable[Arena]) -> None:
        """In checking mode: raise if anybody wrote next to a buffer of these."""
        broken = [name for arena in arenas for name in arena.check_guards()] if self.checking else []
        if broken:
            raise CaptureError(f"{self.owner}: guard words next to {broken} were overwritten")

    def _largest_phase(self, paging: Paging) -> int:
        """Bytes of static memory that the largest phase of the capacity takes."""
        buckets = self.largest_buckets()
        sizes = [allocation_size(self.specs(b, paging), self.extent(b), checking=self.checking) for b in buckets]
        return max(sizes, default=0)
