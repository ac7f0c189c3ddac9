"""Slot lists: every row's keys spelled out, the plainest metadata there is and what the reference backend reads.

Row t of a forward belongs to request `request[t]` and sees the first `num_visible[t]` of that request's slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_KV_LEN, NUM_FORWARDS, NUM_TOKENS, Buffers, BufferSpec
from spec_metadata.layout import Step
from spec_metadata.visibility import dense_part, query_starts

BUFFERS = (
    BufferSpec(
        "slots",
        torch.int64,
        (NUM_FORWARDS, BS, MAX_KV_LEN),
        "slot of each visible token position; a reserved slot past them",
    ),
    BufferSpec("request", torch.int64, (NUM_FORWARDS, NUM_TOKENS), "request of each row", high=BS),
    BufferSpec("num_visible", torch.int32, (NUM_FORWARDS, NUM_TOKENS), "keys that a row sees", high=MAX_KV_LEN + 1),
)


@dataclass(frozen=True, slots=True, eq=False)
class SlotPlan:
    """One forward as slot lists; tensors as declared in `BUFFERS`, without the leading dimension."""

    slots: Tensor
    request: Tensor
    num_visible: Tensor


def plan_slots(step: Step, forward: int, buffers: Buffers) -> SlotPlan:
    """Write the slot lists of one forward of a step into its row of the buffers."""
    dense = dense_part(step, forward)
    plan = SlotPlan(
        slots=buffers["slots"][forward],
        request=buffers["request"][forward],
        num_visible=buffers["num_visible"][forward],
    )
    positions = torch.arange(buffers.extent.max_kv_len, device=step.device).expand(step.bs, -1)
    row = torch.arange(step.num_tokens, device=step.device)
    ends = query_starts(step).long()[1:]
    reserved = step.paging.geometry.reserved_page * step.paging.geometry.page_size
    plan.slots.copy_(torch.where(positions < dense.kv_lens.unsqueeze(1), step.paging.slots(positions), reserved))
    plan.request.copy_(torch.searchsorted(ends, row, right=True))
    rows_below = ends[plan.request] - 1 - row if dense.causal else 0
    plan.num_visible.copy_(dense.kv_lens[plan.request] - rows_below)
    return plan
