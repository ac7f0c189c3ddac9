"""TensorRT-LLM's MLA decode on a block table (SM100, SM103): FlashInfer's `trtllm_batch_decode_with_kv_cache_mla`.

    query [bs, width, num_heads, 576], latents [num_pages, page_size, 576]  ->  out [bs, width, num_heads, 512], lse

Written against the call as FlashInfer 0.7.2 documents it and tested on its arguments alone: no such GPU was at hand.
Rows of one request are causal there and can't be otherwise, so over a tree, and in a draft block, every row becomes a
request of width one. Its table row and length are repeated, once per forward, into declared buffers. Nothing is said of
a request without keys; there a length of one stands in, and the log-sum-exp, natural by the vendor's own switch, is set
to -inf.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedLatent
from attn_backends.contract.capabilities import Capabilities, LseBase
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection import providers
from spec_metadata import BufferSpec
from spec_metadata.buffers import MAX_KV_LEN, NUM_FORWARDS, NUM_PAGES, NUM_TOKENS, Dim
from spec_metadata.capacity import UNIFORM_KINDS
from spec_metadata.plans.block_table import TABLE_PAGES, BlockTablePlan

NAME = "trtllm_gen"
_DECODE = Capabilities(
    page_sizes=frozenset({32, 64}),
    dtypes=frozenset({torch.bfloat16}),
    head_sizes=frozenset({(576, 512)}),
    non_causal=True,
    lse=LseBase.NATURAL,
)
_QK_NOPE_HEAD_DIM = 128  # of the model before absorption; the kernels of these head sizes know no other

_WORKSPACE = BufferSpec(
    "trtllm_workspace",
    torch.uint8,
    (Dim("128 MiB", lambda e: 128 << 20),),
    "partial results; the kernel's counters in it must start as zeros, and it leaves them so",
)
_ROW_TABLE = BufferSpec(
    "row_table", torch.int32, (NUM_FORWARDS, NUM_TOKENS, TABLE_PAGES), "table row of each query row", high=NUM_PAGES
)
_ROW_LENS = BufferSpec(
    "row_lens", torch.int32, (NUM_FORWARDS, NUM_TOKENS), "keys of each query row, at least one", high=MAX_KV_LEN + 1
)
_ROW_EMPTY = BufferSpec("row_empty", torch.bool, (NUM_FORWARDS, NUM_TOKENS), "whether a query row sees no key")


class RowSchedule(Schedule):
    """Arguments of the call: the plan itself for a chain, a request for each row where all see the same.

    table: [num_requests, pages] int32. lens: [num_requests] int32. empty: [num_tokens] bool, None for a chain. width:
    query rows of a request. workspace: the vendor's.
    """

    def __init__(self, plan: BlockTablePlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self._plan, self.workspace = plan, buffers[_WORKSPACE.name]
        self.table, self.lens, self.width = plan.block_table, plan.cache_seqlens, plan.width
        self.empty: Tensor | None = None
        if not plan.causal:
            self.table, self.lens, self.width = buffers[_ROW_TABLE.name], buffers[_ROW_LENS.name], 1
            self.empty = buffers[_ROW_EMPTY.name]

    def refresh(self) -> None:
        """Repeat the plan's tables and lengths for each row where all see the same."""
        if self.empty is None:
            return
        bs, width = self._plan.cache_seqlens.shape[0], self._plan.width
        lens = self._plan.cache_seqlens.unsqueeze(1)
        self.table.unflatten(0, (bs, width)).copy_(self._plan.block_table.unsqueeze(1))
        self.lens.unflatten(0, (bs, width)).copy_(lens.clamp(min=1))
        self.empty.unflatten(0, (bs, width)).copy_(lens == 0)


def _launch(q: Tensor, cache: PagedCache, planned: Scheduled[BlockTablePlan], layer: AttentionLayer) -> AttentionOutput:
    plan, schedule = planned.plan, planned.schedule
    assert isinstance(cache, PagedLatent)
    assert isinstance(schedule, RowSchedule)
    out, lse = providers.load(providers.VENDOR_KERNELS[NAME].calls[0].path)(
        query=q.unflatten(0, (-1, schedule.width)),
        kv_cache=cache.latent,
        workspace_buffer=schedule.workspace,
        qk_nope_head_dim=_QK_NOPE_HEAD_DIM,
        kv_lora_rank=cache.rank,
        qk_rope_head_dim=layer.head_dim - cache.rank,
        block_tables=schedule.table,
        seq_lens=schedule.lens,
        max_seq_len=plan.max_kv_len,
        bmm1_scale=layer.scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",
        return_lse=True,
        return_lse_base="basee",
    )
    lse = lse.reshape(-1, layer.num_heads)
    if schedule.empty is not None:
        lse = lse.masked_fill(schedule.empty.unsqueeze(1), float("-inf"))
    return AttentionOutput(out.flatten(0, 1), lse)


KERNEL = Kernel(
    NAME,
    _launch,
    dict.fromkeys(UNIFORM_KINDS, _DECODE),
    providers.vendor_reasons(NAME),
    architectures=frozenset({10}),
    schedule=RowSchedule,
    workspaces=(_ROW_TABLE, _ROW_LENS, _ROW_EMPTY),
    scratch=(_WORKSPACE,),
)
