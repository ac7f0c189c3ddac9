"""What each vendor plans for one forward by its own call, on arguments made by hand, as an engine without us makes it.

Written from the vendors' documentation and sharing nothing with the backends. Pages and lengths are on the device and
are not made here: the time is that of the planning call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends.selection.providers import load
from benchmarks.shapes import DTYPE
from benchmarks.speculation import Batch
from spec_metadata import StepKind
from spec_metadata.capacity import ceil_div

HEADS, RANK, ROPE = 16, 512, 64  # DeepSeek-V3 on 8 GPUs
SPARSE_HEADS, SPARSE_KEYS = 64, 128 + 512  # DeepSeek-V4: a window and the selected entries
WORKSPACE_BYTES = 128 * 2**20

Plan = Callable[[], object]


def flashmla(batch: Batch, kind: StepKind) -> list[Plan]:
    """FlashMLA's share-out of the keys of each request."""
    width, lens = _forwards(batch, kind)
    plan = load("flash_mla:get_mla_decoding_metadata")
    options = {"num_q_tokens_per_head_k": width * HEADS, "h_k": 1, "use_legacy": True}
    return [partial(plan, seqlens_k=keys, **options) for keys in lens]


def flashmla_sparse(batch: Batch, kind: StepKind) -> list[Plan]:
    """FlashMLA's share-out of window and entries of each row, which is a request of its own to it."""
    width, lens = _forwards(batch, kind)
    plan = load("flash_mla:get_mla_decoding_metadata")
    keys = [torch.full_like(seen.repeat(width), SPARSE_KEYS) for seen in lens]
    options = {"num_q_tokens_per_head_k": SPARSE_HEADS, "h_k": 1, "use_legacy": True}
    return [partial(plan, seqlens_k=each, **options) for each in keys]


def flash_attention_3(batch: Batch, kind: StepKind) -> list[Plan]:
    """FlashAttention-3's scheduler metadata, as vLLM ships it, for MLA."""
    width, lens = _forwards(batch, kind)
    capacity = batch.tables.capacity
    plan = load("vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata")
    starts = width * torch.arange(batch.batch_size + 1, dtype=torch.int32, device=lens[0].device)
    sizes = (batch.batch_size, width, capacity.max_kv_len, HEADS, 1, ROPE)
    options = {"headdim_v": RANK, "cu_seqlens_q": starts, "page_size": capacity.page_size, "causal": width > 1}
    return [partial(plan, *sizes, keys, **options) for keys in lens]


def flashinfer(batch: Batch, kind: StepKind, backend: str) -> list[Plan]:
    """The plan of FlashInfer's MLA wrapper in its graph mode, a wrapper for each forward. backend: fa2 or fa3."""
    width, lens = _forwards(batch, kind)
    return [_wrapper_plan(batch, width, keys, backend) for keys in lens]


def _wrapper_plan(batch: Batch, width: int, keys: Tensor, backend: str) -> Plan:
    page_size, device = batch.tables.capacity.page_size, keys.device
    num_pages = ceil_div(int(keys[0]), page_size)
    requests = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=device)
    first_slots = batch.tables.table[1 : 1 + batch.batch_size, : num_pages * page_size : page_size]
    csr = (requests * width, requests * num_pages, (first_slots // page_size).flatten(), keys)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    buffers: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in zip(names, csr, strict=True)}
    wrapper = load("flashinfer.mla:BatchMLAPagedAttentionWrapper")(workspace, True, **buffers, backend=backend)
    return partial(
        wrapper.plan,
        metadata=load("flashinfer.mla:MLAPlanMetadata").csr(*csr),
        num_heads=HEADS,
        head_dim_ckv=RANK,
        head_dim_kpe=ROPE,
        page_size=page_size,
        causal=width > 1,
        sm_scale=192**-0.5,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
        lse_mode="basee",
    )


def _forwards(batch: Batch, kind: StepKind) -> tuple[int, Sequence[Tensor]]:
    """Query rows of a request, and for each forward [batch_size] int32, the keys that its last row sees."""
    capacity = batch.tables.capacity
    bucket = capacity.bucket(kind, batch.batch_size)
    num_forwards = bucket.num_steps - 1 if kind is StepKind.DRAFT_DECODE else 1
    device = batch.tables.table.device

    def keys(forward: int) -> Tensor:
        added = forward + 1 if kind is StepKind.DRAFT_DECODE else bucket.width
        return torch.full((batch.batch_size,), batch.context + added, dtype=torch.int32, device=device)

    return bucket.width, [keys(forward) for forward in range(num_forwards)]


# By the name of the kernel that they plan for.
VENDOR_PLANS: dict[str, Callable[[Batch, StepKind], list[Plan]]] = {
    "flashmla": flashmla,
    "flashmla_sparse": flashmla_sparse,
    "flashinfer_fa2": partial(flashinfer, backend="fa2"),
    "flashinfer_fa3": partial(flashinfer, backend="fa3"),
    "vllm_flash_attn": flash_attention_3,
}
