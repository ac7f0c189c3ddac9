"""Page lists of FlashInfer's MLA kernels (`BatchMLAPagedAttentionWrapper`): where each request's pages begin.

Request i owns the entries of kv_indices from kv_indptr[i] on, ceil(kv_len[i] / page_size) of them. FlashInfer's kernels
and scheduler read where a list begins and a length, nothing of its end. So every list begins where it would if all had
the largest length, kv_indptr[i] == i * max_pages: none moves when another grows, and phases of the same requests share
them.
(FlashInfer's Python wrapper asks for compact lists; it is not what launches here.)

All forwards of a draft have one plan, of the committed tokens, and so one work list; drafted ones are read by slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_PAGES, Buffers, BufferSpec
from spec_metadata.layout import Step
from spec_metadata.plans.declared import kv_lens_spec, pages_spec, query_starts_spec
from spec_metadata.visibility import dense_part, is_causal, query_starts, write_pages

BUFFERS = (
    query_starts_spec("qo_indptr"),
    BufferSpec(
        "kv_indptr", torch.int32, (BS + 1,), "first entry of each request, max_pages apart", high=BS * MAX_PAGES + 1
    ),
    pages_spec("kv_indices", BS * MAX_PAGES),
    kv_lens_spec("kv_len", BS),
)


@dataclass(frozen=True, slots=True, eq=False)
class CsrPlan:
    """A step as page lists; tensors as declared in `BUFFERS`.

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
    """Query rows, pages and keys of requests. qo_indptr, kv_indptr: [bs + 1] int32, offsets. kv_len: [bs] int32."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_len: Tensor


def csr_rows(query_lens: Tensor, kv_lens: Tensor, max_pages: int) -> CsrRows:
    """The rows of the form, wherever the lengths are: a plan's on the device, a vendor's on the host.

    query_lens, kv_lens: [bs] integers, query rows of a request and keys that its last row sees. max_pages: entries from
    one list to the next.
    """
    starts = torch.nn.functional.pad(query_lens, (1, 0)).cumsum(0, dtype=torch.int32)
    lists = torch.arange(kv_lens.shape[0] + 1, dtype=torch.int32, device=kv_lens.device)
    return CsrRows(starts, lists * max_pages, kv_lens.int())


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
    """Write the form of a step, of a draft that of its committed tokens. Device only, fixed shapes."""
    dense, max_pages = dense_part(step, None), buffers.extent.max_pages
    rows = csr_rows(query_starts(step).diff(), dense.kv_lens, max_pages)
    buffers["qo_indptr"].copy_(rows.qo_indptr)
    buffers["kv_indptr"].copy_(rows.kv_indptr)
    buffers["kv_len"].copy_(rows.kv_len)
    write_pages(step, dense, page_lists(buffers))


def page_lists(buffers: Buffers) -> Tensor:
    """[bs, max_pages] int32: kv_indices as rows."""
    return buffers["kv_indices"].view(buffers.extent.bs, buffers.extent.max_pages)
