"""Attention as FlashInfer's MLA kernels compute it from lists of work: a piece of a tile's keys for each item, and what
blocks merge of the pieces. What no list names is not computed.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from attn_backends.kernels.work_operators import BLOCK_KEYS, BLOCK_ROWS, ITEM_FIELDS, MAX_WORK, MERGE_FIELDS
from tests.work_lists import Item

_library = torch.library.Library("flashinfer_stand_in", "DEF")
_library.define(
    "attend(Tensor(a!) partial, Tensor work, int[] layout, Tensor q, Tensor latents, Tensor kv_indices, "
    "Tensor(b!) out, Tensor(c!) lse, bool causal, float scale, float lse_scale) -> ()"
)


def attend(
    partial: Tensor,
    work: Tensor,
    layout: list[int],
    q: Tensor,
    latents: Tensor,
    kv_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    lse_scale: float,
) -> None:
    """Write attention of q [num_tokens, num_heads, 576] over latents [num_pages, page_size, 576] into out and lse.

    partial, work: the workspaces, bytes. layout: as FlashInfer's `MLAPlanInfo`. lse_scale: what a natural logarithm is
    multiplied with. One operator, so that a recorded graph holds it as one launch.
    """
    torch.ops.flashinfer_stand_in.attend(
        partial, work, layout, q, latents, kv_indices, out, lse, causal, scale, lse_scale
    )


def _attend(
    partial: Tensor,
    work: Tensor,
    layout: list[int],
    q: Tensor,
    latents: Tensor,
    kv_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    lse_scale: float,
) -> None:
    assert len(layout) == 18
    cluster_size, num_clusters = layout[:2]
    words, size = work.view(torch.int32), cluster_size * BLOCK_ROWS

    def lists(places: list[int], length: int) -> Tensor:
        return torch.stack([words[place // 4 : place // 4 + length] for place in places])

    indptr = lists(layout[15:16], num_clusters + 1)[0].tolist()
    assert indptr[-1] <= MAX_WORK
    columns = lists([*layout[2:5], *layout[10:15]], indptr[-1])
    assert len(columns) == len(ITEM_FIELDS)
    rank, num_rows = out.shape[2], 2 * num_clusters * size
    partial_out = partial[layout[16] : layout[16] + num_rows * rank * out.itemsize].view(out.dtype).view(-1, rank)
    partial_lse = partial[layout[17] : layout[17] + 4 * num_rows].view(torch.float32)
    rows_out, rows_lse = out.view(-1, rank), lse.view(-1)
    for begin, end in pairwise(indptr):
        for item in (Item(*column) for column in columns[:, begin:end].T.tolist()):
            place, row_out, row_lse = _of_item(item, size, q, latents, kv_indices, rank, causal, scale)
            if item.partial_indptr == -1:
                rows_out[place] = row_out.to(out.dtype)
                rows_lse[place] = row_lse * lse_scale
            else:
                place = item.partial_indptr + torch.arange(len(place))
                partial_out[place], partial_lse[place] = row_out.to(out.dtype), row_lse
    merges = lists(layout[5:10], cluster_size * num_clusters)
    assert len(merges) == len(MERGE_FIELDS)
    for row, end_row, first, end, stride in merges.T.tolist():
        for number in range(end_row - row):
            pieces = torch.arange(first + number, end, stride)
            total = partial_lse[pieces].logsumexp(0)
            weights = (partial_lse[pieces] - total).exp().nan_to_num(0.0)
            rows_out[row + number] = (weights.unsqueeze(1) * partial_out[pieces].float()).sum(0).to(out.dtype)
            rows_lse[row + number] = total * lse_scale


def _of_item(
    item: Item, size: int, q: Tensor, latents: Tensor, kv_indices: Tensor, rank: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all tokens and heads that an item attends, their outputs [n, rank] and log-sum-exps [n], in float32."""
    num_heads, page_size = q.shape[1], latents.shape[1]
    row = item.q_start + torch.arange(max(min(size, item.q_len * num_heads - item.q_start), 0))
    place = item.q_indptr * num_heads + row
    reach = item.kv_end
    if causal:  # without a sign, as the kernels compute it
        reach = min(reach, (item.kv_len - item.q_len + (item.q_start + size) // num_heads) % 2**32)
    num_blocks = -(-reach // BLOCK_KEYS) - item.kv_start // BLOCK_KEYS
    key = item.kv_start + torch.arange(max(min(num_blocks * BLOCK_KEYS, item.kv_end - item.kv_start), 0))
    if not len(key):
        return place, torch.zeros(len(row), rank), torch.full((len(row),), -math.inf)
    page = kv_indices[item.kv_indptr + key // page_size].long()
    seen = latents[page, key % page_size].float()
    scores = q.reshape(-1, q.shape[2])[place].float() @ seen.T * scale
    if causal:
        hidden = key + item.q_len > item.kv_len + (row // num_heads).unsqueeze(1)
        scores = scores.masked_fill(hidden, -math.inf)
    total = scores.logsumexp(1)
    weights = (scores - total.unsqueeze(1)).exp().nan_to_num(0.0)
    return place, weights @ seen[:, :rank], total


_library.impl("attend", _attend, "CPU")
torch.library.register_fake("flashinfer_stand_in::attend", lambda *_: None, lib=_library)
