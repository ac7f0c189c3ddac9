"""How often the host waits in a cycle of the worker, and what it copies to a GPU and back, by torch's profiler.

Cycles of draft, verify, accept and draft extend through graphs, planned before them or in them. Launching one waits
for nothing: the host sends which rows of the table take part, and for kernels that plan there (`needs_host_lens`) the
lists of work of the phases; tokens and their counts set out for it. Reading waits once, for these two. So a cycle with
lag waits for nothing of its own, and one without, which kernels that plan on the host need, waits once. A row with more
fails, and so does one with less, of which the profiler has missed something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from attn_backends import results
from attn_backends.backend import AttentionBackend
from attn_backends.errors import AttnBackendsError, BackendUnavailableError
from attn_backends.graphs import CudaGraph
from attn_backends.registry import get_backend
from attn_backends.selection.choose import Workload
from attn_backends_reference.eagle.launches import Launch
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models import DraftModel, TargetModel, load_draft, load_target
from benchmarks.rows import Stage
from benchmarks.speculation import NUM_STEPS, PHASES, speculative
from benchmarks.timing import CudaClock, Work
from spec_metadata import CacheGeometry, Capacity, StepKind
from tests.counts import Probe, count_on_cuda

BATCH_SIZE, CONTEXT = 4, 300


@dataclass(frozen=True, slots=True)
class Place:
    """What runs. model: a shipped one. vendors: kernels that must be there, or a row says why they are not."""

    backend: str
    model: str
    page_size: int
    vendors: tuple[str, ...] = ()
    topks: tuple[int, ...] = (1, 4)
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None


PLACES = (
    Place("flashinfer_mla", "mla", 64, ("flashinfer_fa3",)),
    Place("trtllm_mla", "mla", 64, ("flashmla",)),
    Place("fa3", "gqa", 64, ("vllm_flash_attn",)),
    Place("dsv4", "v4", 256, topks=(1,), dtype=torch.float32),
    Place("dsv4", "v4", 256, ("flashmla_sparse",), (1,), cache_dtype=torch.float8_e4m3fn),
)
PLANNINGS = ("before", "in_graph")
KERNELS = ("auto", "triton", "torch")


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """The models of a place, and room for a batch of requests of `CONTEXT` committed tokens."""

    place: Place
    backend: type[AttentionBackend]
    target: TargetModel
    draft: DraftModel
    capacity: Capacity
    geometry: CacheGeometry
    stage: Stage


class SteadyWorker(EagleWorker):
    """The worker, every cycle of which begins at the same committed lengths."""

    def __init__(self, setting: Setting, backends: PhaseBackends, **options: Any) -> None:
        options |= {"host_lag": 0 if num_host_plans(backends.draft) else 1}
        super().__init__(
            setting.target, setting.draft, backends, setting.capacity, setting.geometry, WorkerOptions(**options)
        )
        self.committed = [CONTEXT] * BATCH_SIZE
        self.rows = [self.slots.admit() for _ in range(BATCH_SIZE)]
        for row in self.rows:
            self.slots.reserve(row, setting.capacity.max_kv_len)


def setting_of(place: Place, topk: int, stage: Stage) -> Setting:
    """The models of a place, and room for a batch."""
    capacity = speculative(BATCH_SIZE, CONTEXT, place.page_size, topk, NUM_STEPS)
    geometry = CacheGeometry(1 + BATCH_SIZE * capacity.max_pages, place.page_size)
    target = load_target(place.model, place.dtype, stage.device)
    models = target, load_draft(place.model, target)
    return Setting(place, get_backend(place.backend), *models, capacity, geometry, stage)


def backends_of(setting: Setting, kernels: Sequence[str]) -> dict[str, AttentionBackend]:
    """A backend on each kernel, by what it is called; "auto" may be one of the others."""
    target = setting.target
    workload = Workload(setting.geometry.page_size, target.layers, target.dtype, setting.place.cache_dtype)
    place = (setting.capacity, setting.geometry, setting.stage.device)
    made = [setting.backend(*place, kernel=kernel, workload=workload) for kernel in kernels]
    return {backend.kernel_of(StepKind.TARGET_VERIFY).name: backend for backend in made}


def worker_of(setting: Setting, backend: AttentionBackend, planning: str) -> SteadyWorker:
    """A worker whose cycles run through graphs on one backend."""
    graphs = {"buckets": (BATCH_SIZE,), "make_graph": setting.stage.make_graph, "planning": planning}
    return SteadyWorker(setting, PhaseBackends(*[backend] * 5), cache_dtype=setting.place.cache_dtype, **graphs)


def cycles(worker: SteadyWorker) -> tuple[Work, Work]:
    """The launch of a cycle, and the reading of one that has ended."""

    def launch() -> Launch:
        worker._lens.fill_(CONTEXT)
        return worker.cycle(worker.rows, worker.committed)

    return Work(lambda: launch), Work(lambda: launch().read)


def num_host_plans(backend: AttentionBackend) -> int:
    """Plans that the host makes for a cycle, one for each phase."""
    return sum(backend.kernel_of(kind).capabilities[kind].needs_host_lens for kind in PHASES.values())


def measured(setting: Setting, backend: AttentionBackend, planning: str, probe: Probe) -> dict[str, Any]:
    """What a cycle counts beside what it may, as a part of a row."""
    try:
        worker = worker_of(setting, backend, planning)
        launch, read = probe(cycles(worker))
    except AttnBackendsError as error:
        return {"status": "fail", "reason": results.without_folders(str(error))}
    found = {"waits_to_launch": launch.syncs, "waits_to_read": read.syncs}
    found |= {"copies_to_device": launch.to_device, "copies_to_host": launch.to_host}
    expected = dict(zip(found, (0, 1, 1 + num_host_plans(backend), 2), strict=True))
    wrong = [f"{name} {found[name]}, not {number}" for name, number in expected.items() if found[name] != number]
    verdict = {"status": "fail", "reason": "; ".join(wrong)} if wrong else {"status": "pass"}
    return {"host_lag": worker.host_lag, **found, **verdict}


def counted(
    stage: Stage, probe: Probe, kernels: Sequence[str] = KERNELS, places: Sequence[Place] = PLACES
) -> Iterator[dict[str, Any]]:
    """A row for each backend, kernel, shape of drafts and place of planning."""
    for place, topk in [(each, topk) for each in places for topk in each.topks]:
        setting, made, about = setting_of(place, topk, stage), {}, {"backend": place.backend, "topk": topk}
        for kernel in (*kernels, *place.vendors):
            try:
                made |= backends_of(setting, [kernel])
            except BackendUnavailableError as error:
                yield about | {"kernel": kernel, "status": "not_run", "reason": str(error)}
        for (kernel, backend), planning in product(made.items(), PLANNINGS):
            own = {"kernel": kernel, "planning": planning, "cache_dtype": str(place.cache_dtype or place.dtype)}
            yield about | own | measured(setting, backend, planning, probe)


def rows(_device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Counted on every backend."""
    torch.set_grad_enabled(False)
    return counted(Stage(torch.device("cuda"), CudaGraph, CudaClock(), rounds=1), count_on_cuda)
