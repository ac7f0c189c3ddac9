"""Stand-ins, on a CPU, of the kernels that vLLM calls. They read vLLM's metadata and nothing of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels.torch_attention import block_table_attention, page_table_attention


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    scale: Any = None,
    *others: Any,
    **named: Any,
) -> None:
    """Rows (kv_c, k_pe) to their slots; those of slot -1, and those beyond the slots, nowhere. In 8 bits (a dtype other
    than "auto") they are divided by the scale, and end at the greatest value.

    kv_c: [num_tokens, rank]. k_pe: [num_tokens, rope]. kv_cache: [num_blocks, block_size, rank + rope].
    """
    rows = torch.cat((kv_c, k_pe), dim=-1)
    if kv_cache_dtype != "auto":
        most = torch.finfo(torch.float8_e4m3fn).max
        rows = (rows / scale).clamp(-most, most).to(torch.float8_e4m3fn).view(kv_cache.dtype)
    _write(rows, kv_cache, slot_mapping)


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *others: Any
) -> None:
    """Keys and values to their slots, as above. key, value: [num_tokens, num_kv_heads, dim]. key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, dim].
    """
    for rows, cache in ((key, key_cache), (value, value_cache)):
        _write(rows, cache, slot_mapping)


def cpu_attn_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *others: Any, **named: Any
) -> None:
    """The same, of a cache with its heads before its tokens: [num_blocks, num_kv_heads, block_size, dim]."""
    reshape_and_cache_flash(key, value, key_cache.transpose(1, 2), value_cache.transpose(1, 2), slot_mapping)


def _write(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Rows to slots; those of slot -1, and those beyond the slots, nowhere. cache: [num_blocks, block_size, ...]."""
    rows = rows[: slot_mapping.shape[0]].to(cache.dtype)
    slots = slot_mapping[: rows.shape[0]]
    place = slots.clamp_min(0)
    block, offset = place // cache.shape[1], place % cache.shape[1]
    kept = (slots >= 0).view(-1, *(1,) * (rows.dim() - 1))
    cache[block, offset] = torch.where(kept, rows, cache[block, offset])


def attend_packed(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    starts: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    max_query: int,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Attention of packed rows over blocks; rows after the last start, which no request has, see nothing.

    q: [num_tokens, num_heads, dim]. starts: [bs + 1]. table: [bs, max_blocks]. lens: [bs].
    """
    even = torch.arange(starts.shape[0], dtype=starts.dtype, device=starts.device) * max_query
    apart = torch.maximum(starts, even).clamp(max=q.shape[0])  # padded requests have rows of their own
    out, _ = page_table_attention(
        q,
        k_pages,
        v_pages,
        torch.where(starts == starts[-1], apart, starts),
        table.clamp(0, k_pages.shape[0] - 1),
        lens,
        max_seqlen_q=max_query,
        causal=causal,
        scale=scale,
    )
    return out


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    softmax_scale: float,
    causal: bool,
    is_fp8_kvcache: bool,
) -> tuple[Tensor, None]:
    """FlashMLA's function of this name. q: [bs, width, num_heads, dim]. k_cache: [num_blocks, block_size, 1, dim]."""
    out, _ = block_table_attention(
        q.flatten(0, 1),
        k_cache,
        k_cache[..., :head_dim_v],
        block_table,
        cache_seqlens,
        width=q.shape[1],
        max_kv_len=block_table.shape[1] * k_cache.shape[1],
        causal=causal,
        scale=softmax_scale,
    )
    return out.unflatten(0, q.shape[:2]), None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    q_v: Tensor | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """FlashAttention-3's function of this name, over blocks; with `q_v`, of absorbed queries over latents. vLLM's
    `unified_attention` has the same arguments.

    q: [num_tokens, num_heads, dim]. k, v: [num_blocks, block_size, num_kv_heads, dim].
    """
    if q_v is not None:
        q, k = torch.cat((q_v, q), dim=-1), torch.cat((v, k), dim=-1)
    options: dict[str, Any] = {"max_query": max_seqlen_q, "scale": softmax_scale, "causal": causal}
    found = attend_packed(q, k, v, cu_seqlens_q, block_table, seqused_k, **options)
    return found if out is None else out.copy_(found)


def cpu_attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    block_table: Tensor,
    **others: Any,
) -> None:
    """vLLM's operator of this name, on a cache as of `cpu_attn_reshape_and_cache`. It reads offsets on the host."""
    flash_attn_varlen_func(
        query,
        key_cache.transpose(1, 2),
        value_cache.transpose(1, 2),
        max_seqlen_q=int(query_start_loc.diff().max()),
        cu_seqlens_q=query_start_loc,
        seqused_k=seq_lens,
        block_table=block_table,
        softmax_scale=scale,
        causal=causal,
        out=output,
    )


def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    lse: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    attn_logits: Tensor,
    num_kv_splits: int,
    scale: float,
    page_size: int,
    **others: Any,
) -> None:
    """vLLM's Triton function of this name: each row over its own request. q: [num_rows, num_heads, dim]."""
    out, _ = block_table_attention(
        q,
        k_buffer,
        v_buffer,
        block_table,
        seq_lens,
        width=1,
        max_kv_len=block_table.shape[1] * page_size,
        causal=True,
        scale=scale,
    )
    o.copy_(out)


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    *,
    kv_lora_rank: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    bmm1_scale: float,
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int = 1,
    **others: Any,
) -> Tensor:
    """`flashinfer.decode`'s function of this name: causal, of one width, or packed where it is given starts.

    query: [bs, width, num_heads, dim], or [num_tokens, num_heads, dim]. kv_cache: [num_blocks, 1, block_size, dim].
    """
    keys = kv_cache.transpose(1, 2)
    if cum_seq_lens_q is None:
        cum_seq_lens_q = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device) * query.shape[1]
        max_q_len, query = query.shape[1], query.flatten(0, 1)
    options: dict[str, Any] = {"max_query": max_q_len, "scale": bmm1_scale}
    return attend_packed(
        query, keys, keys[..., :kv_lora_rank], cum_seq_lens_q, block_tables, seq_lens, **options
    ).unsqueeze(1)


def scheduler_metadata(batch_size: int, **others: Any) -> Tensor:
    """`get_scheduler_metadata` of FlashAttention-3, of its size."""
    return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32)


def nothing(*args: Any, **named: Any) -> None:
    """In place of what compiles or allocates for kernels that are not there."""
