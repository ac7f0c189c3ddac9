"""Bytes of the static buffers of captured phases, from their declarations: nothing is allocated.

A phase's buffers are its raw inputs, its write slots and what the backend declares, at the whole capacity. All phases
are there side by side; what is of the requests alone is there once, as the engine's table is read in place. Workspaces
and scratch of kernels come apart: they depend on the vendor and not on the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.memory.phases import SHARED
from benchmarks.rows import Asked, Missing, Row, missing
from benchmarks.speculation import PHASES, speculative
from spec_metadata import BlockTable, CacheGeometry, Capacity, Extent, Paging, RequestTable
from spec_metadata.static_inputs import padding_step

MAX_BS, MAX_CONTEXT, NUM_STEPS = 128, 131072, 4
CASES = {
    "trtllm_mla": ((64, 1), (64, 4)),
    "fa3": ((64, 1), (64, 4), (1, 1), (1, 4)),
    "flashinfer_mla": ((1, 1), (1, 4)),
    "dsv4": ((256, 1),),
}  # page size and topk
SIZES = tuple(CASES), (MAX_BS,), (MAX_CONTEXT,)
ALL, WORKSPACE = "all", "workspace"


PAGINGS: Mapping[str, Callable[[CacheGeometry], Paging]] = {
    "request_table": lambda geometry: RequestTable(
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), geometry
    ),
    "block_table": lambda geometry: BlockTable(torch.zeros(0, 1, dtype=torch.int32), geometry),
}  # as an engine's, without its contents


def memory(asked: Asked) -> Iterator[Row | Missing]:
    """A row of each phase of each backend's cases, for as many requests and as long contexts as were asked for."""
    for backend in asked.backends:
        cases = CASES.get(backend.name, ((64, 1),))
        if asked.page_size is not None or asked.topk is not None:
            cases = ((asked.page_size or cases[0][0], 1 if asked.topk is None else asked.topk),)
        for size, (page_size, topk) in product(asked.sizes, cases):
            capacity = speculative(size.batch_size, size.context, page_size, topk, NUM_STEPS)
            yield from static_memory(backend, capacity)


def static_memory(backend: type[AttentionBackend], capacity: Capacity) -> Iterator[Row | Missing]:
    """Over either form of table, and of each kernel's workspaces. phase: draft, verify or draft_extend, each with what
    all share; all; or workspace, of kernels. buffers: bytes by name, of what a phase has alone, or all share. paging:
    the form of the engine's table.
    """
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    made = backend(capacity, geometry)
    for kind in PHASES.values():
        step = padding_step(capacity.bucket(kind, 1), PAGINGS["request_table"](geometry), capacity)
        reasons = made.unsupported_reasons(step)
        if reasons:
            case = f"page size {capacity.page_size}, topk {capacity.topk}"
            yield missing(backend, "", case, UnsupportedStepError(f"{made.name} can't take a {kind} step", reasons))
            return
    place: dict[str, Any] = {"bench": "memory", "backend": backend.name, "batch_size": capacity.max_bs}
    place |= {"context": capacity.max_context, "page_size": capacity.page_size, "topk": capacity.topk}

    def row(paging: str, phase: str, num_bytes: int, buffers: Mapping[str, int]) -> Row:
        return {**place, "paging": paging, "phase": phase, "bytes": num_bytes, "buffers": dict(buffers)}

    for paging, make in PAGINGS.items():
        by_kind = made.static_bytes(make(geometry))
        shared = sum(by_kind[SHARED].values())
        own = {phase: sum(by_kind[kind].values()) for phase, kind in PHASES.items()}
        yield from (row(paging, phase, own[phase] + shared, by_kind[kind]) for phase, kind in PHASES.items())
        yield row(paging, ALL, sum(own.values()) + shared, by_kind[SHARED])
    workspaces = dict(_workspaces(backend, capacity))
    yield row("", WORKSPACE, sum(workspaces.values()), workspaces)


def _workspaces(backend: type[AttentionBackend], capacity: Capacity) -> Iterator[tuple[str, int]]:
    """Of every kernel, at the phase that needs most, for one shape of layers."""
    extents = [Extent.of_bucket(capacity.bucket(kind, capacity.max_bs), capacity) for kind in PHASES.values()]
    for kernel in backend.kernels:
        for spec in (*kernel.workspaces, *kernel.scratch):
            yield f"{kernel.name}: {spec.name}", max(spec.num_bytes(extent) for extent in extents)
