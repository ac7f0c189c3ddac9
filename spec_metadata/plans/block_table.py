"""Padded block table, lengths and one query stride: the format of trtllm-gen MLA and FlashMLA dense decode.

Query rows are viewed as [bs, width, heads, dim], so only a uniform layout has this form. TensorRT-LLM's kernels read
the table in groups of 128 tokens, so its rows are as long as a multiple of 128 / page_size pages. The table is shared
by the forwards of a step: it holds the pages of what the last one sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spec_metadata.buffers import BS, NUM_FORWARDS, Buffers, Dim
from spec_metadata.capacity import Extent, ceil_div
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import Step
from spec_metadata.plans.declared import kv_lens_spec, pages_spec
from spec_metadata.query import UniformQuery
from spec_metadata.visibility import dense_part, is_causal, write_pages

_GROUP_TOKENS = 128


def _group_pages(extent: Extent) -> int:
    return ceil_div(_GROUP_TOKENS, extent.page_size)


GROUP_PAGES = Dim(f"{_GROUP_TOKENS} / page_size", _group_pages)
TABLE_PAGES = Dim(
    f"round_up(max_pages, {GROUP_PAGES})", lambda e: ceil_div(e.max_pages, _group_pages(e)) * _group_pages(e)
)

BUFFERS = (
    pages_spec("block_table", BS, TABLE_PAGES, over_read=GROUP_PAGES),
    kv_lens_spec("cache_seqlens", NUM_FORWARDS, BS),
)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTablePlan:
    """One forward as a block table; tensors as declared in `BUFFERS`, cache_seqlens of this forward.

    width: query rows of every request. causal: bottom-right, else every row sees all keys. max_kv_len: host bound,
    promised by the capacity.
    """

    block_table: Tensor
    cache_seqlens: Tensor
    page_size: int
    width: int
    causal: bool
    max_kv_len: int


def view_block_table(step: Step, buffers: Buffers) -> tuple[BlockTablePlan, ...]:
    """The plan of each forward of a uniform step, as views of the buffers."""
    if not isinstance(step.query, UniformQuery):
        raise InvalidStepError(f"a block table has one query stride, the {step.kind} step is packed: {step.query}")
    table, extent = buffers["block_table"], buffers.extent
    bounds = extent.page_size, step.width, is_causal(step), extent.max_kv_len
    return tuple([BlockTablePlan(table, lens, *bounds) for lens in buffers["cache_seqlens"].unbind()])


def write_block_table(step: Step, buffers: Buffers) -> None:
    """Write the block table and lengths of all forwards of a step. Device only, fixed shapes."""
    for forward, cache_seqlens in enumerate(buffers["cache_seqlens"].unbind()):
        cache_seqlens.copy_(dense_part(step, forward).kv_lens)
    write_pages(step, dense_part(step, step.num_forwards - 1), buffers["block_table"][:, : buffers.extent.max_pages])
