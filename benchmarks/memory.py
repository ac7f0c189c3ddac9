"""Bytes of the static buffers of captured phases, from their declarations: nothing is allocated.

A phase's buffers are its raw inputs, its write slots and what the backend declares, at the whole capacity. All phases
are there side by side; what is of the requests alone is there once, as the engine's table is read in place. Workspaces
and scratch of kernels come apart: they depend on the vendor and not on the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.memory.phases import SHARED
from benchmarks.rows import MemoryRow, Missing, missing
from benchmarks.speculation import PHASES
from spec_metadata import BlockTable, CacheGeometry, Capacity, Extent, Paging, RequestTable
from spec_metadata.static_inputs import padding_step

MAX_BS, MAX_CONTEXT, NUM_STEPS = 128, 131072, 4
CASES = {
    "trtllm_mla": ((64, 1), (64, 4)),
    "fa3": ((64, 1), (64, 4), (1, 1), (1, 4)),
    "flashinfer_mla": ((1, 1), (1, 4)),
    "dsv4": ((256, 1),),
}  # page size and topk
TOTAL, ALL, WORKSPACE = "total", "all", "workspace"


class PeerBytes(NamedTuple):
    """What SGLang's `init_cuda_graph_state` of each phase takes; None for one that it does not capture."""

    draft: int
    draft_extend: int | None
    verify: int

    @property
    def all(self) -> int:
        """All phases together, each in memory of its own."""
        return self.draft + (self.draft_extend or 0) + self.verify


# SGLang 0.5.23 on an H200 at max_bs 128, context 131072, 4 steps, by backend, page size and topk. It drafts trees on
# FA3 alone. FlashInfer's draft extend has a state too, of 67,111,424 bytes, but runs eagerly.
PEERS = {
    ("flashinfer_mla", 1, 1): PeerBytes(268_443_136, None, 67_111_424),
    ("trtllm_mla", 64, 1): PeerBytes(284_958_208, 90_442_240, 91_232_256),
    ("fa3", 64, 1): PeerBytes(12_753_408, 4_251_136, 4_254_720),
    ("fa3", 1, 1): PeerBytes(814_766_592, 271_588_864, 271_592_448),
    ("fa3", 64, 4): PeerBytes(415_600_128, 138_531_328, 272_757_248),
    ("fa3", 1, 4): PeerBytes(1_217_613_312, 405_869_056, 540_094_976),
}

PAGINGS: Mapping[str, Callable[[CacheGeometry], Paging]] = {
    "request_table": lambda geometry: RequestTable(
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), geometry
    ),
    "block_table": lambda geometry: BlockTable(torch.zeros(0, 1, dtype=torch.int32), geometry),
}  # as an engine's, without its contents


def measure_memory(backend: type[AttentionBackend], capacity: Capacity) -> Iterator[MemoryRow | Missing]:
    """A row of each buffer and phase, over either form of table, and of each kernel's workspaces."""
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    made = backend(capacity, geometry)
    for kind in PHASES.values():
        step = padding_step(capacity.bucket(kind, 1), PAGINGS["request_table"](geometry), capacity)
        reasons = made.unsupported_reasons(step)
        if reasons:
            case = f"page size {capacity.page_size}, topk {capacity.topk}"
            yield missing(backend, "", case, UnsupportedStepError(f"{made.name} can't take a {kind} step", reasons))
            return
    peer = _peer(backend.name, capacity)
    sizes = (capacity.max_bs, capacity.max_context, capacity.page_size, capacity.topk)
    place = ("memory", backend.name, *sizes)
    for paging, make in PAGINGS.items():
        row = partial(MemoryRow, *place, paging)
        by_kind = made.static_bytes(make(geometry))
        yield from (row(ALL, name, num_bytes, None) for name, num_bytes in by_kind[SHARED].items())
        shared, own = sum(by_kind[SHARED].values()), 0
        for phase, kind in PHASES.items():
            of_phase = sum(by_kind[kind].values())
            own += of_phase
            yield from (row(phase, name, num_bytes, None) for name, num_bytes in by_kind[kind].items())
            yield row(phase, TOTAL, of_phase + shared, None if peer is None else getattr(peer, phase))
        yield row(ALL, TOTAL, own + shared, None if peer is None else peer.all)
    for name, num_bytes in _workspaces(backend, capacity):
        yield MemoryRow(*place, "", WORKSPACE, name, num_bytes, None)


def _workspaces(backend: type[AttentionBackend], capacity: Capacity) -> Iterator[tuple[str, int]]:
    """Of every kernel, at the phase that needs most, for one shape of layers."""
    extents = [Extent.of_bucket(capacity.bucket(kind, capacity.max_bs), capacity) for kind in PHASES.values()]
    for kernel in backend.kernels:
        for spec in (*kernel.workspaces, *kernel.scratch):
            yield f"{kernel.name}: {spec.name}", max(spec.num_bytes(extent) for extent in extents)


def _peer(backend: str, capacity: Capacity) -> PeerBytes | None:
    if (capacity.max_bs, capacity.max_context, capacity.num_steps) != (MAX_BS, MAX_CONTEXT, NUM_STEPS):
        return None
    return PEERS.get((backend, capacity.page_size, capacity.topk))
