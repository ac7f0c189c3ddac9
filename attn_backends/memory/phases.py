"""The buffers of one backend: of captured phases, and what its kernels' vendors plan into beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from attn_backends.contract.kernel import Kernel, LayerShape
from attn_backends.errors import CaptureError
from attn_backends.kernels.device_memory import room_for
from attn_backends.memory.phase_sets import PhaseSet
from attn_backends.memory.reads import Reads
from attn_backends.memory.static_memory import SharedTable, StaticMemory
from spec_metadata import AnyBucket, Buffers, CacheGeometry, Capacity, Extent, Paging, RequestTable, StepKind
from spec_metadata.buffers import Arena, BufferSpec, Layout, allocation_size
from spec_metadata.capacity import UNIFORM_KINDS

SHARED = "shared"
MOST_LAYOUTS = 1024
"""Layouts of fresh buffers that a backend keeps; with one more it begins anew."""


@dataclass(slots=True, eq=False)
class PhaseMemory:
    """The buffers of one captured phase: uniform steps of a kind and width, or packed rows of a number.

    Its buckets are prefix views; only one of them holds a step at a time. arena: the phase's own. largest: sizes of its
    largest bucket. reads: of the graphs of its buckets. tables: those that it shares with other phases. workspaces:
    what kernels plan into, by kernel and shape of layers. planned: what was captured in it and planned last. within:
    the set whose memory it lies in, None for its own.
    """

    arena: Arena
    largest: Extent
    reads: Reads
    tables: tuple[SharedTable, ...] = field(default=(), repr=False)
    workspaces: dict[Hashable, Arena] = field(default_factory=dict)
    planned: object = None
    within: PhaseSet | None = None

    @property
    def own(self) -> tuple[Arena, ...]:
        """Its arenas without shared tables."""
        return self.arena, *self.workspaces.values()

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The arenas that hold a step: its own, and shared tables."""
        return self.arena, *(table.arena for table in self.tables)

    def view(self, extent: Extent) -> Buffers:
        """The buffers of a bucket."""
        views = {name: tensor for arena in self.arenas for name, tensor in arena.view(extent).items()}
        return Buffers(views, extent)

    def take(self, captured: object) -> None:
        """Hold the step of what was captured in it, None for none yet, in memory that is alive."""
        if self.within is not None:
            self.within.revive()
        self.planned = captured

    def reset(self) -> None:
        """Make the contents those of fresh buffers."""
        for arena in self.arenas:
            arena.reset()

    def renew(self) -> None:
        """Make what is its own that of fresh buffers: another set's lay there."""
        for arena in self.own:
            arena.reset()

    def forget(self) -> None:
        """It holds no step: another set is about to lie there."""
        self.planned = None
        for table in self.tables:
            table.planned.pop(self, None)


@dataclass(eq=False)
class BackendMemory:
    """The memory of a backend's buffers.

    owner: the backend's name. specs: a bucket, and a table of the engine's form -> the static buffers of a captured
    step. kinds: of steps that it has a kernel for. The rest as the backend has it.
    """

    owner: str
    capacity: Capacity
    geometry: CacheGeometry
    device: torch.device
    specs: Callable[[AnyBucket, Paging], tuple[BufferSpec, ...]]
    kinds: Iterable[StepKind]
    tables: StaticMemory
    checking: bool
    _phases: dict[Hashable, PhaseMemory] = field(default_factory=dict, init=False)
    _scratch: dict[str, Arena] = field(default_factory=dict, init=False)
    _layouts: dict[Hashable, Layout] = field(default_factory=dict, init=False)
    _fresh: Arena | None = field(default=None, init=False)

    def extent(self, bucket: AnyBucket) -> Extent:
        """The sizes of a captured step."""
        return Extent.of_bucket(bucket, self.capacity, self.geometry.num_pages)

    def sizes(self, paging: Paging) -> dict[str, dict[str, int]]:
        """Bytes of the static buffers of each uniform phase that can be captured, and of `SHARED` ones. paging: a table
        of the engine's form.
        """
        found: dict[str, dict[str, int]] = {SHARED: {}}
        for kind in self.kinds:
            if kind in UNIFORM_KINDS:
                bucket = self.capacity.bucket(kind, self.capacity.max_bs)
                found[kind] = {}
                for spec in self.specs(bucket, paging):
                    found[SHARED if spec.shared else kind][spec.name] = spec.num_bytes(self.extent(bucket))
        return found

    def phase(self, bucket: AnyBucket, paging: Paging, *, bound: bool, within: PhaseSet | None = None) -> PhaseMemory:
        """The memory of a bucket's phase. bound: whether the engine's table is read in place whatever its form. within:
        the set that the phase is of.
        """
        self.check()
        if bucket.bs > self.capacity.max_bs:
            raise CaptureError(f"bucket ({bucket}) is larger than max_bs={self.capacity.max_bs} of the capacity")
        in_place = bound or isinstance(paging, RequestTable)
        largest = replace(bucket, bs=self.capacity.max_bs)
        key = within, largest, type(paging), in_place and (paging.table.data_ptr(), paging.table.stride())
        if key not in self._phases:
            self._phases[key] = made = self._allocate(largest, paging, in_place and not self.checking, within)
            if within is not None:
                within.members.append(made)
        return self._phases[key]

    def own_bytes(self, bucket: AnyBucket, paging: Paging) -> int:
        """Bytes that a bucket's phase allocates beside shared tables, which it reads in place if it can."""
        largest = replace(bucket, bs=self.capacity.max_bs)
        shares = isinstance(paging, RequestTable) and not self.checking
        own = [spec for spec in self.specs(largest, paging) if not (shares and spec.shared)]
        return allocation_size(own, self.extent(largest), checking=self.checking)

    def of_kernel(self, kernel: Kernel, extent: Extent, phase: PhaseMemory | None, shape: LayerShape) -> Buffers:
        """The workspaces of a kernel for one shape of layers, and its scratch. phase: of a captured step, None of an
        eager one.
        """
        if phase is None:
            own = self.fresh(kernel.name, kernel.workspaces, extent)
        else:
            key = kernel.name, shape
            if key not in phase.workspaces:
                phase.workspaces[key] = self._arena(kernel.workspaces, phase.largest, phase.within)
            own = phase.workspaces[key].view(extent)
        if kernel.name not in self._scratch:
            self._scratch[kernel.name] = Arena(kernel.scratch, extent, self.device)
        return Buffers({**own, **self._scratch[kernel.name].view(extent)}, extent)

    def fresh(self, owner: str, specs: Iterable[BufferSpec], extent: Extent) -> Buffers:
        """Fresh buffers, which `check` looks at until others are made. owner: the backend that declared them, and
        always declares the same.
        """
        if self.checking:
            self._fresh = Arena(specs, extent, self.device, checking=True)
            return self._fresh.view(extent)
        layout = self._layouts.get((owner, extent))
        if layout is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[owner, extent] = Layout(specs, extent)
        return layout.fresh(self.device)

    def check(self) -> None:
        """In checking mode: raise if anybody wrote next to a static buffer, or next to the fresh ones made last."""
        if not self.checking:
            return
        alive = [phase for phase in self._phases.values() if phase.within is None or phase.within.is_alive]
        arenas = [each for phase in alive for each in (*phase.arenas, *phase.workspaces.values())]
        arenas += [] if self._fresh is None else [self._fresh]
        if broken := [name for arena in arenas for name in arena.check_guards()]:
            raise CaptureError(f"{self.owner}: guard words next to {broken} were overwritten")

    def _arena(self, specs: Sequence[BufferSpec], extent: Extent, within: PhaseSet | None) -> Arena:
        """Buffers of their own, or of a set."""
        memory = None if within is None else within.memory(allocation_size(specs, extent, checking=self.checking))
        return Arena(specs, extent, self.device, checking=self.checking, memory=memory)

    def _allocate(self, largest: AnyBucket, paging: Paging, shares: bool, within: PhaseSet | None) -> PhaseMemory:
        """Memory of a phase. shares: its tables with others; in checking mode it does not, so that what a planner
        leaves unwritten shows.
        """
        specs, extent = self.specs(largest, paging), self.extent(largest)
        shared = [spec for spec in specs if shares and spec.shared]
        own = [spec for spec in specs if spec not in shared]
        place = extent, paging, self.device
        missing = [spec for spec in shared if self.tables.find(spec, *place) is None]
        needed = allocation_size(own, extent, checking=self.checking) + allocation_size(missing, extent)
        sizes = {spec.name: spec.num_bytes(extent) for spec in (*own, *missing)}
        with room_for(needed, self.device, lambda found: CaptureError(self._too_large(largest, needed, sizes, found))):
            arena = self._arena(own, extent, within)
            tables = tuple(self.tables.table(spec, *place) for spec in shared)
            return PhaseMemory(arena, extent, Reads(self.device), tables, within=within)

    def _too_large(self, bucket: AnyBucket, needed: int, sizes: Mapping[str, int], found: str) -> str:
        listed = ", ".join(f"{name} {size:,}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
        return (
            f"{self.owner} ({bucket}): static buffers need {needed:,} bytes and {found} ({listed}); lower max_bs or "
            "max_context, take larger pages, or run these steps eagerly"
        )
