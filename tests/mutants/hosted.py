"""Correct backends whose kernel attends from what a schedule planned, as vendors' do: on the host, or on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
from attn_backends.layer import AttentionLayer, AttentionOutput
from spec_metadata import BufferSpec
from spec_metadata.buffers import BS, NUM_FORWARDS, Dim
from spec_metadata.plans.ragged import RaggedPlan
from spec_metadata.visibility import HostLens
from tests.torch_kernels import torch_kernel

TORCH = torch_kernel(FA3Backend)
PLANNED = BufferSpec("planned_lens", torch.int32, (NUM_FORWARDS, BS), "keys that the last row of each request sees")


class Planned(Schedule):
    """lens: [bs] int32, at the same place in every step."""

    def __init__(self, plan: RaggedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self.plan, self.lens = plan, buffers[PLANNED.name]


class OnHost(Planned):
    """Takes lengths from the host, as FlashInfer does."""

    def plan_host(self, lens: HostLens) -> None:
        """Copy the exact lengths."""
        self.lens.copy_(torch.tensor(lens.kv_lens))


STARTS = BufferSpec("planned_starts", torch.int32, (NUM_FORWARDS, BS + 1), "first unit of work of each request")


class UnitsOnHost(OnHost):
    """Takes query rows from the host, too. A unit of work is one head of one row, as FlashInfer packs them."""

    def __init__(self, plan: RaggedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        super().__init__(plan, shape, buffers)
        self.starts, self.num_heads = buffers[STARTS.name], shape.num_heads

    def plan_host(self, lens: HostLens) -> None:
        """Copy the exact lengths, and count the units."""
        super().plan_host(lens)
        starts = list(accumulate(lens.query_lens, initial=0))
        self.starts.copy_(torch.tensor(starts) * self.num_heads)


class OnDevice(Planned):
    """Takes lengths from the plan, as FlashMLA does."""

    def refresh(self) -> None:
        """Copy the plan's lengths."""
        self.lens.copy_(self.plan.seqused_k)


def launch(q: Tensor, cache: PagedCache, planned: Scheduled[RaggedPlan], layer: AttentionLayer) -> AttentionOutput:
    """Attention over as many keys as were planned."""
    assert isinstance(planned.schedule, Planned)
    return TORCH.launch(q, cache, replace(planned.plan, seqused_k=planned.schedule.lens), layer)


def launch_units(
    q: Tensor, cache: PagedCache, planned: Scheduled[RaggedPlan], layer: AttentionLayer
) -> AttentionOutput:
    """Attention over as many keys as were planned; rows of a request whose units lie elsewhere give zeros."""
    assert isinstance(planned.schedule, UnitsOnHost)
    output, starts = launch(q, cache, planned, layer), planned.plan.cu_seqlens_q
    is_planned = planned.schedule.starts == starts * layer.num_heads
    request = torch.searchsorted(starts[1:], torch.arange(len(q), device=q.device), right=True)
    rows = (is_planned[:-1] & is_planned[1:])[request]
    return AttentionOutput(torch.where(rows[:, None, None], output.out, 0), output.lse)


class HostedBackend(FA3Backend):
    """FA3's metadata under a kernel that plans on the host."""

    name = "hosted"
    formats = frozenset({CacheFormat.KV})
    kernels = (
        Kernel(
            "torch",
            launch,
            {kind: replace(declared, needs_host_lens=True) for kind, declared in TORCH.capabilities.items()},
            TORCH.unavailable_reasons,
            schedule=OnHost,
            workspaces=(PLANNED,),
        ),
    )


class UnitsBackend(HostedBackend):
    """The same under a kernel whose plans on the host are of query rows and heads, too."""

    name = "units"
    kernels = tuple(
        replace(kernel, launch=launch_units, schedule=UnitsOnHost, workspaces=(PLANNED, STARTS))
        for kernel in HostedBackend.kernels
    )


class ScheduledBackend(FA3Backend):
    """FA3's metadata under a kernel that plans on the device."""

    name = "scheduled"
    formats = frozenset({CacheFormat.KV})
    kernels = (replace(TORCH, launch=launch, schedule=OnDevice, workspaces=(PLANNED,)),)


MAX_TILES = Dim("bs * max_pages", lambda e: e.bs * e.max_pages)
TILES = BufferSpec("tiles", torch.int32, (NUM_FORWARDS, MAX_TILES), "request of each tile, one for each page of keys")
NUM_TILES = BufferSpec("num_tiles", torch.int32, (NUM_FORWARDS, Dim("1", lambda e: 1)), "how many there are")


class Tiles(Schedule):
    """tiles: [bs * max_pages] int32, what lies after the first num_tiles [1] belongs to no request."""

    def __init__(self, plan: RaggedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self.plan, self.tiles, self.num_tiles = plan, buffers[TILES.name], buffers[NUM_TILES.name]

    def refresh(self) -> None:
        """A tile for each page of keys, request after request."""
        ends = (-(-self.plan.seqused_k // self.plan.page_size)).cumsum(0)
        tile = torch.arange(len(self.tiles), device=ends.device)
        request = torch.searchsorted(ends, tile, right=True)
        self.tiles.copy_(torch.where(tile < ends[-1], request, self.tiles))
        self.num_tiles.copy_(ends[-1:])

    def runs(self) -> Tensor:
        """[bs * max_pages] bool: the blocks of threads that have a tile. A graph launches one for each that may be."""
        return torch.arange(len(self.tiles), device=self.tiles.device) < self.num_tiles


def launch_tiles(
    q: Tensor, cache: PagedCache, planned: Scheduled[RaggedPlan], layer: AttentionLayer
) -> AttentionOutput:
    """Attention; a block that runs on a tile of no request writes outside of the output, here NaN into it."""
    assert isinstance(planned.schedule, Tiles)
    output = TORCH.launch(q, cache, planned.plan, layer)
    tiles, bs = planned.schedule.tiles, len(planned.plan.seqused_k)
    astray = planned.schedule.runs() & ((tiles < 0) | (tiles >= bs))
    return AttentionOutput(torch.where(astray.any(), float("nan"), output.out), output.lse)


class TiledBackend(FA3Backend):
    """FA3's metadata under a kernel whose schedule is as long as the batch is, in memory for the longest."""

    name = "tiled"
    formats = frozenset({CacheFormat.KV})
    kernels = (replace(TORCH, launch=launch_tiles, schedule=Tiles, workspaces=(TILES, NUM_TILES)),)
