"""Runs a phase of a worker eagerly or through captured graphs, and returns results that the caller owns.

A `Phase` is one region of device work (a draft loop, a verify, …) with typed inputs and outputs; its graphs hold it
whole. Every tensor field is classified: one entry a request, one a query row, or independent of the batch. From the
class the runner sizes static inputs, pads them, and trims results; a field without a class is refused when the runner
is built (rule R5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, get_type_hints

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.errors import CaptureError
from attn_backends.graphs import Graph
from attn_backends.memory.phase_sets import PhaseSet
from attn_backends.planning.metadata import Metadata
from spec_metadata import Bucket, CommittedState, InvalidStepError, Paging, Step, StepKind, TokenBucket, idle_step

Given = TypeVar("Given")
Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")
Planning = Literal["before", "in_graph"]


class FieldClass(StrEnum):
    """The unit of a field's leading dimension."""

    PER_REQUEST = "per request"
    PER_TOKEN = "per token"
    PASS_THROUGH = "pass-through"


PerRequest = Annotated[Tensor, FieldClass.PER_REQUEST]
PerToken = Annotated[Tensor, FieldClass.PER_TOKEN]
PassThrough = Annotated[Tensor, FieldClass.PASS_THROUGH]


@dataclass(frozen=True)
class AnyPhase(Generic[Given, Inputs, Outputs]):
    """A region that a runner runs.

    region: (given, inputs) -> outputs, device work without host reads. safe_inputs: size -> inputs of padded rows,
    which are zeros. output: the outputs' dataclass. bucket: size -> the bucket that captures it. A size counts requests
    of uniform rows, and packed rows. bound: those inputs that a step on a `CommittedState` has in place, by the names
    of `CommittedState.bound`.
    """

    name: str
    region: Callable[[Given, Inputs], Outputs]
    safe_inputs: Callable[[int], Inputs]
    output: type[Outputs]
    bucket: Callable[[int], Bucket | TokenBucket]
    bound: Callable[[Inputs], Mapping[str, Tensor]] = lambda inputs: {}


Phase = AnyPhase[Metadata, Inputs, Outputs]
"""Over uniform rows: from a step's metadata, because a draft loop plans several forwards."""


@dataclass(frozen=True, slots=True)
class StepResult(Generic[Outputs]):
    """A step's outputs, in memory of their own. bucket: of the graph that ran, None if it ran eagerly."""

    value: Outputs
    bucket: Bucket | TokenBucket | None

    @property
    def ran_graph(self) -> bool:
        """Whether a graph ran: a property of the result, not of the runner."""
        return self.bucket is not None


@dataclass(frozen=True, slots=True, eq=False)
class CapturedRegion(Generic[Inputs, Outputs]):
    """A region captured for a bucket. graph: others may share its memory. replay: runs it for a step whose inputs are
    in place.
    """

    bucket: Bucket | TokenBucket
    inputs: Inputs
    outputs: Outputs
    graph: Any
    replay: Callable[[Step], None]


class Runner(ABC, Generic[Inputs, Outputs]):
    """Runs one phase on one backend: the smallest captured bucket that holds a step, or eagerly.

    sizes: what to capture, as the phase's `bucket` counts it; none for a runner that is always eager. make_graph: how.
    within: the set of phases whose memory static inputs lie in. before: a graph whose memory the first one may reuse.
    """

    def __init__(
        self,
        phase: AnyPhase[Any, Inputs, Outputs],
        backend: AttentionBackend,
        sizes: Sequence[int],
        make_graph: Callable[[], Graph] | None,
        within: PhaseSet | None = None,
        before: Any = None,
    ) -> None:
        self.phase, self.backend, self._within = phase, backend, within
        classify(phase.output)  # refuses a field without a class now, not when a result is trimmed
        self._captured: dict[int, CapturedRegion[Inputs, Outputs]] = {}
        if not sizes:
            return
        if make_graph is None:
            raise CaptureError(f"phase {phase.name}: buckets {list(sizes)} were given and no graph to capture with")
        buckets = {size: phase.bucket(size) for size in sorted(set(sizes), reverse=True)}
        largest = phase.safe_inputs(max(sizes))
        if within is not None:
            largest = _map(largest, lambda tensor, _: within.like(tensor))
        for size, bucket in buckets.items():  # largest first: the others share its memory, for results are copied
            inputs = _trim(largest, bucket.bs, bucket.num_tokens)
            self._captured[size] = self._capture(bucket, inputs, make_graph, before)
            before = self._captured[size].graph

    def run(self, step: Step, inputs: Inputs) -> StepResult[Outputs]:
        """Run a step; the smallest bucket that holds it, or eagerly."""
        self._check_inputs(step, inputs)
        fitting = [size for size, c in self._captured.items() if c.bucket.holds(step.bs, step.num_tokens)]
        if not fitting and step.kind is StepKind.IDLE:
            return self._run_idle(step)
        if not fitting:
            return StepResult(self._own(self._run_eagerly(step, inputs), step), None)
        captured = self._captured[min(fitting)]
        if self._within is not None:
            self._within.revive()
        self._copy(captured.inputs, inputs)
        captured.replay(step)
        return StepResult(self._own(captured.outputs, step), captured.bucket)

    @abstractmethod
    def _run_eagerly(self, step: Step, inputs: Inputs) -> Outputs:
        """Run the region on fresh metadata."""

    @abstractmethod
    def _capture(
        self, bucket: Bucket | TokenBucket, inputs: Inputs, make_graph: Callable[[], Graph], before: Any
    ) -> CapturedRegion[Inputs, Outputs]:
        """Capture the region on static inputs. before: the graph of the next larger bucket, None of the largest."""

    def _run_idle(self, step: Step) -> StepResult[Outputs]:
        """Eagerly on one row of padding, for models that can't run on no row."""
        padding = idle_step(self.phase.bucket(1), step.paging, self.backend.capacity)
        inputs = _trim(self.phase.safe_inputs(1), padding.bs, padding.num_tokens)
        return StepResult(self._own(self._run_eagerly(padding, inputs), step), None)

    def _check_inputs(self, step: Step, inputs: Inputs) -> None:
        for name, kind in classify(type(inputs)).items():
            needed = {FieldClass.PER_REQUEST: step.bs, FieldClass.PER_TOKEN: step.num_tokens}.get(kind)
            given = getattr(inputs, name).shape[:1]
            if needed is not None and given != (needed,):
                self._refuse(name, f"{kind}; this step needs {needed}, got {list(given)}")

    def _copy(self, static: Inputs, given: Inputs) -> None:
        """Fill static inputs: the given entries, then zeros. What is independent of the batch has one size."""
        for name, kind in classify(type(static)).items():
            destination, source = getattr(static, name), getattr(given, name)
            sized = slice(0 if kind is FieldClass.PASS_THROUGH else 1, None)
            if source.shape[sized] != destination.shape[sized]:
                captured = f"captured as {list(destination.shape)} ({kind})"
                self._refuse(name, f"{list(source.shape)}, {captured}; a graph takes no other sizes")
            into = destination if kind is FieldClass.PASS_THROUGH else destination[: source.shape[0]]
            into.copy_(source)
            if into is not destination:
                destination[into.shape[0] :].zero_()

    def _refuse(self, name: str, found: str) -> NoReturn:
        raise InvalidStepError(f"phase {self.phase.name}: input {name} is {found}")

    def _own(self, outputs: Outputs, step: Step) -> Outputs:
        return _map(_trim(outputs, step.bs, step.num_tokens), lambda tensor, _: tensor.clone())


class PhaseRunner(Runner[Inputs, Outputs]):
    """Runs a phase of which a graph holds all, attention too.

    buckets: sizes to capture. paging: the engine's table, which a graph reads in place; or the state that steps are
    made of, read in place as well unless the kernel plans on the host. planning: "before" a graph runs, or "in_graph",
    as its first node, which a backend in checking mode can't. within: a set of phases that takes turns with others.
    sharing: another set's runner, whose graphs' memory its own may reuse: they never run at once. Raises
    `UnsupportedStepError` if the kernel can't be captured.
    """

    def __init__(
        self,
        phase: Phase[Inputs, Outputs],
        backend: AttentionBackend,
        paging: Paging | CommittedState,
        buckets: Sequence[int] = (),
        make_graph: Callable[[], Graph] | None = None,
        planning: Planning = "before",
        within: PhaseSet | None = None,
        sharing: PhaseRunner[Any, Any] | None = None,
    ) -> None:
        self._region, self._paging, self._planning = phase.region, paging, planning
        shared = {} if sharing is None else sharing._captured
        if buckets and planning == "in_graph" and backend.checking:
            raise CaptureError(
                f"phase {phase.name}: planning is 'in_graph' and {backend.name} checks, which reads the device; no "
                "graph can hold that. Plan 'before', or build the backend without checking"
            )
        super().__init__(phase, backend, buckets, make_graph, within, shared[min(shared)].graph if shared else None)

    def _run_eagerly(self, step: Step, inputs: Inputs) -> Outputs:
        return self._region(self.backend.init_forward_metadata(step), inputs)

    def _capture(
        self, bucket: Bucket | TokenBucket, inputs: Inputs, make_graph: Callable[[], Graph], before: Any
    ) -> CapturedRegion[Inputs, Outputs]:
        graph, backend, at = make_graph(), self.backend, self._paging
        if isinstance(at, CommittedState) and backend.kernel_of(bucket.kind).bound_reasons(bucket.kind):
            at = at.paging
        own = self.phase.bound(inputs)
        paging, bound = at.bound(bucket.bs, **own) if isinstance(at, CommittedState) else (at, None)
        meta = backend.capture(bucket, paging, bound, within=self._within)
        load = partial(backend.copy_inputs, meta)
        if isinstance(at, CommittedState) and meta.captured is not None and meta.captured.bound is not None:
            load = partial(at.take, meta.captured.bound)

        def region() -> Outputs:
            if self._planning == "in_graph":
                backend.refresh(meta)
            return self._region(meta, inputs)

        def replay(step: Step) -> None:
            load(step)
            if self._planning == "before":
                backend.refresh(meta)
            graph.replay()

        outputs = graph.capture(region, before)
        return CapturedRegion(bucket, inputs, outputs, graph, replay)


def _classes(kind: type) -> Mapping[str, FieldClass]:
    """The class of every field of a dataclass of tensors; refuses a field without one."""
    if not is_dataclass(kind):
        raise CaptureError(f"{kind.__name__} must be a dataclass of classified tensors")
    hints = get_type_hints(kind, include_extras=True)
    classes = {}
    for field in fields(kind):
        found = [x for x in getattr(hints[field.name], "__metadata__", ()) if isinstance(x, FieldClass)]
        if len(found) != 1:
            raise CaptureError(
                f"field {kind.__name__}.{field.name} has no class: annotate it PerRequest, PerToken or PassThrough, so "
                "that it can be trimmed from padded to real size"
            )
        classes[field.name] = found[0]
    return classes


classify: Callable[[type], Mapping[str, FieldClass]] = cache(_classes)  # because `get_type_hints` is slow


def _map(value: Any, change: Callable[[Tensor, FieldClass], Tensor]) -> Any:
    classes = classify(type(value))
    return type(value)(**{name: change(getattr(value, name), kind) for name, kind in classes.items()})


def _trim(value: Any, bs: int, num_tokens: int) -> Any:
    sizes = {FieldClass.PER_REQUEST: bs, FieldClass.PER_TOKEN: num_tokens}
    return _map(value, lambda tensor, kind: tensor[: sizes[kind]] if kind in sizes else tensor)
