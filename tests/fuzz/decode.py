"""A backend's metadata read back into what each row sees: page lists, page tables and slot lists.

Metadata of one forward is a mapping of the plan's own names: arrays with the steps of a group in front, and numbers. A
`Malformed` says what no kernel could read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.fuzz.model import OUTSIDE, Group, Ints, Rows, Sums, Truth, prefix_sums

Plan = Mapping[str, Any]


class Malformed(Exception):
    """Metadata that says nothing a kernel could read, or nothing that it may. step: of its group."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.step = step


def require(holds: np.ndarray, what: str) -> None:
    """Refuse unless an array [number, ...] of bool holds everywhere."""
    if not holds.all():
        raise Malformed(what, int(np.argwhere(~holds)[0, 0]))


def csr(truth: Truth, group: Group, plan: Plan) -> Rows:
    """FlashInfer's page lists."""
    starts, lens, begins = plan["qo_indptr"], plan["kv_len"], plan["kv_indptr"]
    most = max(-(-int(lens.max(initial=0)) // truth.page_size), 0)
    require(np.diff(begins) >= most, "a list of pages begins before the one before it ends")
    entry = np.minimum(begins[:, :-1, None] + np.arange(most), plan["kv_indices"].shape[1] - 1)
    pages = np.take_along_axis(plan["kv_indices"], entry.reshape(group.number, -1), 1).reshape(entry.shape)
    return _over_pages(truth, group, plan, starts, lens, pages)


def ragged(truth: Truth, group: Group, plan: Plan) -> Rows:
    """FlashAttention-3's ragged queries over a page table."""
    require(plan["seqused_k"] <= plan["max_seqlen_k"], "seqused_k is over max_seqlen_k")
    return _over_pages(truth, group, plan, plan["cu_seqlens_q"], plan["seqused_k"], plan["page_table"])


def block_table(truth: Truth, group: Group, plan: Plan) -> Rows:
    """TensorRT-LLM's block table of one stride; of a prefill, the ragged form."""
    if "page_table" in plan:
        return ragged(truth, group, plan)
    starts = np.broadcast_to(np.arange(group.bs + 1) * plan["width"], (group.number, group.bs + 1))
    lens, table = plan["cache_seqlens"], plan["block_table"]
    require(lens <= plan["max_kv_len"], "cache_seqlens is over max_kv_len")
    return _over_pages(truth, group, plan, starts, lens, table)


def check_over_read(truth: Truth, plan: Plan) -> None:
    """Behind the pages of a block table's last forward are pages of the pool, as far as TensorRT-LLM reads."""
    table, lens = plan["block_table"], plan["cache_seqlens"]
    behind = np.arange(table.shape[2]) - -(-lens // truth.page_size)[..., None]
    is_read = (behind >= 0) & (behind < max(1, 128 // truth.page_size))
    inside = (table >= 0) & (table < truth.num_pages)
    require(~is_read | inside, "behind a row's pages is what is no page of the pool")


def slot_lists(truth: Truth, group: Group, plan: Plan) -> Rows:
    """The reference's slot lists."""
    sums = prefix_sums(truth.sums(plan["slots"]))
    return _prefixes(group, sums, plan["request"], plan["num_visible"])


def _over_pages(truth: Truth, group: Group, plan: Plan, starts: Ints, lens: Ints, pages: Ints) -> Rows:
    """Rows that see the leading keys of their request's pages."""
    require(plan["page_size"] == np.full(1, truth.page_size), "another page size")
    most = max(-(-int(lens.max(initial=0)) // truth.page_size), 0)
    require(lens <= pages.shape[2] * truth.page_size, "more keys than the table has pages for")
    slots = pages[:, :, :most, None].astype(np.int64) * truth.page_size + np.arange(truth.page_size)
    sums = prefix_sums(truth.sums(slots.reshape(*pages.shape[:2], -1)))
    row = np.arange(group.num_tokens)
    owner = (row[:, None] >= starts[:, None, 1:]).sum(2)
    require(starts[:, -1:] == group.num_tokens, "query rows do not end where the step does")
    below = np.take_along_axis(starts, owner + 1, 1) - 1 - row if plan["causal"] else 0
    return _prefixes(group, sums, owner, np.take_along_axis(lens, owner, 1) - below)


def _prefixes(group: Group, sums: Sums, owner: Ints, count: Ints) -> Rows:
    """Rows that see the leading `count` of sums [number, bs, n + 1] of their request."""
    require((owner >= 0) & (owner < sums.shape[1]), "a row of no request")
    inside = (count >= 0) & (count < sums.shape[2])
    at = owner * sums.shape[2] + np.where(inside, count, 0)
    found = np.take_along_axis(sums.reshape(group.number, -1), at, 1)
    return Rows(count.astype(np.int64), np.where(inside, found, OUTSIDE), np.empty(0, dtype=np.int64))


def join(truth: Truth, group: Group, rows: Rows, slots: Ints, mask: np.ndarray) -> Rows:
    """And the drafted tokens that a row sees by slot. slots: [number, bs, keys]. mask: [number, bs, width, keys]."""
    sums = np.where(mask, truth.sums(slots)[:, :, None], np.uint64(0)).sum(3, dtype=np.uint64)
    flat = (group.number, group.num_tokens)
    return Rows(rows.count + mask.sum(3).reshape(flat), rows.sums + sums.reshape(flat), rows.writes)


def check_rows(truth: Truth, group: Group, wanted: Rows, found: Rows) -> None:
    """Real rows see and write what the model says; padded ones see and write something of the reserved page alone."""
    real = group.is_real
    reserved = truth.reserved_page == found.writes // truth.page_size
    require(~real | (found.writes == wanted.writes), "a row writes another slot")
    require(real | reserved, "a padded row writes outside the reserved page")
    require(~real | (found.count == wanted.count), "a row sees another number of keys")
    require(~real | (found.sums == wanted.sums), "a row sees other slots")
    require(real | (found.count > 0), "a padded row sees nothing")
    require(real | (found.sums == 0), "a padded row sees a slot outside the reserved page")


DECODERS: dict[str, Callable[[Truth, Group, Plan], Rows]] = {
    "flashinfer_mla": csr,
    "trtllm_mla": block_table,
    "fa3": ragged,
    "reference": slot_lists,
}
