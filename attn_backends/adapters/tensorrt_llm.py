"""TensorRT-LLM's attention metadata (TrtllmAttentionMetadata and its subclasses), after its `prepare`.

A batch holds `num_contexts` prompts, then running requests:

    prompts, running = read(metadata, manager, geometry, capacity).split(metadata.num_contexts)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends.adapters.batch import BlockTableBatch, host_list
from attn_backends.errors import UnsupportedStepError
from spec_metadata import BlockTable, CacheGeometry, Capacity, InvalidStepError
from spec_metadata.upload import upload


class KVCacheManager(Protocol):
    """The parts of TensorRT-LLM's KV cache manager, the target's or the draft's, that the adapter reads.

    tokens_per_block: page size. get_block_ids_per_seq: [num_seqs, columns] int32 on the host, columns as many as the
    longest request has blocks.
    """

    tokens_per_block: int

    def get_block_ids_per_seq(self, request_ids: list[int]) -> Tensor:
        """The blocks of each request, padded with 0."""
        ...


class KVCacheParams(Protocol):
    """The parts of the cache parameters that the adapter reads. use_cache: whether there is a cache."""

    use_cache: bool


class AttentionMetadata(Protocol):
    """The fields that `read` reads.

    seq_lens: [num_seqs] int32 on the host, query rows of each request. seq_lens_cuda: the same on the device.
    kv_lens_cuda: [max_num_sequences] int32, tokens of each request including these rows. request_ids: of the cache
    manager. beam_width: 1. is_cross: False.
    """

    seq_lens: Tensor | None
    seq_lens_cuda: Tensor
    kv_lens_cuda: Tensor | None
    request_ids: list[int] | None
    kv_cache_params: KVCacheParams
    beam_width: int
    is_cross: bool


REFUSED = {
    "sparse_metadata_params": "sparse attention",
    "multi_item_part_lens": "multi-item scoring",
    "helix_position_offsets": "helix parallelism",
}


def read(
    metadata: AttentionMetadata, manager: KVCacheManager, geometry: CacheGeometry, capacity: Capacity
) -> BlockTableBatch:
    """The requests of a batch. Reads `seq_lens` and the manager's block ids on the host, nothing on the device.

    manager: `metadata.kv_cache_manager`, or `metadata.draft_kv_cache_manager` for a draft with a cache of its own.
    geometry: of that cache; its reserved page is a block that the worker holds for a dummy request. capacity: its
    `max_pages` is the width of the table, as the manager's is only as wide as the batch needs.

    Committed lengths are kv_lens_cuda - seq_lens_cuda: with the overlap scheduler the host's
    num_cached_tokens_per_seq counts drafts that were rejected since.
    """
    _refuse(metadata)
    if manager.tokens_per_block != geometry.page_size:
        raise InvalidStepError(
            f"the manager has {manager.tokens_per_block} tokens per block, the geometry pages of {geometry.page_size}"
        )
    lens = host_list("AttentionMetadata.seq_lens", metadata.seq_lens)
    if metadata.request_ids is None or metadata.kv_lens_cuda is None:
        missing = "request_ids" if metadata.request_ids is None else "kv_lens_cuda"
        raise InvalidStepError(
            f"AttentionMetadata.{missing} is None; call prepare() of a TrtllmAttentionMetadata first"
        )
    bs, device = len(lens), metadata.kv_lens_cuda.device
    blocks = torch.as_tensor(manager.get_block_ids_per_seq(metadata.request_ids[:bs]), dtype=torch.int32)
    table = pad(blocks, (0, max(capacity.max_pages - blocks.shape[1], 0)), value=geometry.reserved_page)
    return BlockTableBatch(
        query_lens=tuple(lens),
        committed=metadata.kv_lens_cuda[:bs] - metadata.seq_lens_cuda[:bs],
        paging=BlockTable(upload(table, device), geometry),
        out_cache_loc=None,
        max_committed=None,
    )


def unpack_tree_mask(packed: Tensor) -> Tensor:
    """[bs, width, width] bool of [bs, width, words] int32: bit c of word w says that the row sees node 32 * w + c.

    packed: the rows of `spec_decoding_packed_mask` that belong to the running requests.
    """
    nodes = torch.arange(packed.shape[1], device=packed.device)
    return ((packed[:, :, nodes // 32] >> (nodes % 32)) & 1).bool()


def _refuse(metadata: AttentionMetadata) -> None:
    reasons = [f"{why} ({name})" for name, why in REFUSED.items() if getattr(metadata, name, None) is not None]
    if metadata.is_cross:
        reasons.append("cross-attention (is_cross)")
    if metadata.beam_width != 1:
        reasons.append(f"beams (beam_width={metadata.beam_width})")
    if not metadata.kv_cache_params.use_cache:
        reasons.append("attention without a KV cache (kv_cache_params.use_cache)")
    if reasons:
        raise UnsupportedStepError(
            "TensorRT-LLM's AttentionMetadata", reasons, "leave these layers to TensorRT-LLM's backend"
        )
