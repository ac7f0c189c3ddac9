"""Slot lists: every row's keys spelled out, the plainest metadata there is and what the reference backend reads.

Row t of a forward belongs to request `request[t]` and sees the first `num_visible[t]` of that request's slots, which
the forwards of a step share: they are those that the last one sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_KV_LEN, NUM_FORWARDS, NUM_TOKENS, Buffers, BufferSpec
from spec_metadata.layout import Step
from spec_metadata.visibility import Drafted, dense_part, drafted, leading, query_starts

BUFFERS = (
    BufferSpec(
        "slots",
        torch.int64,
        (BS, MAX_KV_LEN),
        "slot of each visible token position; a reserved slot past them",
        over_read=MAX_KV_LEN,
    ),
    BufferSpec("request", torch.int64, (NUM_TOKENS,), "request of each row", high=BS),
    BufferSpec("num_visible", torch.int32, (NUM_FORWARDS, NUM_TOKENS), "keys that a row sees", high=MAX_KV_LEN + 1),
)


@dataclass(frozen=True, slots=True, eq=False)
class SlotPlan:
    """One forward as slot lists; tensors as declared in `BUFFERS`, num_visible of this forward.

    drafted: what rows see besides (`visibility.drafted`).
    """

    slots: Tensor
    request: Tensor
    num_visible: Tensor
    drafted: Drafted = 0


def view_slot_lists(step: Step, buffers: Buffers) -> tuple[SlotPlan, ...]:
    """The plan of each forward of a step, as views of the buffers."""
    return tuple(
        SlotPlan(buffers["slots"], buffers["request"], num_visible, drafted(step, forward))
        for forward, num_visible in enumerate(buffers["num_visible"].unbind())
    )


def write_slot_lists(step: Step, buffers: Buffers) -> None:
    """Write the slot lists of all forwards of a step. Device only, fixed shapes."""
    row = torch.arange(step.num_tokens, device=step.device)
    ends = query_starts(step).long()[1:]
    request = torch.searchsorted(ends, row, right=True)
    buffers["request"].copy_(request)
    for forward, num_visible in enumerate(buffers["num_visible"].unbind()):
        dense = dense_part(step, forward)
        rows_below = ends[request] - 1 - row if dense.causal else 0
        num_visible.copy_(dense.kv_lens[request] - rows_below)
    last, max_kv_len = dense_part(step, step.num_forwards - 1), buffers.extent.max_kv_len
    positions = torch.arange(max_kv_len, device=step.device).expand(step.bs, -1)
    visible = leading(last.kv_lens, max_kv_len)
    buffers["slots"].copy_(torch.where(visible, step.paging.slots(positions), step.paging.geometry.reserved_slot))
