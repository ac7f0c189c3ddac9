"""MLA on page lists, the format of FlashInfer's `BatchMLAPagedAttentionWrapper`.

    out[t] = softmax(scale * q[t] @ latent[visible(t)].T) @ latent[visible(t), :rank]

q [num_tokens, num_heads, rank + rope] is absorbed; the cache holds latents [num_pages, page_size, rank + rope]. Every
step kind, prefill too, is one such batch. FlashInfer's work list is of one length a request, so draft forwards share
that of the committed tokens, planned once, and what they drafted is read by slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.contract.capabilities import TORCH, of_dense
from attn_backends.contract.kernel import Kernel
from attn_backends.kernels.plan_operators import bind_csr
from attn_backends.kernels.torch_attention import csr_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection.providers import runs_anywhere, version_of
from attn_backends.vendors.flashinfer import mla_kernel
from attn_backends.vendors.ours import gluon_kernel, triton_kernel
from spec_metadata import BoundStep, Buffers, BufferSpec, Step, StepKind
from spec_metadata.plans import csr

_VERSION = version_of("flashinfer-python")
_TORCH = of_dense(replace(TORCH, window=False, tree_window=False, sinks=False))


def _launch_torch(q: Tensor, cache: PagedCache, plan: csr.CsrPlan, layer: AttentionLayer) -> AttentionOutput:
    out, lse = csr_attention(
        q,
        *cache.pages,
        plan.qo_indptr,
        plan.kv_indptr,
        plan.kv_indices,
        plan.kv_len,
        max_query=plan.max_query,
        max_kv_len=plan.max_kv_len,
        causal=plan.causal,
        scale=layer.scale,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )
    return AttentionOutput(out, lse)


class FlashInferMLABackend(AttentionBackend[csr.CsrPlan]):
    """MLA in FlashInfer's metadata format."""

    name = "flashinfer_mla"
    prefix_only = True
    formats = frozenset({CacheFormat.LATENT})
    kernels = (
        mla_kernel("fa3", frozenset({9}), _VERSION),
        mla_kernel("fa2", frozenset({8, 9, 10, 11, 12}), _VERSION),
        gluon_kernel(_TORCH),
        triton_kernel(_TORCH),
        Kernel("torch", _launch_torch, _TORCH, runs_anywhere),
    )

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """Page lists, for every kind."""
        return csr.BUFFERS

    def plans(self, step: Step, buffers: Buffers) -> tuple[csr.CsrPlan, ...]:
        """The page lists of a step, one plan for all forwards."""
        return csr.view_csr(step, buffers)

    def write(self, step: Step, buffers: Buffers) -> None:
        """Write the page lists of a step, of a draft those of its committed tokens."""
        csr.write_csr(step, buffers)

    def bind_fused(self, step: Step, buffers: Buffers, bound: BoundStep | None) -> Callable[[], None]:
        """The same, and write slots, in one launch."""
        return bind_csr(step, buffers, bound)
