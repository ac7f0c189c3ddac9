"""The raw vendor calls that kernels are measured against, on arguments made by hand.

Written from the vendors' documentation and sharing nothing with the backends: no plan, no launch, no buffer. Each call
assumes the longest request that the backend's graph allows (the context and room for drafted tokens). It plans what the
vendor lets one plan ahead outside of the graph, as the backends do, and returns the log-sum-exp too, which the
backends' contract asks for. Where a choice changes the speed and not the result, it is the faster one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedKV, PagedLatent
from attn_backends.selection.providers import load
from benchmarks.shapes import PAGE_SIZE, Problem
from spec_metadata.capacity import ceil_div


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A raw call. name: what is called. call: cache -> output, [batch_size * width, num_heads, v_head_dim]."""

    name: str
    call: Callable[[PagedCache], Tensor]


def flashmla(problem: Problem) -> Peer:
    """FlashMLA's dense decode. Its scheduler fills the metadata at the first call, so that is made here."""
    attend = load("flash_mla:flash_mla_with_kvcache")
    scheduler, _ = load("flash_mla:get_mla_metadata")()
    layer, q = problem.layer, problem.q.view(problem.pool.batch_size, problem.width, *problem.q.shape[1:])
    pages, lens = _pages(problem), _lens(problem)

    def call(cache: PagedCache) -> Tensor:
        assert isinstance(cache, PagedLatent)
        out, _ = attend(
            q,
            cache.latent.unsqueeze(2),
            pages,
            lens,
            layer.v_head_dim,
            scheduler,
            softmax_scale=layer.scale,
            causal=problem.width > 1,
            use_legacy=True,
        )
        return out.flatten(0, 1)

    call(problem.pool.caches[0])
    return Peer("flash_mla_with_kvcache", call)


def flashinfer(problem: Problem, backend: str) -> Peer:
    """FlashInfer's MLA wrapper in its graph mode, planned here. backend: fa2 or fa3."""
    pool, layer, device = problem.pool, problem.layer, problem.q.device
    pages = _pages(problem)[:, : ceil_div(pool.context, PAGE_SIZE)]
    requests = torch.arange(pool.batch_size + 1, dtype=torch.int32, device=device)
    csr = (requests * problem.width, requests * pages.shape[1], pages.flatten(), _lens(problem))
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=device)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    buffers = {name: torch.empty_like(tensor) for name, tensor in zip(names, csr, strict=True)}
    wrapper = load("flashinfer.mla:BatchMLAPagedAttentionWrapper")(workspace, True, **buffers, backend=backend)
    wrapper.plan(
        metadata=load("flashinfer.mla:MLAPlanMetadata").csr(*csr),
        num_heads=layer.num_heads,
        head_dim_ckv=layer.v_head_dim,
        head_dim_kpe=layer.head_dim - layer.v_head_dim,
        page_size=PAGE_SIZE,
        causal=problem.width > 1,
        sm_scale=layer.scale,
        q_data_type=problem.q.dtype,
        kv_data_type=problem.q.dtype,
        lse_mode="basee",
    )

    def call(cache: PagedCache) -> Tensor:
        assert isinstance(cache, PagedLatent)
        return wrapper.run(query=problem.q, kv_cache=cache.latent, return_lse=True, return_lse_base_on_e=True)[0]

    return Peer(f"BatchMLAPagedAttentionWrapper.run ({backend})", call)


def flash_attention_3(problem: Problem) -> Peer:
    """FlashAttention-3 as vLLM ships it, its scheduler's metadata made here; MLA by `q_v`."""
    attend = load("vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func")
    schedule = load("vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata")
    pool, layer, width, rank = problem.pool, problem.layer, problem.width, problem.layer.v_head_dim
    is_latent = isinstance(pool.caches[0], PagedLatent)
    query = problem.q[..., rank:] if is_latent else problem.q
    pages, lens = _pages(problem), _lens(problem)
    starts = torch.arange(0, query.shape[0] + 1, width, dtype=torch.int32, device=query.device)
    scheduler = schedule(
        pool.batch_size,
        width,
        pool.capacity.max_kv_len,
        layer.num_heads,
        layer.num_kv_heads,
        query.shape[2],
        lens,
        headdim_v=rank,
        cu_seqlens_q=starts,
        page_size=PAGE_SIZE,
        causal=width > 1,
    )

    def call(cache: PagedCache) -> Tensor:
        if isinstance(cache, PagedKV):
            k, v, q_v = cache.k, cache.v, None
        else:
            k, v = cache.latent[..., rank:].unsqueeze(2), cache.latent[..., :rank].unsqueeze(2)
            q_v = problem.q[..., :rank]
        out, _ = attend(
            query,
            k,
            v,
            width,
            starts,
            pool.capacity.max_kv_len,
            seqused_k=lens,
            q_v=q_v,
            softmax_scale=layer.scale,
            causal=width > 1,
            block_table=pages,
            return_softmax_lse=True,
            scheduler_metadata=scheduler,
            fa_version=3,
        )
        return out

    return Peer("flash_attn_varlen_func" + (" (q_v)" if is_latent else ""), call)


def _pages(problem: Problem) -> Tensor:
    """[batch_size, max_pages] int32, dense."""
    return problem.pool.pages.to(torch.int32)


def _lens(problem: Problem) -> Tensor:
    """[batch_size] int32: every request has the whole context."""
    shape = (problem.pool.batch_size,)
    return torch.full(shape, problem.pool.context, dtype=torch.int32, device=problem.q.device)


# By the name of the kernel that is measured against it.
PEERS: dict[str, Callable[[Problem], Peer]] = {
    "flashmla": flashmla,
    "flashinfer_fa2": partial(flashinfer, backend="fa2"),
    "flashinfer_fa3": partial(flashinfer, backend="fa3"),
    "vllm_flash_attn": flash_attention_3,
}
