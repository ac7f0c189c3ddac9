"""A driver: it runs the suite on a backend that has its own metadata interface.

To the suite a driver is an `AttentionBackend`. It declares no buffers and plans nothing itself: it builds the other
project's batch object from a `Step`, makes the calls that the other project's runner makes, and has that project's pool
store. The pool is another memory than the suite's cache, so every call brings the cache there and back.

A driver may be wrong as well. So it names a `control`, the same driver in front of a backend that is right and has the
same interface. What fails there too is the driver's mistake (`blame`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheInputs, PagedCache
from attn_backends.contract.kernel import LayerShape, Schedule, Scheduled
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionLayer, AttentionOutput, LatentQuery
from attn_backends.memory.phase_sets import PhaseSet
from attn_backends.planning.metadata import ForwardMetadata, Metadata
from spec_metadata import AnyBucket, BoundInputs, Bucket, Buffers, BufferSpec, Paging, Step, StepKind

NOWHERE = -1  # in place of a slot: the length counts it, and the table ends before it


@dataclass(frozen=True)
class Handed:
    """Slots that a pool was handed. stride: of the tensor. dense: what who ignores its stride reads instead."""

    slots: list[int]
    stride: int
    dense: list[int]

    @classmethod
    def of(cls, tensor: Tensor, translated: Callable[[Tensor], Tensor]) -> Handed:
        """The slots of a tensor [num_tokens]. translated: into the suite's numbers."""
        dense = tensor.as_strided(tensor.shape, (1,)) if tensor.numel() else tensor
        return cls(translated(tensor).tolist(), tensor.stride(0), translated(dense).tolist())


@dataclass(frozen=True)
class LatentSlots:
    """Slots of a forward's rows that no layer here writes by, in a field of the metadata.

    block: tokens that one entry stands for. slots: of each row, that of its token; of an entry, that of its block's
    first token, `NOWHERE` for a row that ends no block.
    """

    name: str
    slots: list[int]
    block: int = 1


class ForeignStep(ABC):
    """A step that the other project has planned, eagerly or for a graph. All slots here are the suite's."""

    @abstractmethod
    def load(self, step: Step) -> None:
        """Make a captured step another one, as the runner does before a replay."""

    @abstractmethod
    def begin(self, forward: int) -> None:
        """Run the engine's work on the device before a forward; recorded into a graph."""

    @abstractmethod
    def store(self, forward: int, inputs: CacheInputs, layer: AttentionLayer) -> None:
        """Have the pool store the rows of a forward."""

    @abstractmethod
    def attend(self, forward: int, q: Tensor, layer: AttentionLayer) -> Tensor:
        """[num_tokens, num_heads, v_head_dim] the output of a forward. q: [num_tokens, num_heads, head_dim]."""

    @abstractmethod
    def read_slots(self, forward: int) -> list[list[int]] | None:
        """Slots in the metadata that each row of a forward attends to, its own token last, `NOWHERE` where a slot is
        not named; None if they are not known. Reads the device.
        """

    @abstractmethod
    def handed_slots(self, forward: int) -> Handed:
        """The slots that the pool has to write in a forward."""

    def latent_slots(self, forward: int) -> list[LatentSlots]:
        """Slots in the metadata to which other layers, which are not driven here, write a forward's latents."""
        return []


@dataclass(slots=True, eq=False)
class Held:
    """Holds a step's plan once it is made; None of a step without requests."""

    step: ForeignStep | None = None


@dataclass(frozen=True, slots=True)
class ForeignPlan:
    """One forward of a foreign step."""

    held: Held
    forward: int

    @property
    def step(self) -> ForeignStep:
        """The step."""
        assert self.held.step is not None, "a step with rows was planned"
        return self.held.step


def first_use(plan: ForeignPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> Schedule:
    """The `Kernel.schedule` of a foreign kernel, an empty one: a first forward compiles, which no graph may hold."""
    return Schedule()


def launch(q: Tensor, cache: PagedCache, planned: Scheduled[ForeignPlan], layer: AttentionLayer) -> AttentionOutput:
    """The `Kernel.launch` of a foreign kernel, which declares no log-sum-exp."""
    plan = planned.plan
    out = plan.step.attend(plan.forward, q, layer)
    return AttentionOutput(out, out.new_zeros(out.shape[:2]))


@dataclass(frozen=True)
class Exempt:
    """Checks that a driver does not run. checks: patterns of ids. reason: why."""

    checks: tuple[str, ...]
    reason: str


DECLARED = Exempt(
    (
        "plan.*",
        "graph.stable_addresses",
        "graph.guards",
        "graph.bound_inputs",
        "graph.stale_*",
        "poison.stale_buffers",
        "poison.workspaces",
    ),
    "they are about buffers that a backend declares, and this one declares none",
)
ONE_STEP = Exempt(
    ("api.keeps_no_state", "graph.keeps_no_memory", "*.sets_*"),
    "the backend keeps what it planned in memory of its own, and of one step at a time",
)
OURS = Exempt(("worker.*", "refusals.*"), "they are about this library's own classes")


class ForeignBackend(AttentionBackend[ForeignPlan], ABC):
    """A backend of another project, adapted to the contract. project: its name. exempt: what is not run on it."""

    project: ClassVar[str]
    exempt: ClassVar[tuple[Exempt, ...]] = (DECLARED, ONE_STEP, OURS)

    @classmethod
    @abstractmethod
    def control(cls) -> type[ForeignBackend]:
        """This driver in front of a backend and a pool that are right."""

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """Environment variables of the process that its cases run in."""
        return {}

    @abstractmethod
    def plan_eagerly(self, step: Step) -> ForeignStep:
        """Plan a step, as the runner does where no graph runs."""

    @abstractmethod
    def plan_captured(self, bucket: Bucket) -> ForeignStep:
        """Plan a graph's batch, as the runner does before it captures one."""

    @abstractmethod
    def bring_in(self, cache: PagedCache) -> None:
        """Make the pool hold what the suite's cache holds. Device only, in fixed shapes."""

    @abstractmethod
    def bring_out(self, cache: PagedCache) -> None:
        """Make the suite's cache hold what the pool holds. Device only, in fixed shapes."""

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """No buffers: the other project has its own."""
        return ()

    def plans(self, step: Step, buffers: Buffers) -> tuple[ForeignPlan, ...]:
        """A place for each forward's plan."""
        held = Held()
        return tuple(ForeignPlan(held, forward) for forward in range(step.num_forwards))

    def write(self, step: Step, buffers: Buffers) -> None:
        """Nothing: the other project plans."""

    def init_forward_metadata(self, step: Step) -> Metadata[ForeignPlan]:
        """Metadata of an eager step."""
        meta = super().init_forward_metadata(step)
        if step.kind is not StepKind.IDLE and step.bs:
            _held(meta).step = self.plan_eagerly(step)
        return meta

    def capture(
        self,
        bucket: AnyBucket,
        paging: Paging,
        inputs: BoundInputs | None = None,
        within: PhaseSet | None = None,
        layers: Iterable[LayerShape] = (),
    ) -> Metadata[ForeignPlan]:
        """Metadata of a graph."""
        if within is not None:
            reasons = ["a set of phases (the other project has memory of its own)"]
            raise UnsupportedStepError(self.name, reasons, "capture without a set")
        meta = super().capture(bucket, paging, inputs, layers=layers)
        assert isinstance(bucket, Bucket), "foreign kernels declare no graphs of packed rows"
        _held(meta).step = self.plan_captured(bucket)
        return meta

    def copy_inputs(self, meta: Metadata[ForeignPlan], step: Step) -> None:
        """Bring captured metadata another step."""
        super().copy_inputs(meta, step)
        foreign = _held(meta).step
        assert foreign is not None, "captured metadata has a plan"
        foreign.load(step)

    def store(
        self, inputs: CacheInputs, cache: PagedCache, meta: ForwardMetadata[ForeignPlan], layer: AttentionLayer
    ) -> None:
        """Have the pool store the rows."""
        shape = self._shape_of(cache, meta, layer, inputs.dtype)
        if meta.kind is StepKind.IDLE or meta.write_slots.shape[0] == 0:
            return
        plan = _plan(meta, shape)
        self.bring_in(cache)
        plan.step.begin(plan.forward)
        plan.step.store(plan.forward, inputs, layer)
        self.bring_out(cache)

    def forward(
        self, q: Tensor | LatentQuery, cache: PagedCache, meta: ForwardMetadata[ForeignPlan], layer: AttentionLayer
    ) -> AttentionOutput:
        """Attend over the pool."""
        self.bring_in(cache)
        output = super().forward(q, cache, meta, layer)
        self.bring_out(cache)
        return output


def exemptions(backend: type[AttentionBackend]) -> tuple[Exempt, ...]:
    """Cases that are not run on a backend; none for one with the suite's own interface."""
    return backend.exempt if issubclass(backend, ForeignBackend) else ()


def _held(meta: Metadata[ForeignPlan]) -> Held:
    return meta.plans[0].held


def _plan(meta: ForwardMetadata[ForeignPlan], shape: LayerShape) -> ForeignPlan:
    planned: Any = meta.schedules.planned(meta.forward, shape)
    return planned.plan
