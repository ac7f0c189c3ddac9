"""The steps of a speculative cycle for the benchmarks: what an engine hands to a backend in each of its phases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata import CacheGeometry, Capacity, RequestTable, Step, StepKind, UniformQuery
from spec_metadata.layout import HostBounds

PHASES = {
    "draft": StepKind.DRAFT_DECODE,
    "verify": StepKind.TARGET_VERIFY,
    "draft_extend": StepKind.DRAFT_EXTEND,
}
CYCLE = "cycle"  # the three of them
NUM_STEPS = 3


def speculative(max_bs: int, max_context: int, page_size: int, topk: int, num_steps: int) -> Capacity:
    """A capacity that drafts a chain of num_steps tokens, or for more branches a tree of 2 * topk nodes."""
    num_nodes = num_steps + 1 if topk == 1 else 2 * topk
    return Capacity(max_bs, max_context, page_size, topk, num_steps, num_nodes)


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Full requests in shuffled pages, and no cache after them. table: [max_bs + 1, max_kv_len] int32, slots; its
    first row is that of padding.
    """

    capacity: Capacity
    geometry: CacheGeometry
    table: Tensor

    @classmethod
    def of(cls, capacity: Capacity, device: torch.device) -> Tables:
        """Tables for as many requests as fit in a step, the same for the same capacity on the same device."""
        page_size, max_bs = capacity.page_size, capacity.max_bs
        geometry = CacheGeometry(1 + max_bs * capacity.max_pages, page_size)
        generator = torch.Generator(device).manual_seed(page_size)
        order = torch.randperm(geometry.num_pages - 1, generator=generator, device=device, dtype=torch.int32)
        first_slots = (1 + order).mul_(page_size).view(max_bs, -1, 1)
        slots = first_slots + torch.arange(page_size, dtype=torch.int32, device=device)
        reserved = geometry.reserved_slots(capacity.max_kv_len, torch.device(device)).int()
        return cls(capacity, geometry, torch.cat((reserved.unsqueeze(0), slots.flatten(1))))

    def paging(self, batch_size: int) -> RequestTable:
        """The first requests as an engine hands them on."""
        rows = torch.arange(1, batch_size + 1, device=self.table.device)
        return RequestTable(self.table, rows, self.geometry)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Requests between two cycles. lens: [batch_size] int32, committed tokens of each. host: what the host knows."""

    capacity: Capacity
    paging: RequestTable
    lens: Tensor
    host: HostBounds

    @classmethod
    def of(cls, tables: Tables, batch_size: int, context: int) -> Batch:
        """Requests of one length, of which the host knows a bound."""
        lens = torch.full((batch_size,), context, dtype=torch.int32, device=tables.table.device)
        return cls(tables.capacity, tables.paging(batch_size), lens, {"max_committed": context})

    def step(self, kind: StepKind) -> Step:
        """The step of a phase, made anew as a worker does in each cycle."""
        if kind is StepKind.DRAFT_DECODE:
            return Step.draft_decode(1, self.capacity.num_steps, self.lens, self.paging, **self.host)
        if kind is StepKind.DRAFT_EXTEND:
            return Step.draft_extend(UniformQuery(self.capacity.extend_width), self.lens, self.paging, **self.host)
        if kind is StepKind.DRAFT_BLOCK:
            return Step.draft_block(self.capacity.num_draft_tokens, self.lens, self.paging, **self.host)
        return Step.target_verify(self.capacity.num_draft_tokens, self.lens, self.paging, **self.host)
