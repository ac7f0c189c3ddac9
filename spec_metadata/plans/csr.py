"""CSR page lists: the format of FlashInfer's paged wrappers (`BatchMLAPagedAttentionWrapper.plan`).

The pages of all requests lie one after the other: request i owns kv_indices[kv_indptr[i] : kv_indptr[i + 1]], compact,
so kv_indptr.diff() == ceil(kv_len / page_size), as FlashInfer's scheduler requires.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_KV_LEN, MAX_PAGES, NUM_FORWARDS, NUM_PAGES, NUM_TOKENS, Buffers, BufferSpec
from spec_metadata.layout import Step
from spec_metadata.visibility import dense_part, num_visible_pages, query_starts, visible_pages

BUFFERS = (
    BufferSpec(
        "qo_indptr", torch.int32, (NUM_FORWARDS, BS + 1), "first query row of each request", high=NUM_TOKENS + 1
    ),
    BufferSpec(
        "kv_indptr", torch.int32, (NUM_FORWARDS, BS + 1), "first entry of each request", high=BS * MAX_PAGES + 1
    ),
    BufferSpec(
        "kv_indices",
        torch.int32,
        (NUM_FORWARDS, BS * MAX_PAGES),
        "page ids; the reserved page past the end",
        high=NUM_PAGES,
    ),
    BufferSpec(
        "kv_len", torch.int32, (NUM_FORWARDS, BS), "keys that the last row of a request sees", high=MAX_KV_LEN + 1
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class CsrPlan:
    """One forward in CSR form; tensors as declared in `BUFFERS`, without the leading dimension.

    causal: bottom-right, else every row sees all keys. max_query, max_kv_len: host bounds, promised by the capacity.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    page_size: int
    causal: bool
    max_query: int
    max_kv_len: int


def plan_csr(step: Step, forward: int, buffers: Buffers) -> CsrPlan:
    """Write the CSR form of one forward of a step into its row of the buffers."""
    extent = buffers.extent
    dense = dense_part(step, forward)
    pages = visible_pages(step, dense, extent.max_pages)
    plan = CsrPlan(
        qo_indptr=buffers["qo_indptr"][forward],
        kv_indptr=buffers["kv_indptr"][forward],
        kv_indices=buffers["kv_indices"][forward],
        kv_len=buffers["kv_len"][forward],
        page_size=extent.page_size,
        causal=dense.causal,
        max_query=step.width,
        max_kv_len=extent.max_kv_len,
    )
    plan.qo_indptr.copy_(query_starts(step))
    plan.kv_len.copy_(dense.kv_lens)
    plan.kv_indptr[:1].zero_()
    plan.kv_indptr[1:].copy_(num_visible_pages(step, dense).cumsum(0))
    plan.kv_indices.copy_(_compact(pages, plan.kv_indptr, step.paging.geometry.reserved_page))
    return plan


def _compact(pages: Tensor, indptr: Tensor, pad: int) -> Tensor:
    """[bs * max_pages] int64: row i of pages [bs, max_pages] moved to indptr[i], then `pad`. A gather: fixed shapes."""
    entry = torch.arange(pages.numel(), device=pages.device)
    request = torch.searchsorted(indptr[1:].long(), entry, right=True).clamp(max=pages.shape[0] - 1)
    column = (entry - indptr.long()[request]).clamp(max=pages.shape[1] - 1)
    return torch.where(entry < indptr[-1], pages[request, column], pad)
