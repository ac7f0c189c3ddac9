"""vLLM's CommonAttentionMetadata, the batch that its attention metadata builders are given.

vLLM counts the query rows in `seq_lens` and pads a batch for its graphs: requests without query rows at the end, slots
of -1. Both are undone here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from attn_backends.adapters.batch import BlockTableBatch, host_list
from attn_backends.errors import UnsupportedStepError
from spec_metadata import BlockTable, CacheGeometry, InvalidStepError, Step


class CommonAttentionMetadata(Protocol):
    """The fields that `read` reads.

    query_start_loc: [num_reqs + 1] int32; query_start_loc_cpu: its host mirror. seq_lens: [num_reqs] int32, tokens of
    each request including this batch's rows. max_seq_len: host bound on them. block_table_tensor: [num_reqs, columns]
    int32. slot_mapping: [num_tokens] int64, -1 in padding. causal: False of a block draft, else True.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor


REFUSED = {
    "encoder_seq_lens": "cross-attention",
    "dcp_local_seq_lens": "decode context parallelism",
    "rswa_prefix_lens": "a reference sliding window",
    "mm_req_doc_ranges": "bidirectional ranges of multimodal tokens",
}


def geometry(num_blocks: int, block_size: int) -> CacheGeometry:
    """The cache of `num_blocks` blocks. block_size: tokens in a block of the block table, the kernel's block size.

    Block 0 is vLLM's null block, which no request owns.
    """
    return CacheGeometry(num_blocks, block_size, reserved_page=0)


def read(common: CommonAttentionMetadata, geometry: CacheGeometry) -> BlockTableBatch:
    """The requests of a batch. Reads `query_start_loc_cpu` and `max_seq_len` on the host, nothing on the device.

    A slot of -1 in a real row (past max_model_len) is written to the reserved page instead.
    """
    _refuse(common, causal=True)
    return _requests(common, geometry)


def read_block(common: CommonAttentionMetadata, geometry: CacheGeometry) -> Step:
    """The step of a block draft (DFlash, DSpark), whose rows see one another. Reads as `read` does."""
    _refuse(common, causal=False)
    return _requests(common, geometry).draft_block()


def _requests(common: CommonAttentionMetadata, geometry: CacheGeometry) -> BlockTableBatch:
    starts = host_list("CommonAttentionMetadata.query_start_loc_cpu", common.query_start_loc_cpu)[: common.num_reqs + 1]
    if len(starts) != common.num_reqs + 1:
        raise InvalidStepError(
            f"query_start_loc_cpu holds {len(starts)} row starts for {common.num_reqs} requests, one more is needed"
        )
    lens = [end - start for start, end in pairwise(starts)]
    while lens and lens[-1] == 0:
        lens.pop()
    if min(lens, default=1) < 1:
        raise InvalidStepError(
            f"CommonAttentionMetadata.query_start_loc_cpu gives requests {lens} query rows; only padding, at the end, "
            f"may have none"
        )
    bs, num_rows = len(lens), sum(lens)
    slots = common.slot_mapping[:num_rows]
    if slots.shape[0] != num_rows:
        raise InvalidStepError(f"slot_mapping holds {slots.shape[0]} slots for {num_rows} query rows")
    return BlockTableBatch(
        query_lens=tuple(lens),
        committed=common.seq_lens[:bs] - common.query_start_loc[: bs + 1].diff(),
        paging=BlockTable(common.block_table_tensor[:bs], geometry),
        out_cache_loc=torch.where(slots < 0, geometry.reserved_slot, slots),
        max_committed=common.max_seq_len - min(lens, default=0),
    )


def _refuse(common: CommonAttentionMetadata, *, causal: bool) -> None:
    reasons = [f"{why} ({name})" for name, why in REFUSED.items() if getattr(common, name, None) is not None]
    if common.causal is not causal:
        reasons.append(f"rows that are {'not ' if causal else ''}causal (causal)")
    if reasons:
        raise UnsupportedStepError("vLLM's CommonAttentionMetadata", reasons, "leave these layers to vLLM's backend")
