"""Whole cycles of the worker on stacks of attention layers: draft, verify, accept, draft extend, and what they cost
beside the same graphs with all planning taken out.

A cycle runs eagerly; through one graph a phase, planned before the graph or in it; or through one graph that holds all
of it, the making of steps too. Every cycle starts at the same committed lengths, so metadata that was planned once
stays right. The peer's backends copy and plan at their first step and never again, each phase in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import Metadata
from attn_backends.selection.choose import Workload
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.phases import Model, VerifyInputs, draft_phase, extend_phase, verify_phase
from attn_backends_reference.eagle.slots import SlotAllocator
from attn_backends_reference.eagle.worker import EagleWorker
from benchmarks.host import rounds_of, takes_part
from benchmarks.rows import CycleRow, Missing, Stage, missing
from benchmarks.speculation import PHASES, speculative
from benchmarks.stacks import StackDraft, StackShape, StackTarget, shapes_of, stack
from benchmarks.timing import Clock
from spec_metadata import CacheGeometry, Capacity, SamplingParams, Step, StepKind, UniformQuery
from spec_metadata.layout import HostBounds

BATCH_SIZES, CONTEXTS = (1, 32), (4096,)
PAGE_SIZE, NUM_STEPS = 64, 3
CYCLES = 4  # of a turn
TURNS_US = 0.5e6  # of a mode at each size, if that leaves `host.MIN_ROUNDS`
BUDGET = 1.05  # of the time without planning
AHEAD = "planned ahead"
PEERS = {"eager": "graph", "graph_before": "graph", "graph": "graph", "loop": "loop"}  # which graphs, planned ahead

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What all modes of a comparison share. context: committed tokens of each request."""

    backend: type[AttentionBackend]
    target: StackTarget
    draft: StackDraft
    capacity: Capacity
    geometry: CacheGeometry
    batch_size: int
    context: int
    stage: Stage

    @classmethod
    def of(
        cls, backend: type[AttentionBackend], shape: StackShape, batch_size: int, context: int, stage: Stage
    ) -> Setting:
        """A setting with models and room of its own."""
        capacity = speculative(batch_size, context, PAGE_SIZE, 1, NUM_STEPS)
        geometry = CacheGeometry(1 + batch_size * capacity.max_pages, PAGE_SIZE)
        models = stack(shape, capacity.max_kv_len, stage.device)
        return cls(backend, *models, capacity, geometry, batch_size, context, stage)

    def made(self, backend: type[AttentionBackend]) -> AttentionBackend:
        """The backend, or a subclass of it, with the kernels that suit the models."""
        workload = Workload(PAGE_SIZE, self.target.layers, self.target.dtype)
        return backend(self.capacity, self.geometry, self.stage.device, workload=workload)

    def backends(self, *, ahead: bool) -> PhaseBackends:
        """One backend for all phases, or for metadata that is planned ahead one for each."""
        if not ahead:
            return PhaseBackends(*[self.made(self.backend)] * 5)
        kind = planned_ahead(self.backend)
        return PhaseBackends(*(self.made(kind) for _ in range(5)))

    def full_rows(self, slots: SlotAllocator) -> list[int]:
        """Rows of a table for every request, with all the pages that they can come to need."""
        rows = [slots.admit() for _ in range(self.batch_size)]
        for row in rows:
            slots.reserve(row, self.capacity.max_kv_len)
        return rows

    def __str__(self) -> str:
        return f"{self.target.family.architecture}, batch {self.batch_size}, context {self.context}"


class SteadyWorker(EagleWorker):
    """The worker, every cycle of which begins at the same committed lengths."""

    def __init__(self, setting: Setting, backends: PhaseBackends, **options: Any) -> None:
        needs_lens = any(_needs_host_lens(backends.draft, kind) for kind in PHASES.values())
        options |= {"host_lag": 0 if needs_lens else 1}
        place = (setting.capacity, setting.geometry, WorkerOptions(**options))
        super().__init__(setting.target, setting.draft, backends, *place)
        self.committed = [setting.context] * setting.batch_size
        self.rows = setting.full_rows(self.slots)

    def run(self) -> None:
        """A cycle, whose tokens are not read."""
        self._lens.fill_(self.committed[0])
        self.cycle(self.rows, self.committed)


def planned_ahead(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend whose captured metadata is planned at its first step and keeps it."""

    class PlannedAhead(backend):  # type: ignore[valid-type, misc]
        """Plans nothing a second time, in a graph or before it."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._right: list[Metadata] = []

        def copy_inputs(self, meta: Metadata, step: Step) -> None:
            """Copy the first step's, and plan it."""
            if all(known is not meta for known in self._right):
                self._right.append(meta)
                super().copy_inputs(meta, step)
                super().refresh(meta)

        def refresh(self, meta: Metadata) -> None:
            """The first step was planned."""

    return PlannedAhead


def loop(setting: Setting, backends: PhaseBackends) -> Run:
    """A cycle as one graph; returns its replay."""
    needing = [str(kind) for kind in PHASES.values() if _needs_host_lens(backends.draft, kind)]
    if needing:
        reasons = [f"kernels that plan on the host ({', '.join(needing)}): a graph of a whole cycle can't wait for it"]
        raise UnsupportedStepError(f"the loop on {setting.backend.name}", reasons)
    return Loop(setting, backends).replay


class Loop:
    """One graph of a cycle, and what it reads: `EagleWorker.cycle` with tables of the batch alone.

    state: [batch_size] of each field, what the next cycle's draft starts from. next_lens: [batch_size] int32, where a
    worker's next cycle would begin.
    """

    def __init__(self, setting: Setting, backends: PhaseBackends) -> None:
        self._setting = setting
        capacity, device, bs = setting.capacity, setting.stage.device, setting.batch_size
        caches = setting.draft.allocate_caches(backends.prefill)
        target_caches = setting.target.allocate_caches(backends.prefill)
        self._draft = draft_phase(Model(setting.draft, caches, backends.draft), capacity)
        self._verify = verify_phase(Model(setting.target, target_caches, backends.verify), capacity)
        self._extend = extend_phase(Model(setting.draft, caches, backends.draft_extend), capacity)
        slots = SlotAllocator(setting.geometry, capacity, device)
        self._paging = slots.paging(torch.tensor(setting.full_rows(slots), device=device))
        self._sampling = SamplingParams.greedy(bs, device)
        self._lens = torch.full((bs,), setting.context, dtype=torch.int32, device=device)
        self.next_lens = torch.zeros_like(self._lens)
        self.state = self._draft.safe_inputs(bs)
        in_order = (backends.draft, backends.verify, backends.draft_extend)
        self._captured = {
            kind: (backend, backend.capture(capacity.bucket(kind, bs), self._paging))
            for kind, backend in zip(PHASES.values(), in_order, strict=True)
        }
        self._region()  # planned ahead now, not in the graph
        self._graph = setting.stage.make_graph()
        self._graph.capture(self._region)

    def replay(self) -> None:
        """Run the cycle again."""
        self._graph.replay()

    @torch.no_grad()
    def _region(self) -> None:
        """A cycle from the same lengths, on the state that the last one left."""
        capacity = self._setting.capacity
        bounds: HostBounds = {"max_committed": self._setting.context}
        place = (self._lens, self._paging)
        drafting = Step.draft_decode(1, capacity.num_steps, *place, **bounds)
        tree = self._draft.region(self._planned(drafting), self.state)
        verifying = Step.target_verify(capacity.num_draft_tokens, *place, **bounds)
        accepted = self._verify.region(self._planned(verifying), VerifyInputs.of(tree, self._sampling))
        extending = Step.draft_extend(UniformQuery(capacity.max_accepted), *place, **bounds)
        state = self._extend.region(self._planned(extending), accepted)
        for name in ("root", "tokens", "log_probs", "hidden"):
            getattr(self.state, name).copy_(getattr(state, name))
        torch.add(self._lens, accepted.num_accepted, out=self.next_lens)

    def _planned(self, step: Step) -> Metadata:
        backend, meta = self._captured[step.kind]
        backend.replay(meta, step)
        return meta


def measure_cycles(
    backend: type[AttentionBackend], batch_sizes: Sequence[int], contexts: Sequence[int], stage: Stage
) -> Iterator[CycleRow | Missing]:
    """Every mode on every stack that the backend takes, at every size."""
    for shape in shapes_of(backend.formats):
        for context, batch_size in ((context, bs) for context in contexts for bs in batch_sizes):
            try:
                yield from compare(Setting.of(backend, shape, batch_size, context, stage))
            except torch.OutOfMemoryError as error:
                yield missing(backend, "every kernel", f"{shape.name}, batch {batch_size}, context {context}", error)


def compare(setting: Setting) -> Iterator[CycleRow | Missing]:
    """Measure all modes of a setting and their peers, in turn."""
    kernel = setting.made(setting.backend).kernel_of(StepKind.TARGET_VERIFY).name
    runs: dict[str, Run] = {}
    for name, make in _makers(setting).items():
        try:
            runs[name] = make()
            runs[name]()
        except Exception as error:  # of a vendor, which may raise anything; the others are measured all the same
            runs.pop(name, None)
            yield missing(setting.backend, kernel, f"{name}, {setting}", error)
    times = dict(zip(runs, take_cycles(list(runs.values()), setting.stage.rounds, setting.stage.clock), strict=True))
    for mode, graphs in PEERS.items():
        peer = f"{graphs}, {AHEAD}"
        if mode in times and peer in times:
            yield _row(setting, kernel, mode, times[mode], peer, times[peer])


def _makers(setting: Setting) -> Mapping[str, Callable[[], Run]]:
    graphs = {"buckets": (setting.batch_size,), "make_graph": setting.stage.make_graph}

    def worker(*, ahead: bool, **options: Any) -> Callable[[], Run]:
        return lambda: SteadyWorker(setting, setting.backends(ahead=ahead), **options).run

    return {
        "eager": worker(ahead=False),
        "graph_before": worker(ahead=False, planning="before", **graphs),
        "graph": worker(ahead=False, planning="in_graph", **graphs),
        f"graph, {AHEAD}": worker(ahead=True, planning="in_graph", **graphs),
        "loop": lambda: loop(setting, setting.backends(ahead=False)),
        f"loop, {AHEAD}": lambda: loop(setting, setting.backends(ahead=True)),
    }


def take_cycles(runs: Sequence[Run], rounds: int, clock: Clock) -> list[float]:
    """Median time of a cycle of each in microseconds, back to back: of `CYCLES` after one that is not timed. All take
    turns, of which who takes long has fewer. Between turns the device is waited for, so that no mode's launches are
    hidden by another's work.
    """
    own = [rounds_of((1 + CYCLES) * _turn(run, clock), rounds, TURNS_US) for run in runs]
    turns: list[list[float]] = [[] for _ in runs]
    for number in range(max(own, default=0)):
        for run, num_rounds, times in zip(runs, own, turns, strict=True):
            if takes_part(number, num_rounds, max(own)):
                times.append(_turn(run, clock))
    return [median(times) for times in turns]


def _turn(run: Run, clock: Clock) -> float:
    run()
    start = clock.mark()
    for _ in range(CYCLES):
        run()
    end = clock.mark()
    clock.wait()
    return clock.microseconds(start, end) / CYCLES


def _row(setting: Setting, kernel: str, mode: str, us: float, peer: str, peer_us: float) -> CycleRow:
    return CycleRow(
        bench="cycle",
        backend=setting.backend.name,
        kernel=kernel,
        model=setting.target.family.architecture,
        batch_size=setting.batch_size,
        context=setting.context,
        mode=mode,
        us=round(us, 1),
        peer=peer,
        peer_us=round(peer_us, 1),
        ratio=round(us / peer_us, 4),
    )


def _needs_host_lens(backend: AttentionBackend, kind: StepKind) -> bool:
    return backend.kernel_of(kind).capabilities[kind].needs_host_lens
