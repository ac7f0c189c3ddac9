"""Stand-ins for FlashAttention-3's packages: the documented calls, computed on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat
from attn_backends.conformance import worlds
from attn_backends.conformance.worlds import World
from attn_backends.contract.kernel import Kernel
from attn_backends.kernels.tile_sizes import TileSizes
from attn_backends.layer import AttentionLayer
from attn_backends.vendors import flash_attention
from spec_metadata import StepKind
from spec_metadata.capacity import ceil_div
from tests.vendor_stand_ins import paged_attention

KV, LATENT = CacheFormat.KV, CacheFormat.LATENT
NAMES = [source.name for source in flash_attention.SOURCES]
KINDS = [kind for kind in flash_attention.CAPABILITIES if kind is not StepKind.PREFILL]
HOPPER, SGLANG = "flash_attn_interface", "sgl_kernel.flash_attn"
VLLM = "vllm.vllm_flash_attn.flash_attn_interface"


def tiles_of(bs: int, max_seqlen_q: int, causal: bool, window_size: tuple[int, int]) -> TileSizes:
    """Tiles of one key, and as many splits as there are: splits tell lengths, so that those of another step show."""
    masks = window_size[0] >= 0 or (causal and max_seqlen_q > 1)
    return TileSizes(1, 1, 1, 1, 1, 10**6, 10**6, 1, 1, int(masks), ceil_div(bs, 4) * 4)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_size: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Of the hopper folder and of vLLM."""
    assert cache_seqlens.shape == (batch_size,)
    assert (headdim, headdim_v) in {(64, 64), (64, 512)}
    assert num_heads_q % num_heads_kv == 0
    assert qkv_dtype is torch.bfloat16
    assert cu_seqlens_q is not None
    assert page_size is not None
    assert max_seqlen_k % page_size == 0
    tiles = tiles_of(batch_size, max_seqlen_q, causal, window_size)
    kinds = [cu_seqlens_q.diff(), cache_seqlens.clamp(min=1), torch.ones_like(cache_seqlens)]
    words = torch.zeros(tiles.stride * (2 + tiles.has_heads) + 1, dtype=torch.int32)
    for place, kind in enumerate(kinds[: 2 + tiles.has_heads]):
        words[place * tiles.stride :][:batch_size] = kind
    return words


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    scheduler_metadata: Tensor | None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The checks and the result of hopper/flash_api.cpp. With a sink, `finalize_aux` of hopper/softmax.h: its weight is
    in the sum that the output is divided by, and in the log-sum-exp, also of a row that sees no key.
    """
    bs = seqused_k.shape[0]
    assert q.dtype == k.dtype == v.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v, page_table))
    assert cu_seqlens_q.dtype == seqused_k.dtype == page_table.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert seqused_k.is_contiguous()
    assert cu_seqlens_q.shape == (bs + 1,)
    assert page_table.shape[0] == bs
    assert (q.shape[-1], v.shape[-1]) in {(64, 64), (64, 512)}
    reach = None
    if scheduler_metadata is not None:
        tiles = tiles_of(bs, max_seqlen_q, causal, window_size)
        assert scheduler_metadata.shape == (tiles.stride * (2 + tiles.has_heads) + 1,)
        assert scheduler_metadata.storage_offset() % 4 == 0
        is_right = (scheduler_metadata[:bs] == cu_seqlens_q.diff()) & (scheduler_metadata[-1] == 0)
        reach = scheduler_metadata[tiles.stride : tiles.stride + bs] * is_right
    if qv is not None:
        q, k = torch.cat((qv, q), -1), torch.cat((v, k), -1)
    out, lse = paged_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        seqused_k,
        page_table,
        causal=causal,
        scale=softmax_scale,
        window=window_size,
        reach=reach,
    )
    if s_aux is not None:
        assert s_aux.dtype is torch.bfloat16
        assert s_aux.is_contiguous()
        assert s_aux.shape == (q.shape[1],)
        assert q.shape[1] <= 64
        assert qv is None
        keys, lse = lse, torch.logaddexp(lse, s_aux.float())
        out = (out.float() * (keys - lse).exp().unsqueeze(-1)).to(out.dtype)
    return out, lse.T.contiguous()


def sglang_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, ...]:
    """`flash_attn_with_kvcache`, of SGLang and of the hopper folder: what we may pass of it."""
    assert k is None
    assert v is None
    assert return_softmax_lse
    assert num_splits == 0
    plan: tuple[Any, ...] = (cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q, softmax_scale)
    out, lse = forward(q, k_cache, v_cache, qv, *plan, causal, window_size, scheduler_metadata)
    return out, lse, torch.empty(0), torch.empty(0)


def vllm_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func`: what we may pass of it."""
    assert cu_seqlens_k is None
    assert block_table is not None
    assert max_seqlen_k == block_table.shape[1] * k.shape[1]
    assert return_softmax_lse
    assert num_splits == 0
    assert fa_version == 3
    plan: tuple[Any, ...] = (cu_seqlens_q, seqused_k, block_table, max_seqlen_q, softmax_scale)
    return forward(q, k, v, q_v, *plan, causal, window_size or (-1, -1), scheduler_metadata, s_aux)


CALLS = {
    f"{HOPPER}:flash_attn_with_kvcache": sglang_with_kvcache,
    f"{HOPPER}:get_scheduler_metadata": get_scheduler_metadata,
    f"{SGLANG}:flash_attn_with_kvcache": sglang_with_kvcache,
    f"{VLLM}:flash_attn_varlen_func": vllm_varlen,
    f"{VLLM}:get_scheduler_metadata": get_scheduler_metadata,
    f"{VLLM}:FA3_UNAVAILABLE_REASON": None,
}


def with_sinks(world: World, **changes: Any) -> AttentionLayer:
    """The world's layer with sinks that outweigh some rows and are outweighed by others."""
    return replace(worlds.with_extra(world.layer, "sinks", world.setup), **changes)


def kernel_of(backend: Any, name: str) -> Kernel[Any]:
    """A backend's kernel by name."""
    return next(kernel for kernel in backend.kernels if kernel.name == name)
