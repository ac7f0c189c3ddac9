"""What CUDA graphs promise beside right numbers: replays allocate nothing, memory is shared safely, failures are clean.

Runs each backend on its best kernel, in a small world of the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat
from attn_backends.conformance import resolve_subjects
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import CaptureError
from attn_backends.graphs import CudaGraph
from attn_backends.planning.metadata import Metadata
from spec_metadata import StepKind

KINDS = (StepKind.DECODE, StepKind.TARGET_VERIFY)
FIRST, SECOND = (13, 1, 7), (5, 14, 2)
BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3", "reference")


@dataclass(frozen=True)
class Captured:
    """A graph of one forward, of as many requests as a world takes."""

    world: World
    graph: CudaGraph
    meta: Metadata
    q: Tensor
    out: Tensor

    @classmethod
    def of(cls, world: World, kind: StepKind = StepKind.TARGET_VERIFY) -> Captured:
        meta, q = unplanned(world, kind)
        graph = CudaGraph()
        return cls(world, graph, meta, q, graph.capture(lambda: forward(world, q, meta)))

    def replay(self, scene: Scene) -> Tensor:
        step = scene.step()
        self.world.backend.replay(self.meta, step)
        self.graph.replay()
        return self.out[: step.num_tokens].clone()

    def eager(self, scene: Scene) -> Tensor:
        step = scene.step()
        return forward(self.world, self.q[: step.num_tokens], self.world.backend.init_forward_metadata(step))

    def is_right(self, scene: Scene) -> bool:
        """Within bfloat16's rounding of a few launches that split keys otherwise."""
        found, expected = self.replay(scene), self.eager(scene)
        return bool(((found - expected).abs() <= 0.02 * expected.abs().max()).all())


def unplanned(world: World, kind: StepKind) -> tuple[Metadata, Tensor]:
    """Captured metadata, and queries of its rows."""
    meta = world.backend.capture(world.capacity.bucket(kind, world.capacity.max_bs), world.paging())
    shape = (meta.step.num_tokens, world.layer.num_heads, world.layer.head_dim)
    return meta, torch.randn(shape, device=world.device).to(world.setup.dtype)


def forward(world: World, q: Tensor, meta: Metadata) -> Tensor:
    """A layer's attention."""
    return world.backend.forward(q, world.cache, meta.at(), world.layer).out


def verify(world: World, lens: tuple[int, ...], kind: StepKind = StepKind.TARGET_VERIFY) -> Scene:
    """Requests in the world's cache, and their step."""
    return Scene(world, Batch(kind, lens))


def replays_allocate_nothing(world: World) -> bool:
    """The graph's replay itself asks the allocator for nothing."""
    captured = Captured.of(world)
    captured.replay(verify(world, FIRST))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        captured.graph.replay()
    return torch.cuda.memory_stats()["allocation.all.allocated"] == before


def graphs_survive_each_other(world: World) -> bool:
    """Two graphs of two kinds, replayed in turn with eager work and freed memory between, stay right."""
    graphs = {kind: Captured.of(world, kind) for kind in KINDS}
    good = True
    for lens in (FIRST, SECOND, FIRST):
        for kind, captured in graphs.items():
            scene = verify(world, lens, kind)
            found = captured.replay(scene)
            torch.empty(2**26, device=world.device).fill_(float("nan"))
            torch.cuda.empty_cache()
            good &= captured.is_right(scene) and torch.equal(found, captured.replay(scene))
    return good


def warm_up_leaves_nothing(world: World) -> bool:
    """Capturing changes no page but the reserved one, and replays what was captured on padding alone."""
    scene, others = verify(world, SECOND), torch.arange(len(world.memory)) != world.geometry.reserved_page
    before = world.memory[others].clone()
    captured = Captured.of(world)
    return torch.equal(before, world.memory[others]) and captured.is_right(scene)


def a_new_thread_replays(world: World) -> bool:
    """Metadata is prepared by a thread that has not used the GPU before."""
    captured, right = Captured.of(world), list[bool]()
    captured.replay(verify(world, FIRST))
    scene = verify(world, SECOND)
    thread = Thread(target=lambda: right.append(captured.is_right(scene)))
    thread.start()
    thread.join()
    return right == [True]


def out_of_memory_leaves_the_backend_usable(world: World) -> bool:
    """A capture that finds no memory says so, and eager steps and a later capture work."""
    meta, q = unplanned(world, StepKind.TARGET_VERIFY)
    more_than_there_is = torch.cuda.mem_get_info()[1]

    def region() -> Tensor:
        out = forward(world, q, meta)
        if torch.cuda.is_current_stream_capturing():
            torch.empty(more_than_there_is, dtype=torch.int8, device=world.device)
        return out

    try:
        CudaGraph().capture(region)
    except CaptureError as error:
        return "Tried to allocate" in str(error) and Captured.of(world).is_right(verify(world, FIRST))
    return False


CHECKS: list[Callable[[World], bool]] = [replays_allocate_nothing, graphs_survive_each_other, warm_up_leaves_nothing]
CHECKS += [a_new_thread_replays, out_of_memory_leaves_the_backend_usable]


def rows(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Every check on every backend."""
    for name in BACKENDS:
        subjects, _ = resolve_subjects(name, device=device)
        subject = next(each for each in subjects if each.capabilities.keys() >= set(KINDS))
        format = CacheFormat.LATENT if CacheFormat.LATENT in subject.backend.formats else CacheFormat.KV
        place = {"kernel": subject.kernel, "device": device}
        setup = Setup(subject.backend, format, 64, dtype=torch.bfloat16, checking=False, **place)
        for check in CHECKS:
            about = {"backend": name, "kernel": subject.kernel, "check": check.__name__}
            yield about | {"status": "pass" if check(World(setup)) else "fail"}
