"""Padded block table, lengths and one query stride: the format of trtllm-gen MLA and FlashMLA dense decode.

Query rows are viewed as [bs, width, heads, dim], so only a uniform layout has this form. TensorRT-LLM's kernels read
the table in groups of 128 tokens, so its rows are padded to a multiple of 128 / page_size pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_KV_LEN, NUM_FORWARDS, NUM_PAGES, Buffers, BufferSpec, Dim
from spec_metadata.capacity import Extent, ceil_div
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import Step
from spec_metadata.query import UniformQuery
from spec_metadata.visibility import dense_part, visible_pages


def _padded_pages(extent: Extent) -> int:
    group = ceil_div(128, extent.page_size)
    return ceil_div(extent.max_pages, group) * group


TABLE_PAGES = Dim("round_up(max_pages, 128 / page_size)", _padded_pages)

BUFFERS = (
    BufferSpec(
        "block_table",
        torch.int32,
        (NUM_FORWARDS, BS, TABLE_PAGES),
        "page ids; the reserved page past the visible keys",
        high=NUM_PAGES,
        over_read="the whole row",
    ),
    BufferSpec(
        "cache_seqlens",
        torch.int32,
        (NUM_FORWARDS, BS),
        "keys that the last row of a request sees",
        high=MAX_KV_LEN + 1,
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTablePlan:
    """One forward as a block table; tensors as declared in `BUFFERS`, without the leading dimension.

    width: query rows of every request. causal: bottom-right, else every row sees all keys. max_kv_len: host bound,
    promised by the capacity.
    """

    block_table: Tensor
    cache_seqlens: Tensor
    page_size: int
    width: int
    causal: bool
    max_kv_len: int


def plan_block_table(step: Step, forward: int, buffers: Buffers) -> BlockTablePlan:
    """Write the block table of one forward of a uniform step into its row of the buffers."""
    if not isinstance(step.query, UniformQuery):
        raise InvalidStepError(f"a block table has one query stride, the {step.kind} step is packed: {step.query}")
    extent = buffers.extent
    dense = dense_part(step, forward)
    plan = BlockTablePlan(
        block_table=buffers["block_table"][forward],
        cache_seqlens=buffers["cache_seqlens"][forward],
        page_size=extent.page_size,
        width=step.width,
        causal=dense.causal,
        max_kv_len=extent.max_kv_len,
    )
    plan.block_table[:, : extent.max_pages].copy_(visible_pages(step, dense, extent.max_pages))
    plan.block_table[:, extent.max_pages :].fill_(step.paging.geometry.reserved_page)
    plan.cache_seqlens.copy_(dense.kv_lens)
    return plan
