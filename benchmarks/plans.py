"""What planning a cycle costs: on the device, as graphs that hold nothing else; on the host, where inputs are copied.

A cycle is 3 drafted tokens, a verify of 4, a draft extend of 4. Beside it stand a draft block of 4 and a ragged verify
of at most 4 rows, of kernels that capture them. Each phase is captured with `BoundInputs`, on an engine's own buffers,
for layers of one shape, so that their kernel's vendor plans along. A row is one graph: of a phase
alone, or of the whole cycle. us: elapsed device time of a replay less that of a graph of one empty kernel, medians of
rounds in which all take turns. kernel_us: the sum of what its kernels take. nodes: kernels, copies and fills. The host
launches nothing else. host_us, of a cycle: making its three steps and copying their inputs, for an engine that binds no
buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.contract.kernel import Kernel, LayerShape
from attn_backends.graphs import Graph
from attn_backends.selection.providers import VENDOR_KERNELS
from benchmarks.rows import Asked, Missing, Row, Stage, missing
from benchmarks.shapes import DTYPE, LAYERS
from benchmarks.speculation import CYCLE, NUM_STEPS, PHASES, Batch, Tables, speculative
from benchmarks.timing import CALIBRATION, Work, take_host_turns, take_turns
from spec_metadata import BoundInputs, StepKind
from spec_metadata.plans.compressed import Compression

PAGE_SIZES = {"trtllm_mla": (64,), "fa3": (64, 1), "flashinfer_mla": (1,), "dsv4": (256,)}
BLOCK, RAGGED = "block", "ragged_verify"
KINDS = PHASES | {BLOCK: StepKind.DRAFT_BLOCK}
NUM_FILLS = 400  # of a round's first graph: the device is busy while the host launches the others
CAPACITY_CONTEXT = 131072
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
            for kernel in kernels:
                for size in asked.sizes:
                    batch = Batch.of(tables, size.batch_size, size.context)
                    try:
                        yield from _rows(backend, kernel, batch, tables, asked.stage)
                    except Exception as error:  # of a vendor, which may raise anything
                        yield missing(backend, kernel.name, f"{size}, page size {page_size}", error)


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


def layer_shape(backend: type[AttentionBackend], kind: StepKind) -> LayerShape:
    """Of a layer that attends: MLA with 16 heads, else grouped queries, or DeepSeek-V4's: one that is indexed, or that
    drafts blocks.
    """
    formats: frozenset[object] = frozenset(backend.formats)
    if CompressedFormat.COMPRESSED in formats:
        return OF_DSV4._replace(variant=(None, 0)) if kind is StepKind.DRAFT_BLOCK else OF_DSV4
    format = CacheFormat.LATENT if CacheFormat.LATENT in formats else CacheFormat.KV
    return LayerShape.of(LAYERS[format][0], DTYPE, DTYPE)


def _rows(backend: type[AttentionBackend], kernel: Kernel, batch: Batch, tables: Tables, stage: Stage) -> Iterator[Row]:
    chosen = dict.fromkeys(KINDS.values() & kernel.capabilities.keys(), kernel.name)
    made = backend(tables.capacity, tables.geometry, stage.device, kernel=chosen)
    graphs = _graphs(made, batch, stage)
    fill = torch.zeros(1, device=stage.device).zero_
    empty, busy = _captured(fill, stage), _captured(lambda: [fill() for _ in range(NUM_FILLS)], stage)
    replays = [graph.replay for graph in graphs.values()]
    _, *times, least = take_turns([busy.replay, *replays, empty.replay], stage.rounds, stage.clock)
    copying = {CYCLE: _copying(made, batch, stage)}
    place = {
        "page_size": tables.capacity.page_size,
        "batch_size": len(batch.lens),
        "context": batch.host["max_committed"],
    }
    for phase, us in zip(graphs, times, strict=True):
        nodes = nodes_of(graphs[phase])
        device = {"us": round(us - least, 2), "kernel_us": round(sum(nodes), 2), "nodes": len(nodes)}
        host_us, loop_us = copying.get(phase, (None, None))
        of = {"bench": "plans", "backend": backend.name, "kernel": kernel.name, "phase": phase}
        yield {**of, **place, **device, "host_us": host_us, "loop_us": loop_us}


def _graphs(backend: AttentionBackend, batch: Batch, stage: Stage) -> dict[str, Graph]:
    """A graph of each phase's plan, and one of a cycle's, on buffers of an engine's own."""
    steps = {phase: batch.step(kind) for phase, kind in KINDS.items() if kind in backend.choices}
    held = {}
    for phase, step in steps.items():
        layers, inputs = [layer_shape(type(backend), step.kind)], BoundInputs(step.seq_lens)
        held[phase] = [backend.capture(step.bucket(), step.paging, inputs, layers=layers)]
        if step.kind is StepKind.TARGET_VERIFY and backend.kernel_of(step.kind).capabilities[step.kind].captures_packed:
            bucket = backend.capacity.ragged_bucket(StepKind.TARGET_VERIFY, step.bs, step.num_tokens)
            inputs = BoundInputs(step.seq_lens, widths=torch.ones_like(step.seq_lens))
            held[RAGGED] = [backend.capture(bucket, step.paging, inputs, layers=layers)]
    held[CYCLE] = [held[phase][0] for phase in PHASES]

    def plan(name: str) -> None:
        for meta in held[name]:
            backend.refresh(meta)

    return {name: _captured(partial(plan, name), stage) for name in held}


def _captured(region: Callable[[], object], stage: Stage) -> Graph:
    graph = stage.make_graph()
    graph.capture(region)
    return graph


def _copying(backend: AttentionBackend, batch: Batch, stage: Stage) -> tuple[float, float]:
    """Host time of a cycle's steps and the copies of their inputs, and of the calibration loop."""
    steps = {kind: batch.step(kind) for kind in PHASES.values()}
    metas = {kind: backend.capture(step.bucket(), step.paging) for kind, step in steps.items()}

    def copy() -> None:
        for kind, meta in metas.items():
            backend.copy_inputs(meta, batch.step(kind))

    us, loop_us = take_host_turns([Work.of(copy), CALIBRATION], max(1, stage.rounds // 10), stage.device)
    return round(us, 2), round(loop_us, 1)


def nodes_of(graph: Graph) -> list[float]:
    """What each kernel, copy and fill of a replay takes on the device, in microseconds, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type.name == "CUDA"]
    return [event.time_range.end - event.time_range.start for event in events]
