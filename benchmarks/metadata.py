"""What preparing the metadata of a speculative cycle costs the host and the device, each phase in every way.

A phase is prepared for a captured step: raw inputs are copied and planned again, by the torch planner or the fused one
before the replay, or by a node of the replayed graph. Beside them stand the vendor's own planning call and, where it is
installed, SGLang. Every call gets a new step after that of the phase before it, as a worker makes one each cycle, and
lengths change with every cycle; making the step itself is the worker's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.contract.kernel import Kernel, LayerShape
from attn_backends.graphs import Graph
from attn_backends.planning.metadata import Metadata
from attn_backends.selection.providers import VENDOR_KERNELS
from benchmarks import sglang
from benchmarks.counts import Counts, Probe
from benchmarks.host import CALLS, HostClock, Work, calibration, rounds_of, take_host_turns
from benchmarks.rows import MetadataRow, Missing, missing
from benchmarks.shapes import DTYPE, LAYERS
from benchmarks.speculation import CYCLE, PHASES, Batch, Tables, as_new
from benchmarks.vendor_plans import VENDOR_PLANS
from spec_metadata import Step, StepKind
from spec_metadata.plans.compressed import Compression

BATCH_SIZES = (1, 32, 128, 512)
CONTEXTS = (1024, 4096, 32768, 131072)
PAGE_SIZES = {"trtllm_mla": (64,), "fa3": (64, 1), "flashinfer_mla": (1,), "dsv4": (256,)}
NUM_STEPS = 3
TURNS_US = 30e3  # of a way at each size, if that leaves `host.MIN_ROUNDS`
PLANNERS = {"torch": "torch", "fused": "fused", "in_graph": "auto"}  # by mode
OF_DSV4 = LayerShape(64, 1, 512, 512, 512**-0.5, DTYPE, torch.float8_e4m3fn, 128, (Compression(4, True, True), 512))


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """Where to measure. calibration_us: what the fixed loop took at each size, which measuring fills in."""

    device: torch.device
    make_graph: Callable[[], Graph]
    clock: HostClock
    probe: Probe
    rounds: int
    calibration_us: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to prepare a phase. kernel: that the metadata is for; of SGLang, its class."""

    mode: str
    phase: str
    kernel: str
    work: Work


def kernels_of(backend: type[AttentionBackend], device: torch.device) -> list[Kernel]:
    """The best vendor kernel that runs every phase here, then the best of ours, whose metadata is all of our making."""
    able = [
        kernel
        for kernel in backend.kernels
        if set(PHASES.values()) <= kernel.capabilities.keys() and not kernel.unavailable_reasons(device)
    ]
    vendors = [kernel for kernel in able if kernel.name in VENDOR_KERNELS]
    ours = [kernel for kernel in able if kernel.name not in VENDOR_KERNELS]
    return [*vendors[:1], *ours[:1]]


def measure_metadata(
    problems: Iterable[Problem], batch_sizes: Sequence[int], contexts: Sequence[int], bench: Bench
) -> Iterator[MetadataRow | Missing]:
    """Every way of every phase of each problem at every size, all of a problem in turn. All are timed before one is
    counted: a profiler that ran once slows every launch after it.
    """
    timed: list[tuple[type[AttentionBackend], list[_Size], list[float]]] = []
    found = [(backend, tables, kernels_of(backend, bench.device)) for backend, tables in problems]
    for backend, tables, kernels in found:
        if not kernels:
            yield Missing(backend.name, "", "", "no kernel that runs here has every phase of a cycle", failed=False)
        makers, sizes = list(_makers(backend, kernels, tables, bench)), list[_Size]()
        for batch in (Batch(tables, bs, context) for context in contexts for bs in batch_sizes):
            ways: list[Way] = []
            for what, kernel, make in makers:
                try:
                    made = make(batch)
                    for way in made:
                        way.work.run()
                    ways += made
                except Exception as error:  # a vendor may raise anything; the others are measured all the same
                    yield missing(backend, kernel, f"{what}, {batch}", error)
            sizes.append(_Size(batch, ways))
        timed.append((backend, sizes, _host_times(sizes, bench)))
    for backend, sizes, times in timed:
        yield from _rows(backend.name, sizes, iter(times), bench)


class Problem(NamedTuple):
    """A backend, and the requests that it is to plan for."""

    backend: type[AttentionBackend]
    tables: Tables


class _Size(NamedTuple):
    """The ways to prepare a batch."""

    batch: Batch
    ways: list[Way]


def _makers(
    backend: type[AttentionBackend], kernels: Iterable[Kernel], tables: Tables, bench: Bench
) -> Iterator[tuple[str, str, Callable[[Batch], list[Way]]]]:
    """Mode, kernel, and what makes its ways of a batch."""
    for kernel in kernels:
        for mode in PLANNERS:
            built = cache(partial(build, mode, backend, kernel, tables, bench))
            yield mode, kernel.name, _on_one_backend(mode, built, bench)
        if kernel.name in VENDOR_PLANS:
            yield "vendor", kernel.name, partial(vendors, kernel)
    if backend.name in sglang.BACKENDS:
        yield "sglang", "", partial(_sglangs, backend)


def _on_one_backend(mode: str, built: Callable[[], AttentionBackend], bench: Bench) -> Callable[[Batch], list[Way]]:
    """built: the same backend for every batch."""
    return lambda batch: ours(mode, built(), batch, bench)


def build(mode: str, backend: type[AttentionBackend], kernel: Kernel, tables: Tables, bench: Bench) -> AttentionBackend:
    """A backend that plans in a mode."""
    chosen = dict.fromkeys(PHASES.values(), kernel.name)
    return backend(tables.capacity, tables.geometry, bench.device, kernel=chosen, planner=PLANNERS[mode])


def ours(mode: str, backend: AttentionBackend, batch: Batch, bench: Bench) -> list[Way]:
    """Each phase on captured metadata, on which a layer has attended, so that its vendor plans along."""
    captured = [_captured(backend, kind, batch) for kind in PHASES.values()]
    return [
        Way(mode, phase, backend.kernel_of(kind).name, _work(mode, backend, captured, place, bench))
        for place, (phase, kind) in enumerate(PHASES.items())
    ]


class _Captured(NamedTuple):
    """A phase's metadata, and its steps in two cycles, of which the second is a token longer."""

    meta: Metadata[Any]
    steps: tuple[Step, Step]


def _captured(backend: AttentionBackend, kind: StepKind, batch: Batch) -> _Captured:
    exact = backend.kernel_of(kind).capabilities[kind].needs_host_lens
    shorter = replace(batch, context=batch.context - 1)
    steps = shorter.step(kind, exact=exact), batch.step(kind, exact=exact)
    meta = backend.capture(steps[0].bucket(), steps[0].paging)
    for forward in range(steps[0].num_forwards):
        meta.schedules.planned(forward, layer_shape(backend))
    return _Captured(meta, steps)


def _work(mode: str, backend: AttentionBackend, captured: Sequence[_Captured], place: int, bench: Bench) -> Work:
    """Of the phase at a place. As in a cycle, the phase before it has just been prepared, in the memory that they share
    and from the same lengths; before a draft, from the last cycle's.
    """
    (meta, steps), (last, last_steps) = captured[place], captured[place - 1]
    cycles = itertools.cycle((0, 1))
    prepare = backend.copy_inputs if mode == "in_graph" else backend.replay

    def ready() -> Callable[[], None]:
        number = next(cycles)
        backend.copy_inputs(last, as_new(last_steps[number if place else 1 - number]))
        return partial(prepare, meta, as_new(steps[number]))

    if mode != "in_graph":
        return Work(ready)
    graph = bench.make_graph()
    backend.copy_inputs(meta, steps[0])
    graph.capture(partial(backend.refresh, meta))
    return Work(ready, graph.replay)


def layer_shape(backend: AttentionBackend) -> LayerShape:
    """Of a layer that attends: MLA with 16 heads, else grouped queries, or DeepSeek-V4's that is indexed."""
    formats: frozenset[object] = frozenset(backend.formats)
    if CompressedFormat.COMPRESSED in formats:
        return OF_DSV4
    format = CacheFormat.LATENT if CacheFormat.LATENT in formats else CacheFormat.KV
    return LayerShape.of(LAYERS[format][0], DTYPE, DTYPE)


def vendors(kernel: Kernel, batch: Batch) -> list[Way]:
    """What the vendor plans for each phase, one call for each forward."""
    ways = []
    for phase, kind in PHASES.items():
        plans = VENDOR_PLANS[kernel.name](batch, kind)
        work = Work(lambda plans=plans: lambda: [plan() for plan in plans])  # type: ignore[misc]
        ways.append(Way("vendor", phase, kernel.name, work))
    return ways


def _sglangs(backend: type[AttentionBackend], batch: Batch) -> list[Way]:
    found = sglang.works(backend.name, batch)
    return [Way("sglang", phase, name, work) for phase, (name, work) in found.items()]


def _host_times(sizes: Sequence[_Size], bench: Bench) -> list[float]:
    """Of each way at each size, and after those of a size of the calibration loop."""
    contenders = [work for size in sizes for work in (*(way.work for way in size.ways), calibration())]
    once = take_host_turns(contenders, [1] * len(contenders), bench.clock)
    return take_host_turns(contenders, [rounds_of(CALLS * us, bench.rounds, TURNS_US) for us in once], bench.clock)


def _rows(backend: str, sizes: Iterable[_Size], times: Iterator[float], bench: Bench) -> Iterator[MetadataRow]:
    """A row of each way, and of each whole cycle: the sum of its phases."""
    for batch, ways in sizes:
        cycles: dict[tuple[str, str], MetadataRow] = {}
        for way, counts in zip(ways, bench.probe([way.work for way in ways]), strict=True):
            row = _row(backend, batch, way, next(times), counts)
            yield row
            key = (way.mode, "" if way.mode == "sglang" else way.kernel)
            cycles[key] = _sum(cycles[key], row) if key in cycles else replace(row, phase=CYCLE, kernel=key[1])
        bench.calibration_us.append(next(times))
        yield from cycles.values()


def _row(backend: str, batch: Batch, way: Way, host_us: float, counts: Counts) -> MetadataRow:
    return MetadataRow(
        bench="metadata",
        backend=backend,
        kernel=way.kernel,
        phase=way.phase,
        mode=way.mode,
        batch_size=batch.batch_size,
        context=batch.context,
        page_size=batch.tables.capacity.page_size,
        topk=batch.tables.capacity.topk,
        host_us=round(host_us, 2),
        gpu_us=round(counts.gpu_us, 2),
        launches=counts.launches,
        copies=counts.copies,
        syncs=counts.syncs,
        to_host=counts.to_host,
    )


def _sum(cycle: MetadataRow, row: MetadataRow) -> MetadataRow:
    return replace(
        cycle,
        host_us=round(cycle.host_us + row.host_us, 2),
        gpu_us=round(cycle.gpu_us + row.gpu_us, 2),
        launches=cycle.launches + row.launches,
        copies=cycle.copies + row.copies,
        syncs=cycle.syncs + row.syncs,
        to_host=cycle.to_host + row.to_host,
    )
