"""CSR page lists: the format of FlashInfer's paged wrappers (`BatchMLAPagedAttentionWrapper.plan`).

The pages of all requests lie one after the other: request i owns kv_indices[kv_indptr[i] : kv_indptr[i + 1]], compact,
so kv_indptr.diff() == ceil(kv_len / page_size), as FlashInfer's scheduler requires. A list that grows with each forward
can't be shared, so all forwards of a draft have one plan, of the committed tokens; drafted ones are read by slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_KV_LEN, MAX_PAGES, NUM_PAGES, NUM_TOKENS, Buffers, BufferSpec
from spec_metadata.layout import Step
from spec_metadata.visibility import dense_part, is_causal, leading, query_starts, visible_pages

KV_INDICES = BufferSpec(
    "kv_indices", torch.int32, (BS * MAX_PAGES,), "page ids; the reserved page past the end", high=NUM_PAGES
)
BUFFERS = (
    BufferSpec("qo_indptr", torch.int32, (BS + 1,), "first query row of each request", high=NUM_TOKENS + 1),
    BufferSpec("kv_indptr", torch.int32, (BS + 1,), "first entry of each request", high=BS * MAX_PAGES + 1),
    KV_INDICES,
    BufferSpec("kv_len", torch.int32, (BS,), "keys that the last row of a request sees", high=MAX_KV_LEN + 1),
)


@dataclass(frozen=True, slots=True, eq=False)
class CsrPlan:
    """A step in CSR form; tensors as declared in `BUFFERS`.

    causal: bottom-right, else every row sees all keys. num_tokens: query rows of all requests, padding too. max_query,
    max_kv_len: host bounds, promised by the capacity.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    page_size: int
    causal: bool
    num_tokens: int
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


def view_csr(step: Step, buffers: Buffers) -> tuple[CsrPlan, ...]:
    """The plan of each forward of a step, one and the same, as views of the buffers."""
    plan = CsrPlan(
        qo_indptr=buffers["qo_indptr"],
        kv_indptr=buffers["kv_indptr"],
        kv_indices=buffers["kv_indices"],
        kv_len=buffers["kv_len"],
        page_size=buffers.extent.page_size,
        causal=is_causal(step),
        num_tokens=step.num_tokens,
        max_query=step.width,
        max_kv_len=buffers.extent.max_kv_len,
    )
    return (plan,) * step.num_forwards


def write_csr(step: Step, buffers: Buffers) -> None:
    """Write the CSR form of a step, of a draft that of its committed tokens. Device only, fixed shapes."""
    extent = buffers.extent
    dense = dense_part(step, None)
    rows = csr_rows(query_starts(step).diff(), dense.kv_lens, extent.page_size)
    buffers["qo_indptr"].copy_(rows.qo_indptr)
    buffers["kv_indptr"].copy_(rows.kv_indptr)
    buffers["kv_len"].copy_(rows.kv_len)
    pages = visible_pages(step, dense, extent.max_pages)
    buffers["kv_indices"].copy_(_compact(pages, rows.kv_indptr, step.paging.geometry.reserved_page))


def specified_csr(step: Step, buffers: Buffers) -> dict[str, Tensor]:
    """The elements [shape of the buffer] bool that a planner must have written, of buffers that have others too."""
    lens = dense_part(step, None).kv_lens
    end = csr_rows(lens, lens, buffers.extent.page_size).kv_indptr[-1]
    return {"kv_indices": leading(end + KV_INDICES.over_read.of(buffers.extent), buffers["kv_indices"].shape[0])}


def _starts(lens: Tensor) -> Tensor:
    """[n + 1] int32: where each of n stretches of these lengths starts, and the end."""
    return torch.nn.functional.pad(lens, (1, 0)).cumsum(0, dtype=torch.int32)


def _compact(pages: Tensor, indptr: Tensor, pad: int) -> Tensor:
    """[bs * max_pages] int64: row i of pages [bs, max_pages] moved to indptr[i], then `pad`. A gather: fixed shapes."""
    entry = torch.arange(pages.numel(), device=pages.device)
    request = torch.searchsorted(indptr[1:].long(), entry, right=True).clamp(max=pages.shape[0] - 1)
    column = (entry - indptr.long()[request]).clamp(max=pages.shape[1] - 1)
    return torch.where(entry < indptr[-1], pages[request, column], pad)
