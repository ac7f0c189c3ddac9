"""Ragged queries over a page table: the format of FlashAttention-3 (`flash_attn_with_kvcache`).

Query rows of all requests are packed and delimited by cu_seqlens_q; keys are read through page_table up to seqused_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_KV_LEN, MAX_PAGES, NUM_FORWARDS, NUM_PAGES, NUM_TOKENS, Buffers, BufferSpec
from spec_metadata.layout import Step
from spec_metadata.visibility import dense_part, query_starts, visible_pages

BUFFERS = (
    BufferSpec(
        "cu_seqlens_q", torch.int32, (NUM_FORWARDS, BS + 1), "first query row of each request", high=NUM_TOKENS + 1
    ),
    BufferSpec(
        "seqused_k", torch.int32, (NUM_FORWARDS, BS), "keys that the last row of a request sees", high=MAX_KV_LEN + 1
    ),
    BufferSpec(
        "page_table",
        torch.int32,
        (NUM_FORWARDS, BS, MAX_PAGES),
        "page ids; the reserved page past the visible keys",
        high=NUM_PAGES,
        over_read="the last visible page",
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedPlan:
    """One forward as ragged queries and a page table; tensors as declared in `BUFFERS`, without the leading dimension.

    causal: bottom-right, else every row sees all keys. max_seqlen_q, max_seqlen_k: host bounds, promised by the
    capacity.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    page_table: Tensor
    page_size: int
    causal: bool
    max_seqlen_q: int
    max_seqlen_k: int


def plan_ragged(step: Step, forward: int, buffers: Buffers) -> RaggedPlan:
    """Write the ragged form of one forward of a step into its row of the buffers."""
    extent = buffers.extent
    dense = dense_part(step, forward)
    plan = RaggedPlan(
        cu_seqlens_q=buffers["cu_seqlens_q"][forward],
        seqused_k=buffers["seqused_k"][forward],
        page_table=buffers["page_table"][forward],
        page_size=extent.page_size,
        causal=dense.causal,
        max_seqlen_q=step.width,
        max_seqlen_k=extent.max_kv_len,
    )
    plan.cu_seqlens_q.copy_(query_starts(step))
    plan.seqused_k.copy_(dense.kv_lens)
    plan.page_table.copy_(visible_pages(step, dense, extent.max_pages))
    return plan
