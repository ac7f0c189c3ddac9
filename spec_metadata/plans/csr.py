"""CSR page lists: the format of FlashInfer's paged wrappers (`BatchMLAPagedAttentionWrapper.plan`).

The pages of all requests lie one after the other: request i owns kv_indices[kv_indptr[i] : kv_indptr[i + 1]], compact,
so kv_indptr.diff() == ceil(kv_len / page_size), as FlashInfer's scheduler requires.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_KV_LEN, MAX_PAGES, NUM_FORWARDS, NUM_PAGES, NUM_TOKENS, Buffers, BufferSpec
from spec_metadata.layout import Step
from spec_metadata.visibility import dense_part, query_starts, visible_pages

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


class CsrRows(NamedTuple):
    """What each request owns of queries and pages. qo_indptr, kv_indptr: [bs + 1] int32. kv_len: [bs] int32."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_len: Tensor


def csr_rows(query_lens: Tensor, kv_lens: Tensor, page_size: int) -> CsrRows:
    """The rows of a compact CSR form, wherever the lengths are: a plan's on the device, a vendor's on the host.

    query_lens, kv_lens: [bs] integers, query rows of a request and keys that its last row sees.
    """
    num_pages = torch.div(kv_lens + (page_size - 1), page_size, rounding_mode="floor")
    return CsrRows(_starts(query_lens), _starts(num_pages), kv_lens.int())


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
    rows = csr_rows(query_starts(step).diff(), dense.kv_lens, extent.page_size)
    plan.qo_indptr.copy_(rows.qo_indptr)
    plan.kv_indptr.copy_(rows.kv_indptr)
    plan.kv_len.copy_(rows.kv_len)
    plan.kv_indices.copy_(_compact(pages, plan.kv_indptr, step.paging.geometry.reserved_page))
    return plan


def _starts(lens: Tensor) -> Tensor:
    """[n + 1] int32: where each of n stretches of these lengths starts, and the end."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()


def _compact(pages: Tensor, indptr: Tensor, pad: int) -> Tensor:
    """[bs * max_pages] int64: row i of pages [bs, max_pages] moved to indptr[i], then `pad`. A gather: fixed shapes."""
    entry = torch.arange(pages.numel(), device=pages.device)
    request = torch.searchsorted(indptr[1:].long(), entry, right=True).clamp(max=pages.shape[0] - 1)
    column = (entry - indptr.long()[request]).clamp(max=pages.shape[1] - 1)
    return torch.where(entry < indptr[-1], pages[request, column], pad)
