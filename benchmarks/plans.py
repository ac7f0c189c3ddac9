"""Costs of planning a cycle: on the device, as graphs that hold nothing else; on the host, where inputs are copied.

A cycle is 3 drafted tokens, a verify of 4, a draft extend of 4. Beside it stand a draft block of 4, and the cycle whose
verify and extend are ragged, of at most 4 rows per request, of kernels that capture them. Each phase is captured with
`BoundInputs`, on an engine's own buffers, for layers of the shape that the row names (heads, kv_heads), so that their
kernel's vendor plans along, if it has a schedule (has_schedule). The cycle is of one backend. A phase alone has a
backend of its own, as engines make them; all of these are given one `StaticMemory`.

us: elapsed device time of a graph of `COPIES` plans less that of a graph of one empty kernel, divided by their number;
medians of rounds in which all take turns. A single plan runs for less than its launch takes the host. kernel_us: the
sum of what its kernels take. nodes: kernels, copies and fills. bytes: static buffers, tables that are shared counted
once. The host launches nothing else. Two times of a cycle are for an engine that binds no buffers. host_us: loading a
`CommittedState`, which such graphs plan from. steps_us: making three steps and copying their inputs. The row
`INSTANCES` adds up the three phases alone; cycle_us: of the cycle beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.contract.kernel import Kernel, LayerShape
from attn_backends.graphs import Graph
from attn_backends.memory.static_memory import StaticMemory
from attn_backends.planning.metadata import Metadata
from attn_backends.selection.providers import VENDOR_KERNELS
from benchmarks.rows import Asked, Missing, Row, Stage, missing
from benchmarks.shapes import DTYPE, LAYERS, LLAMA_8_GPUS
from benchmarks.speculation import CYCLE, NUM_STEPS, PHASES, Batch, Tables, speculative
from benchmarks.timing import CALIBRATION, Work, take_host_turns, take_turns
from spec_metadata import BoundInputs, CommittedState, Step, StepKind
from spec_metadata.capacity import PACKED_KINDS, ceil_div
from spec_metadata.plans.compressed import Compression

PAGE_SIZES = {"trtllm_mla": (64,), "fa3": (64, 1), "flashinfer_mla": (1,), "dsv4": (256,)}
BLOCK, INSTANCES, RAGGED = "block", "instances", {phase: f"ragged_{phase}" for phase in (*PHASES, CYCLE)}
KINDS = PHASES | {BLOCK: StepKind.DRAFT_BLOCK}
COPIES = 10  # of a plan in a graph
NUM_FILLS = 400  # of a round's first graph: the device is busy while the host launches the others
CAPACITY_CONTEXT = 131072
DENSE = {CacheFormat.KV: (LAYERS[CacheFormat.KV][0], LLAMA_8_GPUS), CacheFormat.LATENT: LAYERS[CacheFormat.LATENT]}
OF_DSV4 = LayerShape(64, 1, 512, 512, 512**-0.5, DTYPE, torch.float8_e4m3fn, 128, (Compression(4, True, True), 512))


def plans(asked: Asked) -> Iterator[Row | Missing]:
    """The graphs of the best vendor's kernel and the best of ours of each backend, at every size."""
    most = max(asked.batch_sizes), max(CAPACITY_CONTEXT, *asked.contexts)
    for backend in asked.backends:
        for page_size in (asked.page_size,) if asked.page_size else PAGE_SIZES.get(backend.name, (64,)):
            tables = Tables.of(speculative(*most, page_size, 1, NUM_STEPS), asked.stage.device)
            kernels = kernels_of(backend, asked.stage.device)
            if not kernels:
                yield Missing(backend.name, "", "", "no kernel that runs here has every phase of a cycle", False)
            for kernel, size in product(kernels, asked.sizes):
                for shape in layer_shapes(backend)[: None if kernel.schedule else 1]:
                    batch = Batch.of(tables, size.batch_size, size.context)
                    try:
                        yield from _rows(backend, kernel, shape, batch, asked.stage)
                    except Exception as error:  # of a vendor, which may raise anything
                        yield missing(backend, kernel.name, f"{size}, page size {page_size}", error)


def kernels_of(backend: type[AttentionBackend], device: torch.device) -> list[Kernel]:
    """The best vendor kernel that runs every phase here, then the best of ours, whose metadata is all of our making."""
    whole = (each for each in backend.kernels if set(PHASES.values()) <= each.capabilities.keys())
    able = [kernel for kernel in whole if not kernel.unavailable_reasons(device)]
    vendors = [kernel for kernel in able if kernel.name in VENDOR_KERNELS]
    ours = [kernel for kernel in able if kernel.name not in VENDOR_KERNELS]
    return [*vendors[:1], *ours[:1]]


def layer_shapes(backend: type[AttentionBackend]) -> list[LayerShape]:
    """Shapes of two layers: of Llama-3-8B, and of 70B on 8 GPUs; MLA with 16 and 128 heads; or indexed ones of
    DeepSeek-V4 with 64 and 128. A kernel without a schedule plans alike for both.
    """
    found = [layers for format, layers in DENSE.items() if format in backend.formats]
    if not found:
        return [OF_DSV4, OF_DSV4._replace(num_heads=128)]
    return [LayerShape.of(layer, DTYPE, DTYPE) for layer in found[0]]


def _rows(backend: Any, kernel: Kernel, shape: LayerShape, batch: Batch, stage: Stage) -> Iterator[Row]:
    chosen = dict.fromkeys(KINDS.values() & kernel.capabilities.keys(), kernel.name)
    make = partial(backend, batch.capacity, batch.paging.geometry, stage.device, kernel=chosen)
    held, whole = alone(make, shape, batch), make()
    held[CYCLE] = [_bound(whole, batch.step(kind), shape) for kind in PHASES.values()]
    if steps := [batch.step(kind) for phase, kind in PHASES.items() if RAGGED[phase] in held]:
        held[RAGGED[CYCLE]] = [held[CYCLE][0], *(_bound(whole, s, shape, torch.ones_like(s.seq_lens)) for s in steps)]
    found = timed({phase: partial(_plan, metas) for phase, metas in held.items()}, stage)
    found[INSTANCES] = {name: round(sum(found[phase][name] for phase in PHASES), 2) for name in found[CYCLE]}
    held[INSTANCES] = [held[phase][0] for phase in PHASES]
    more = {CYCLE: _copying(whole, batch, stage), INSTANCES: {"cycle_us": found[CYCLE]["us"]}}
    place = {"bench": "plans", "backend": backend.name, "kernel": kernel.name, "page_size": batch.capacity.page_size}
    place |= {"heads": shape.num_heads, "kv_heads": shape.num_kv_heads, "has_schedule": kernel.schedule is not None}
    place |= {"batch_size": len(batch.lens), "context": batch.host["max_committed"]}
    for phase, device in found.items():
        yield {**place, "phase": phase, **device, "bytes": num_bytes(held[phase]), **more.get(phase, {})}


def alone(make: Callable[..., AttentionBackend], shape: LayerShape, batch: Batch) -> dict[str, list[Metadata]]:
    """Each phase that a kernel has, captured by a backend of its own; they share tables of one memory."""
    memory, held = StaticMemory(), {}
    for phase, kind in KINDS.items():
        backend, step = make(memory=memory), batch.step(kind)
        if able := kind in backend.choices and backend.kernel_of(kind).capabilities[kind]:
            held[phase] = [_bound(backend, step, shape)]
            if able.captures_packed and kind in PACKED_KINDS:
                held[RAGGED[phase]] = [_bound(backend, step, shape, torch.ones_like(step.seq_lens))]
    return held


def _bound(backend: AttentionBackend, step: Step, shape: LayerShape, widths: Tensor | None = None) -> Metadata:
    """A phase that reads an engine's own buffers. A layer of DeepSeek-V4 that drafts blocks selects no entries. widths:
    of a ragged one.
    """
    if step.kind is StepKind.DRAFT_BLOCK and shape.variant:
        shape = shape._replace(variant=(None, 0))
    bucket = step.bucket() if widths is None else backend.capacity.ragged_bucket(step.kind, step.bs, step.num_tokens)
    return backend.capture(bucket, step.paging, BoundInputs(step.seq_lens, widths=widths), layers=[shape])


def num_bytes(metas: Iterable[Metadata]) -> int:
    """Bytes of the static buffers and workspaces that captured phases lie in, shared tables once."""
    phases = [meta.captured.phase for meta in metas if meta.captured is not None]
    return sum(arena.num_bytes for arena in {a for each in phases for a in (*each.arenas, *each.workspaces.values())})


def timed(regions: Mapping[str, Callable[[], object]], stage: Stage) -> dict[str, dict[str, float]]:
    """Elapsed time of graphs of regions that plan `COPIES` times, the sum of the kernels, and nodes."""
    graphs = [_captured(region, stage) for region in regions.values()]
    fill = torch.zeros(1, device=stage.device).zero_
    empty, busy = _captured(fill, stage), _captured(lambda: [fill() for _ in range(NUM_FILLS)], stage)
    replays = [graph.replay for graph in (busy, *graphs, empty)]
    _, *times, least = take_turns(replays, stage.rounds, stage.clock)
    found = {}
    for phase, us, nodes in zip(regions, times, map(nodes_of, graphs), strict=True):
        device = {"us": (us - least) / COPIES, "kernel_us": sum(nodes) / COPIES, "nodes": ceil_div(len(nodes), COPIES)}
        found[phase] = {name: round(value, 2) for name, value in device.items()}
    return found


def _plan(metas: Sequence[Metadata]) -> None:
    for meta in list(metas) * COPIES:
        owner: Any = meta.owner
        owner.refresh(meta)


def _captured(region: Callable[[], object], stage: Stage) -> Graph:
    graph = stage.make_graph()
    graph.capture(region)
    return graph


def _copying(backend: AttentionBackend, batch: Batch, stage: Stage) -> dict[str, float]:
    """Host time of loading a cycle's state; of making its steps and copying their inputs; of the calibration loop."""
    steps = {kind: batch.step(kind) for kind in PHASES.values()}
    metas = {kind: backend.capture(step.bucket(), step.paging) for kind, step in steps.items()}
    state = CommittedState.of(batch.paging, len(batch.lens))

    def copy() -> None:
        for kind, meta in metas.items():
            backend.copy_inputs(meta, batch.step(kind))

    works = [Work.of(partial(state.load, batch.lens, batch.paging.rows)), Work.of(copy), CALIBRATION]
    times = take_host_turns(works, max(1, stage.rounds // 10), stage.device)
    return {name: round(us, 2) for name, us in zip(("host_us", "steps_us", "loop_us"), times, strict=True)}


def nodes_of(graph: Graph) -> list[float]:
    """Device times of each kernel, copy and fill of a replay, in microseconds, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type.name == "CUDA"]
    return [event.time_range.end - event.time_range.start for event in events]
