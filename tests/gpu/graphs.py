"""What CUDA graphs promise beside right numbers: replays allocate nothing, memory is shared safely, failures are clean.

Runs each backend on the best kernel of every step kind, at a small size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache, allocate_kv, allocate_latent
from attn_backends.errors import CaptureError
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.planning.metadata import Metadata
from attn_backends.registry import get_backend
from spec_metadata import CacheGeometry, Capacity, RequestTable, Step, StepKind

DEVICE = torch.device("cuda")
CAPACITY = Capacity(4, 1000, 64, num_steps=3, num_draft_tokens=4)
MLA = AttentionLayer(0, 16, 1, 576, 512, 192**-0.5)
GROUPED = AttentionLayer(0, 32, 8, 128, 128, 128**-0.5)
FIRST, SECOND = (900, 16, 333), (63, 700, 128)


@dataclass(frozen=True)
class Engine:
    """A backend with one layer's cache full of random entries, and a table of requests."""

    backend: AttentionBackend
    layer: AttentionLayer
    cache: PagedCache
    table: torch.Tensor

    @classmethod
    def of(cls, name: str) -> Engine:
        kind = get_backend(name)
        geometry = CacheGeometry(1 + CAPACITY.max_bs * CAPACITY.max_pages, CAPACITY.page_size)
        layer = MLA if CacheFormat.LATENT in kind.formats else GROUPED
        cache: PagedCache
        if layer is MLA:
            cache = allocate_latent(geometry, 512, 64, torch.bfloat16, DEVICE)
            cache.latent[1:].normal_()
        else:
            cache = allocate_kv(geometry, 8, 128, torch.bfloat16, DEVICE)
            cache.k[1:].normal_()
            cache.v[1:].normal_()
        pages = torch.cat((torch.zeros(1, CAPACITY.max_pages), 1 + torch.arange(geometry.num_pages - 1).view(4, -1)))
        slots = pages.to(DEVICE).int().unsqueeze(2) * 64 + torch.arange(64, dtype=torch.int32, device=DEVICE)
        return cls(kind(CAPACITY, geometry, DEVICE), layer, cache, slots.flatten(1))

    def paging(self, rows: tuple[int, ...] = ()) -> RequestTable:
        return RequestTable(self.table, torch.tensor(rows, dtype=torch.int64, device=DEVICE), self.backend.geometry)

    def verify(self, lens: tuple[int, ...]) -> Step:
        return self.step(StepKind.TARGET_VERIFY, lens)

    def step(self, kind: StepKind, lens: tuple[int, ...]) -> Step:
        rows = self.paging(tuple(range(1, 1 + len(lens))))
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        if kind is StepKind.DECODE:
            return Step.decode(seq_lens, rows, seq_lens_cpu=lens)
        return Step.target_verify(4, seq_lens, rows, seq_lens_cpu=lens)

    def queries(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.layer.num_heads, self.layer.head_dim, device=DEVICE, dtype=torch.bfloat16)

    def attend(self, q: torch.Tensor, meta: Metadata) -> AttentionOutput:
        return self.backend.forward(q, self.cache, meta.at(), self.layer)

    def eager(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        return self.attend(q[: step.num_tokens], self.backend.init_forward_metadata(step)).out

    def captured(self, kind: StepKind) -> Captured:
        meta = self.backend.capture(CAPACITY.bucket(kind, CAPACITY.max_bs), self.paging())
        q, graph = self.queries(meta.step.num_tokens), CudaGraph()
        return Captured(self, graph, meta, q, graph.capture(lambda: self.attend(q, meta)).out)


@dataclass(frozen=True)
class Captured:
    """A graph of one forward."""

    engine: Engine
    graph: CudaGraph
    meta: Metadata
    q: torch.Tensor
    out: torch.Tensor

    def replay(self, step: Step) -> torch.Tensor:
        self.engine.backend.replay(self.meta, step)
        self.graph.replay()
        return self.out[: step.num_tokens].clone()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within bfloat16's rounding of a few launches that split keys otherwise."""
    return bool(((found - expected).abs() <= 0.02 * expected.abs().max()).all())


def replays_allocate_nothing(engine: Engine) -> bool:
    """The graph's replay itself asks the allocator for nothing."""
    captured = engine.captured(StepKind.TARGET_VERIFY)
    captured.replay(engine.verify(FIRST))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        captured.graph.replay()
    return torch.cuda.memory_stats()["allocation.all.allocated"] == before


def graphs_survive_each_other(engine: Engine) -> bool:
    """Two graphs of two kinds, replayed in turn with eager work and freed memory between, stay right."""
    graphs = {kind: engine.captured(kind) for kind in (StepKind.DECODE, StepKind.TARGET_VERIFY)}
    good = True
    for lens in (FIRST, SECOND, FIRST):
        for kind, captured in graphs.items():
            step = engine.step(kind, lens)
            found = captured.replay(step)
            torch.empty(2**26, device=DEVICE).fill_(float("nan"))
            torch.cuda.empty_cache()
            good &= close(found, engine.eager(captured.q, step))
            good &= torch.equal(found, captured.replay(step))
    return good


def warm_up_leaves_nothing(engine: Engine) -> bool:
    """Capturing changes no page but the reserved one, and replays what was captured on padding alone."""
    pages = torch.cat([page.flatten(1) for page in engine.cache.pages], 1)[1:].clone()
    captured = engine.captured(StepKind.TARGET_VERIFY)
    same = torch.equal(pages, torch.cat([page.flatten(1) for page in engine.cache.pages], 1)[1:])
    return same and close(captured.replay(engine.verify(SECOND)), engine.eager(captured.q, engine.verify(SECOND)))


def a_new_thread_replays(engine: Engine) -> bool:
    """Metadata is prepared by a thread that has not used the GPU before."""
    captured = engine.captured(StepKind.TARGET_VERIFY)
    captured.replay(engine.verify(FIRST))
    step, found = engine.verify(SECOND), list[torch.Tensor]()
    thread = Thread(target=lambda: found.append(captured.replay(step)))
    thread.start()
    thread.join()
    return len(found) == 1 and close(found[0], engine.eager(captured.q, step))


def out_of_memory_leaves_the_backend_usable(engine: Engine) -> bool:
    """A capture that finds no memory says so, and eager steps and a later capture work."""
    step, q = engine.verify(FIRST), engine.queries(4 * CAPACITY.max_bs)
    expected = engine.eager(q, step)
    meta = engine.backend.capture(CAPACITY.bucket(StepKind.TARGET_VERIFY, CAPACITY.max_bs), engine.paging())
    more_than_there_is = torch.cuda.mem_get_info()[1]

    def region() -> AttentionOutput:
        out = engine.attend(q, meta)
        if torch.cuda.is_current_stream_capturing():
            torch.empty(more_than_there_is, dtype=torch.int8, device=DEVICE)
        return out

    try:
        CudaGraph().capture(region)
    except CaptureError as error:
        said = "Tried to allocate" in str(error)
    else:
        return False
    again = torch.equal(engine.eager(q, step), expected)
    captured = engine.captured(StepKind.TARGET_VERIFY)
    return said and again and close(captured.replay(step), engine.eager(captured.q, step))


CHECKS: tuple[Callable[[Engine], bool], ...] = (
    replays_allocate_nothing,
    graphs_survive_each_other,
    warm_up_leaves_nothing,
    a_new_thread_replays,
    out_of_memory_leaves_the_backend_usable,
)


def run(name: str, check: Callable[[Engine], bool]) -> dict[str, Any]:
    """A row."""
    engine = Engine.of(name)
    kernel = engine.backend.kernel_of(StepKind.TARGET_VERIFY).name
    status = "pass" if check(engine) else "fail"
    return {"backend": name, "kernel": kernel, "check": check.__name__, "status": status}


def rows(_device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Every check on every backend."""
    torch.manual_seed(0)
    return (run(name, check) for name in ("flashinfer_mla", "trtllm_mla", "fa3", "reference") for check in CHECKS)
