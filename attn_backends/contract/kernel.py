"""A kernel of a backend: how it is launched, what it can do, and what its vendor plans before the launch.

Some vendors turn a plan into a schedule first: which block of threads reads which keys. A schedule depends on the shape
of the layers. It is made when a layer of a shape first attends under a metadata, and then renewed with it. That is done
on the device by `refresh`, and on the host by `plan_host` where the vendor plans there (rule R9).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from attn_backends.cache import PagedCache
from attn_backends.contract.capabilities import Capabilities, extras_reasons
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.graphs import is_capturing
from attn_backends.layer import AttentionLayer, AttentionOutput
from spec_metadata import Buffers, BufferSpec, Step, StepKind
from spec_metadata.visibility import HostLens, host_lens

Plan = TypeVar("Plan")


class LayerShape(NamedTuple):
    """The properties of a layer that a vendor's schedule depends on. dtype, cache_dtype: of queries and of the cache's
    entries. window: of a sliding-window layer. variant: what else of a backend's own layers a schedule depends on.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    dtype: torch.dtype
    cache_dtype: torch.dtype
    window: int | None = None
    variant: Hashable = None

    @classmethod
    def of(cls, layer: AttentionLayer, dtype: torch.dtype, cache_dtype: torch.dtype) -> LayerShape:
        """The shape of a layer."""
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
        return cls(*sizes, layer.scale, dtype, cache_dtype, layer.window)


class Schedule:
    """A vendor's schedule of one forward, for layers of one shape; a kernel's own class derives from it."""

    def plan_host(self, lens: HostLens) -> None:
        """Plan on the host from exact lengths. Called before the launches of every new step, never in a capture. What
        it writes it writes in the order of the current stream, on which another step may still read the workspaces.
        Where it raises, captured metadata is refused until its next replay, which plans again.
        """

    def refresh(self) -> None:
        """Plan on the device from the plan's tensors; recordable. Called whenever those were written."""


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled(Generic[Plan]):
    """A plan and what the vendor made of it: what the launch of a kernel with a schedule is given."""

    plan: Plan
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Kernel(Generic[Plan]):
    """One implementation of a backend's attention.

    launch: (q, cache, plan, layer) -> AttentionOutput of the dense part; with a schedule, the plan is a `Scheduled`.
    capabilities: per step kind; a kind that is missing is not supported. unavailable_reasons: why it can't run on a
    device, empty if it can. architectures: major CUDA compute capabilities that it is built for, none if it runs on any
    device. source: what other kernels of the backend are further sources of, such as FlashAttention-3 from another
    package; its name if it stands alone. takes_parts: whether launch takes a `LatentQuery`, too; else its parts are
    joined before. schedule: (plan, shape, buffers) -> Schedule, None for a kernel that is launched on the plan alone.
    workspaces: the buffers that a schedule plans into, one leading row for each forward with a plan of its own. along:
    (planner, plan, shape, workspaces of all forwards) -> whether a captured step's planner writes all schedules from
    now on, by its own launch; None if it never does. scratch: buffers that hold nothing between two launches, one set
    for all launches of a backend, which therefore belong on one stream; of sizes that no step changes. slower_mixed:
    (layer, running requests, rows of prompts) -> why one step of packed rows of both is slower than two; empty if not.
    needs_layers: whether `auto` takes it only where layers are named, as it takes some layers and caches alone.
    """

    name: str
    launch: Callable[[Any, PagedCache, Any, AttentionLayer], AttentionOutput]
    capabilities: Mapping[StepKind, Capabilities]
    unavailable_reasons: Callable[[torch.device], list[str]]
    architectures: frozenset[int] = frozenset()
    source: str = ""
    schedule: Callable[[Plan, LayerShape, Mapping[str, Tensor]], Schedule] | None = None
    workspaces: tuple[BufferSpec, ...] = ()
    along: Callable[[object, Plan, LayerShape, Mapping[str, Tensor]], bool] | None = None
    scratch: tuple[BufferSpec, ...] = ()
    takes_parts: bool = False
    slower_mixed: Callable[[AttentionLayer, int, int], str] = lambda *_: "no measurement has one step as fast as two"
    needs_layers: bool = False

    def attend(self, q: Any, cache: PagedCache, plan: Any, layer: AttentionLayer) -> AttentionOutput:
        """The output of `launch`. Raises `TypeError` if that is no `AttentionOutput`."""
        output = self.launch(q, cache, plan, layer)
        if not isinstance(output, AttentionOutput):
            given = type(output).__name__
            raise TypeError(f"a kernel returns AttentionOutput(out, lse), and kernel {self.name} returned a {given}")
        return output

    def by_name(self) -> Kernel[Plan]:
        """This kernel as it is when requested by name: it takes unnamed layers, too."""
        return replace(self, needs_layers=False) if self.needs_layers else self

    def layer_reasons(
        self,
        kind: StepKind,
        layer: AttentionLayer,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        format: object,
        *,
        is_tree: bool,
    ) -> list[str]:
        """Reasons why a layer is not supported in a step kind, with queries of a type and a cache; empty if it is."""
        able = self.capabilities[kind]
        reasons = able.layer_reasons(layer, dtype, cache_dtype) + extras_reasons(layer, format)
        return reasons + (able.tree_reasons(layer) if is_tree else [])

    def bound_reasons(self, kind: StepKind) -> list[str]:
        """Reasons why it can't be planned from an engine's own buffers, whose values the host does not see; empty if it
        can.
        """
        if self.capabilities[kind].needs_host_lens:
            return [f"kernel {self.name} plans lengths on the host, which buffers of the device do not tell"]
        return []

    def host_lens(self, owner: str, step: Step, bs: int, forwards: Iterable[int | None]) -> tuple[HostLens, ...] | None:
        """Lengths for the host planner of each forward, padded to bs requests; None if it plans nothing on the host.
        forwards: as of `spec_metadata.host_lens`. owner: the backend's name. Raises `UnsupportedStepError` for a step
        without exact lengths, `CaptureError` in a capture.
        """
        if step.kind is StepKind.IDLE or not self.capabilities[step.kind].needs_host_lens:
            return None
        if is_capturing():
            raise CaptureError(f"{owner} ({self.name}) plans {step.kind} on the host: do that before the capture")
        if step.seq_lens_cpu is None:
            raise UnsupportedStepError(
                f"{owner} ({self.name}) can't take a {step.kind} step",
                ["it plans on the host and needs exact lengths there"],
                "pass seq_lens_cpu to the step, or choose a kernel without needs_host_lens",
            )
        return tuple(host_lens(step, bs, forward) for forward in forwards)


class Schedules(Generic[Plan]):
    """The schedules of one metadata, by plan and shape of layers: forwards that share a plan share its schedule.

    plans: of the forwards. lens: exact host lengths of each plan, None where the kernel does not need them.
    allocate: shape -> what its schedules plan into, the kernel's workspaces and scratch. planner: what plans a captured
    step, whose launch may write schedules along. needs_lens: whether a replay must plan on the host.
    """

    def __init__(
        self,
        kernel: Kernel[Plan],
        plans: Sequence[Plan],
        lens: Sequence[HostLens] | None,
        allocate: Callable[[LayerShape], Buffers],
        planner: object = None,
    ) -> None:
        self.kernel, self._plans, self._lens, self._allocate = kernel, plans, lens, allocate
        self._made: dict[tuple[int, LayerShape], Scheduled[Plan]] = {}
        self._workspaces: dict[LayerShape, Buffers] = {}
        self._planner = planner
        self._along: set[LayerShape] = set()
        self._named: frozenset[LayerShape] = frozenset()
        self.needs_lens = lens is not None

    @cached_property
    def _place(self) -> list[int]:
        """Of each forward's plan among those that differ."""
        distinct = list({id(plan): None for plan in self._plans})
        return [distinct.index(id(plan)) for plan in self._plans]

    def name(self, shapes: Iterable[LayerShape]) -> None:
        """Plan for layers of these shapes, and refuse all others from now on."""
        shapes = frozenset(shapes)
        for forward, shape in product(range(len(self._plans)), shapes):
            self.planned(forward, shape)
        self._named = shapes

    def planned(self, forward: int, shape: LayerShape) -> Plan | Scheduled[Plan]:
        """The plan of a forward, with the vendor's schedule for layers of a shape if the kernel has one. Raises
        `CaptureError` for a shape that was not named, if any were.
        """
        if self._named and shape not in self._named:
            named = "; ".join(map(str, self._named))
            raise CaptureError(f"a layer of {shape}, which was not named at capture: `layers` had {named}")
        plan = self._plans[forward]
        if self.kernel.schedule is None:
            return plan
        if (key := (self._place[forward], shape)) not in self._made:
            self._made[key] = Scheduled(plan, self._make(plan, *key))
        return self._made[key]

    def plan_host(self, lens: Sequence[HostLens]) -> None:
        """The host half of a replay."""
        assert self._lens is not None, "a kernel that plans on the host has lengths from the first"
        assert len(lens) == len(self._lens), "a replay has the plans of its capture"
        self._lens = lens
        for (place, _), made in self._made.items():
            made.schedule.plan_host(lens[place])

    def refresh(self) -> None:
        """The device half of a replay, but for what the planner wrote along."""
        for (_, shape), made in self._made.items():
            if shape not in self._along:
                made.schedule.refresh()

    def _make(self, plan: Plan, place: int, shape: LayerShape) -> Schedule:
        assert self.kernel.schedule is not None
        if self._lens is not None and is_capturing():
            raise CaptureError(
                f"kernel {self.kernel.name} plans on the host, which a graph can't hold: run the region once with "
                "this metadata before it is captured"
            )
        if shape not in self._workspaces:
            self._workspaces[shape] = self._allocate(shape)
            join = self.kernel.along
            if join and not is_capturing() and join(self._planner, plan, shape, self._workspaces[shape]):
                self._along.add(shape)
        scratch, buffers = {spec.name for spec in self.kernel.scratch}, self._workspaces[shape]
        own = {name: t if name in scratch else t[place] for name, t in buffers.items()}
        schedule = self.kernel.schedule(plan, shape, own)
        if self._lens is not None:
            schedule.plan_host(self._lens[place])
        schedule.refresh()
        return schedule
