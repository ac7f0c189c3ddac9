"""Ragged queries over a page table: the format of FlashAttention-3 (`flash_attn_with_kvcache`).

Query rows of all requests are packed and delimited by cu_seqlens_q; keys are read through page_table up to seqused_k.
The table is shared by the forwards of a step: it holds the pages of what the last one sees, and an earlier forward
reads less of it because its length is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spec_metadata.buffers import BS, MAX_PAGES, NUM_FORWARDS, Buffers
from spec_metadata.layout import Step
from spec_metadata.plans.declared import kv_lens_spec, pages_spec, query_starts_spec
from spec_metadata.visibility import Drafted, dense_part, drafted, is_causal, query_starts, write_pages

BUFFERS = (
    query_starts_spec("cu_seqlens_q"),
    kv_lens_spec("seqused_k", NUM_FORWARDS, BS),
    pages_spec("page_table", BS, MAX_PAGES),
)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedPlan:
    """One forward as ragged queries and a page table; tensors as declared in `BUFFERS`, seqused_k of this forward.

    causal: bottom-right, else every row sees all keys. max_seqlen_q, max_seqlen_k: host bounds, promised by the
    capacity. drafted: what rows see besides (`visibility.drafted`).
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    page_table: Tensor
    page_size: int
    causal: bool
    max_seqlen_q: int
    max_seqlen_k: int
    drafted: Drafted = 0


def view_ragged(step: Step, buffers: Buffers) -> tuple[RaggedPlan, ...]:
    """The plan of each forward of a step, as views of the buffers."""
    starts, table, extent = buffers["cu_seqlens_q"], buffers["page_table"], buffers.extent
    bounds = extent.page_size, is_causal(step), step.width, extent.max_kv_len
    lens = buffers["seqused_k"].unbind()
    return tuple(
        [RaggedPlan(starts, each, table, *bounds, drafted(step, forward)) for forward, each in enumerate(lens)]
    )


def write_ragged(step: Step, buffers: Buffers) -> None:
    """Write the ragged form of all forwards of a step. Device only, fixed shapes."""
    buffers["cu_seqlens_q"].copy_(query_starts(step))
    for forward, seqused_k in enumerate(buffers["seqused_k"].unbind()):
        seqused_k.copy_(dense_part(step, forward).kv_lens)
    write_pages(step, dense_part(step, step.num_forwards - 1), buffers["page_table"])
