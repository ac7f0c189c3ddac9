"""FlashAttention-3 on ragged queries over a page table, for grouped-query attention and for MLA by `q_v`.

    grouped-query:  out[t] = softmax(scale * q[t] @ k[visible(t)].T) @ v[visible(t)]
    MLA:            the key is (latent, rope) and the value the latent; FA3 takes the query as q (rope) and q_v (latent)

q [num_tokens, num_heads, head_dim]; the cache holds keys and values, or latents [num_pages, page_size, rank + rope].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.contract.capabilities import TORCH, of_dense
from attn_backends.contract.kernel import Kernel
from attn_backends.kernels.plan_operators import bind_ragged
from attn_backends.kernels.torch_attention import page_table_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection.providers import runs_anywhere
from attn_backends.vendors import flash_attention
from attn_backends.vendors.ours import gluon_kernel, gluon_prefill_kernel, triton_kernel
from spec_metadata import BoundStep, Buffers, BufferSpec, Step, StepKind
from spec_metadata.plans import ragged
from spec_metadata.visibility import windowed

_TORCH = of_dense(TORCH)


def _launch_torch(q: Tensor, cache: PagedCache, plan: ragged.RaggedPlan, layer: AttentionLayer) -> AttentionOutput:
    window, drafted = windowed(layer.window, plan.drafted)
    out, lse = page_table_attention(
        q,
        *cache.pages,
        plan.cu_seqlens_q,
        plan.page_table,
        plan.seqused_k,
        max_seqlen_q=plan.max_seqlen_q,
        causal=plan.causal,
        scale=layer.scale,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
        window=window,
        drafted=drafted,
        sinks=layer.sinks,
    )
    return AttentionOutput(out, lse)


class FA3Backend(AttentionBackend[ragged.RaggedPlan]):
    """Grouped-query attention or MLA in FlashAttention-3's metadata format."""

    name = "fa3"
    formats = frozenset({CacheFormat.KV, CacheFormat.LATENT})
    kernels = (
        *flash_attention.kernels(flash_attention.CAPABILITIES),
        gluon_prefill_kernel(_TORCH),
        replace(gluon_kernel(_TORCH), name="gluon_mla", needs_layers=True),
        triton_kernel(_TORCH),
        Kernel("torch", _launch_torch, _TORCH, runs_anywhere),
    )

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """Ragged queries over a page table, for every kind."""
        return ragged.BUFFERS

    def plans(self, step: Step, buffers: Buffers) -> tuple[ragged.RaggedPlan, ...]:
        """The ragged form of each forward, over one page table."""
        return ragged.view_ragged(step, buffers)

    def write(self, step: Step, buffers: Buffers) -> None:
        """Write the ragged form of all forwards."""
        ragged.write_ragged(step, buffers)

    def bind_fused(self, step: Step, buffers: Buffers, bound: BoundStep | None) -> Callable[[], None]:
        """The same, and write slots, in one launch."""
        return bind_ragged(step, buffers, bound)
