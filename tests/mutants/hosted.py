"""Correct backends whose kernel attends from what a schedule planned, as vendors' do: on the host, or on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
from attn_backends.layer import AttentionLayer, AttentionOutput
from spec_metadata import BufferSpec
from spec_metadata.buffers import BS, NUM_FORWARDS
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


class OnDevice(Planned):
    """Takes lengths from the plan, as FlashMLA does."""

    def refresh(self) -> None:
        """Copy the plan's lengths."""
        self.lens.copy_(self.plan.seqused_k)


def launch(q: Tensor, cache: PagedCache, planned: Scheduled[RaggedPlan], layer: AttentionLayer) -> AttentionOutput:
    """Attention over as many keys as were planned."""
    assert isinstance(planned.schedule, Planned)
    return TORCH.launch(q, cache, replace(planned.plan, seqused_k=planned.schedule.lens), layer)


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


class ScheduledBackend(FA3Backend):
    """FA3's metadata under a kernel that plans on the device."""

    name = "scheduled"
    formats = frozenset({CacheFormat.KV})
    kernels = (replace(TORCH, launch=launch, schedule=OnDevice, workspaces=(PLANNED,)),)
