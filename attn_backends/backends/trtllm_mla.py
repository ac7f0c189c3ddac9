"""MLA on a padded block table at one query stride, the format of TensorRT-LLM's MLA and FlashMLA dense decode.

    out[t] = softmax(scale * q[t] @ latent[visible(t)].T) @ latent[visible(t), :rank]

q [num_tokens, num_heads, rank + rope] is absorbed; the cache holds latents [num_pages, page_size, rank + rope]. The
stride is uniform, so packed draft extend is refused; prompts of differing lengths are prefilled in the ragged form, by
FlashAttention-3 where it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.contract.capabilities import TORCH
from attn_backends.contract.kernel import Kernel
from attn_backends.kernels.plan_operators import bind_block_table, bind_ragged
from attn_backends.kernels.torch_attention import block_table_attention, page_table_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection.providers import runs_anywhere
from attn_backends.vendors import flash_attention, flashmla, trtllm_gen
from attn_backends.vendors.ours import gluon_kernel, triton_kernel
from spec_metadata import BoundStep, Buffers, BufferSpec, Step, StepKind
from spec_metadata.capacity import UNIFORM_KINDS
from spec_metadata.plans import block_table, ragged

TrtllmPlan = block_table.BlockTablePlan | ragged.RaggedPlan

_UNIFORM = replace(TORCH, page_sizes=frozenset({32, 64}), window=False, tree_window=False, sinks=False)
_TORCH = {
    StepKind.PREFILL: replace(_UNIFORM, packed=True, packed_graph=True, non_causal=False, graph=False),
} | dict.fromkeys(UNIFORM_KINDS, _UNIFORM)

_FLASH_ATTENTION = {StepKind.PREFILL: flash_attention.PREFILL_OF_LATENTS}


def _launch_torch(q: Tensor, cache: PagedCache, plan: TrtllmPlan, layer: AttentionLayer) -> AttentionOutput:
    given: dict[str, Any] = {"causal": plan.causal, "scale": layer.scale}
    given |= {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    if isinstance(plan, ragged.RaggedPlan):
        lists, given["max_seqlen_q"] = (plan.cu_seqlens_q, plan.page_table, plan.seqused_k), plan.max_seqlen_q
        return AttentionOutput(*page_table_attention(q, *cache.pages, *lists, **given))
    given |= {"width": plan.width, "max_kv_len": plan.max_kv_len}
    return AttentionOutput(*block_table_attention(q, *cache.pages, plan.block_table, plan.cache_seqlens, **given))


class TrtllmMLABackend(AttentionBackend[TrtllmPlan]):
    """MLA in the metadata format of TensorRT-LLM and FlashMLA."""

    name = "trtllm_mla"
    formats = frozenset({CacheFormat.LATENT})
    kernels = (
        trtllm_gen.KERNEL,
        flashmla.KERNEL,
        *flash_attention.kernels(_FLASH_ATTENTION),
        gluon_kernel(_TORCH),
        triton_kernel(_TORCH),
        Kernel("torch", _launch_torch, _TORCH, runs_anywhere),
    )

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """A block table; ragged for prefill."""
        return ragged.BUFFERS if kind is StepKind.PREFILL else block_table.BUFFERS

    def plans(self, step: Step, buffers: Buffers) -> tuple[TrtllmPlan, ...]:
        """The block table of each forward, one for all, or the ragged form of a prefill."""
        if step.kind is StepKind.PREFILL:
            return ragged.view_ragged(step, buffers)
        return block_table.view_block_table(step, buffers)

    def write(self, step: Step, buffers: Buffers) -> None:
        """Write the block table of all forwards, or the ragged form of a prefill."""
        if step.kind is StepKind.PREFILL:
            ragged.write_ragged(step, buffers)
        else:
            block_table.write_block_table(step, buffers)

    def bind_fused(self, step: Step, buffers: Buffers, bound: BoundStep | None) -> Callable[[], None]:
        """The same, and write slots, in one launch."""
        return (bind_ragged if step.kind is StepKind.PREFILL else bind_block_table)(step, buffers, bound)
