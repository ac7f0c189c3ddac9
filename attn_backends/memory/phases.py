"""The buffers of one backend: of captured phases, and what its kernels' vendors plan into beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from attn_backends.contract.kernel import Kernel, LayerShape
from attn_backends.errors import CaptureError
from attn_backends.kernels.device_memory import room_for
from attn_backends.memory.static_memory import SharedTable, StaticMemory
from spec_metadata import (
    Arena,
    Bucket,
    Buffers,
    BufferSpec,
    CacheGeometry,
    Capacity,
    Extent,
    Paging,
    RequestTable,
    StepKind,
    TokenBucket,
)
from spec_metadata.buffers import Layout, allocation_size

_CAPTURED = (
    StepKind.DECODE,
    StepKind.DRAFT_DECODE,
    StepKind.DRAFT_BLOCK,
    StepKind.TARGET_VERIFY,
    StepKind.DRAFT_EXTEND,
)
SHARED = "shared"
MOST_LAYOUTS = 1024
"""Layouts of fresh buffers that a backend keeps; with one more it begins anew."""


@dataclass(slots=True, eq=False)
class PhaseMemory:
    """The buffers of one captured phase: uniform steps of a kind and width, or packed rows of a number.

    Its buckets are prefix views, of which one at a time holds a step. arenas: of the phase's own, and shared tables.
    largest: sizes of its largest bucket. workspaces: what kernels plan into, by kernel and shape of layers. planned:
    what was captured in it and planned last. tables: those of arenas that it shares.
    """

    arenas: tuple[Arena, ...]
    largest: Extent
    tables: tuple[SharedTable, ...] = field(default=(), repr=False)
    workspaces: dict[Hashable, Arena] = field(default_factory=dict)
    planned: object = None

    def view(self, extent: Extent) -> Buffers:
        """The buffers of a bucket."""
        views = {name: tensor for arena in self.arenas for name, tensor in arena.view(extent).items()}
        return Buffers(views, extent)

    def reset(self) -> None:
        """Make the contents those of fresh buffers."""
        for arena in self.arenas:
            arena.reset()


@dataclass(eq=False)
class BackendMemory:
    """Where a backend's buffers are.

    owner: the backend's name. specs: a bucket, and a table of the engine's form -> the static buffers of a captured
    step. kinds: of steps that it has a kernel for. The rest as the backend has it.
    """

    owner: str
    capacity: Capacity
    geometry: CacheGeometry
    device: torch.device
    specs: Callable[[Bucket | TokenBucket, Paging], tuple[BufferSpec, ...]]
    kinds: Iterable[StepKind]
    tables: StaticMemory
    checking: bool
    _phases: dict[Hashable, PhaseMemory] = field(default_factory=dict, init=False)
    _scratch: dict[str, Arena] = field(default_factory=dict, init=False)
    _layouts: dict[Hashable, Layout] = field(default_factory=dict, init=False)
    _fresh: Arena | None = field(default=None, init=False)

    def extent(self, bucket: Bucket | TokenBucket) -> Extent:
        """The sizes of a captured step."""
        return Extent.of_bucket(bucket, self.capacity, self.geometry.num_pages)

    def sizes(self, paging: Paging) -> dict[str, dict[str, int]]:
        """Bytes of the static buffers of each uniform phase that can be captured, and of `SHARED` ones. paging: a table
        of the engine's form.
        """
        found: dict[str, dict[str, int]] = {SHARED: {}}
        for kind in self.kinds:
            if kind in _CAPTURED:
                bucket = self.capacity.bucket(kind, self.capacity.max_bs)
                found[kind] = {}
                for spec in self.specs(bucket, paging):
                    found[SHARED if spec.shared else kind][spec.name] = spec.num_bytes(self.extent(bucket))
        return found

    def phase(self, bucket: Bucket | TokenBucket, paging: Paging, *, bound: bool) -> PhaseMemory:
        """The memory of a bucket's phase. bound: whether the engine's table is read in place whatever its form."""
        self.check()
        in_place = bound or isinstance(paging, RequestTable)
        largest = replace(bucket, bs=self.capacity.max_bs)
        key = largest, type(paging), in_place and (paging.table.data_ptr(), paging.table.stride())
        if key not in self._phases:
            self._phases[key] = self._allocate(largest, paging, in_place and not self.checking)
        return self._phases[key]

    def of_kernel(self, kernel: Kernel, extent: Extent, phase: PhaseMemory | None, shape: LayerShape) -> Buffers:
        """The workspaces of a kernel for one shape of layers, and its scratch. phase: of a captured step, None of an
        eager one.
        """
        if phase is None:
            own = self.fresh(kernel.name, kernel.workspaces, extent)
        else:
            key = kernel.name, shape
            if key not in phase.workspaces:
                made = Arena(kernel.workspaces, phase.largest, self.device, checking=self.checking)
                phase.workspaces[key] = made
            own = phase.workspaces[key].view(extent)
        if kernel.name not in self._scratch:
            self._scratch[kernel.name] = Arena(kernel.scratch, extent, self.device)
        return Buffers({**own, **self._scratch[kernel.name].view(extent)}, extent)

    def fresh(self, owner: str, specs: Iterable[BufferSpec], extent: Extent) -> Buffers:
        """Fresh buffers, which `check` looks at until others are made. owner: whose they are, which always declares the
        same.
        """
        if self.checking:
            self._fresh = Arena(specs, extent, self.device, checking=True)
            return self._fresh.view(extent)
        key = owner, extent
        if key not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = Layout(specs, extent)
        return self._layouts[key].fresh(self.device)

    def check(self) -> None:
        """In checking mode: raise if anybody wrote next to a static buffer, or next to the fresh ones made last."""
        if not self.checking:
            return
        arenas = [each for phase in self._phases.values() for each in (*phase.arenas, *phase.workspaces.values())]
        arenas += [] if self._fresh is None else [self._fresh]
        if broken := [name for arena in arenas for name in arena.check_guards()]:
            raise CaptureError(f"{self.owner}: guard words next to {broken} were overwritten")

    def _allocate(self, largest: Bucket | TokenBucket, paging: Paging, shares: bool) -> PhaseMemory:
        """Memory of a phase. shares: its tables with others; in checking mode it does not, so that what a planner
        leaves unwritten shows.
        """
        specs, extent = self.specs(largest, paging), self.extent(largest)
        shared = [spec for spec in specs if shares and spec.shared]
        own = [spec for spec in specs if spec not in shared]
        place = extent, paging, self.device
        missing = [spec for spec in shared if not self.tables.holds(spec, *place)]
        needed = allocation_size(own, extent, checking=self.checking) + allocation_size(missing, extent)
        sizes = {spec.name: spec.num_bytes(extent) for spec in (*own, *missing)}
        with room_for(needed, self.device, lambda found: CaptureError(self._too_large(largest, needed, sizes, found))):
            arena = Arena(own, extent, self.device, checking=self.checking)
            tables = tuple(self.tables.table(spec, *place) for spec in shared)
            return PhaseMemory((arena, *(table.arena for table in tables)), extent, tables)

    def _too_large(self, bucket: Bucket | TokenBucket, needed: int, sizes: Mapping[str, int], found: str) -> str:
        listed = ", ".join(f"{name} {size:,}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
        return (
            f"{self.owner} ({bucket}): static buffers need {needed:,} bytes and {found} ({listed}); lower max_bs or "
            "max_context, take larger pages, or run these steps eagerly"
        )
