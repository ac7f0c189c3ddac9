"""Stand-ins, on a CPU, of the kernels that SGLang calls. They read SGLang's metadata and nothing of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends.kernels.torch_attention import block_table_attention, csr_attention, page_table_attention
from attn_backends.kernels.torch_compressed import Keys, attend_rows, write_rows


def write_latents(kv_buffer: Tensor, loc: Tensor, nope: Tensor, rope: Tensor, *, reserved_skip_index: int = 0) -> None:
    """As `set_mla_kv_buffer` writes: row i goes to entry i of the memory that `loc` views, whatever its stride. A row
    of the skipped slot goes to the reserved page, which is not compared.
    """
    dense = loc.as_strided((loc.numel(),), (1,))
    rows = torch.cat((nope.flatten(1), rope.flatten(1)), dim=1)
    kv_buffer.view(kv_buffer.shape[0], -1)[dense.long()] = rows


class Module:
    """The compiled module of a FlashInfer MLA wrapper: a plan writes the wrapper's work, from the host's arrays."""

    def __init__(self) -> None:
        self.work: tuple[Tensor, ...] = ()

    def plan(
        self,
        float_workspace: Any,
        int_workspace: Any,
        staging: Any,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len: Tensor,
        num_heads: int,
        head_dim: int,
        causal: bool,
    ) -> None:
        """Plan, into the memory of the first plan."""
        given = tuple(each.to("cpu", torch.int32) for each in (qo_indptr, kv_indptr, kv_len))
        if not self.work:
            self.work = tuple(each.clone() for each in given)
        for work, each in zip(self.work, given, strict=True):
            work.copy_(each)


class Grid:
    """Keys that a launch goes over, set by whoever makes a backend. Tables are widened to as many, so that a
    sum over keys rounds alike whatever a table's width: a replay's bits are compared with those of an eager step.
    """

    max_kv_len = 0

    @classmethod
    def widened(cls, table: Tensor, page_size: int) -> Tensor:
        """[bs, max_pages] a table with more columns, which no length reaches."""
        missing = -(-cls.max_kv_len // page_size) - table.shape[1]
        return table if missing <= 0 else pad(table, (0, missing))


def from_address(entries: Tensor) -> Tensor:
    """[n] what a kernel that gets the address of a list can read: all to the end of its memory, however long a view."""
    first = entries.storage_offset()
    return entries.as_strided((entries.untyped_storage().nbytes() // entries.element_size() - first,), (1,), first)


class MLAWrapper:
    """`flashinfer.mla.BatchMLAPagedAttentionWrapper` as of 0.7, with the attributes that SGLang uses."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self._cached_module: Any = Module()
        self._causal, self._sm_scale = False, 1.0

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Plan from the device's arrays, which are copied to the host. Refuses lengths that are not the lists'."""
        if not torch.equal(kv_indptr.diff().cpu().int(), kv_len_arr.cpu().int()):
            raise ValueError(f"kv_len_arr {kv_len_arr.tolist()} is not what kv_indptr {kv_indptr.tolist()} spans")
        self._causal, self._sm_scale = causal, sm_scale
        if self._use_cuda_graph:
            for buffer, given in zip(self._buffers(), (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True):
                buffer[: len(given)].copy_(given)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
            self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
            self._cached_module = Module()
        self._cached_module.plan(None, None, None, qo_indptr, kv_indptr, kv_len_arr, num_heads, head_dim_ckv, causal)

    def _buffers(self) -> tuple[Any, ...]:
        return self._qo_indptr_buf, self._kv_indptr_buf, self._kv_indices_buf, self._kv_len_arr_buf

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, out: Tensor, return_lse: bool = False) -> Any:
        """Attend: the work says which part of `kv_indices` each request reads."""
        assert self._kv_indices_buf is not None, "it was planned"
        qo_indptr, kv_indptr, kv_len = self._cached_module.work
        num_tokens, num_requests = q_nope.shape[0], max(len(kv_len), 1)
        max_query = num_tokens if not self._use_cuda_graph else -(-num_tokens // num_requests)
        keys = torch.cat((ckv, kpe), dim=-1).unsqueeze(2)
        found, _ = csr_attention(
            torch.cat((q_nope, q_pe), dim=-1),
            keys,
            ckv.unsqueeze(2),
            qo_indptr,
            kv_indptr,
            self._kv_indices_buf,
            kv_len,
            max_query=max(max_query, 1),
            max_kv_len=Grid.max_kv_len,
            causal=self._causal,
            scale=self._sm_scale,
        )
        out.copy_(found)
        return out


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    *,
    kv_lora_rank: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    bmm1_scale: float,
    **others: Any,
) -> Tensor:
    """`flashinfer.decode`'s function of this name: causal attention over a block table, at one query width.

    query: [bs, width, num_heads, dim]. kv_cache: [num_pages, 1, page_size, dim]. Returns [bs, width, num_heads, rank].
    """
    keys = kv_cache.transpose(1, 2)
    table = Grid.widened(block_tables, keys.shape[1])
    out, _ = block_table_attention(
        query.flatten(0, 1),
        keys,
        keys[..., :kv_lora_rank],
        table,
        seq_lens,
        width=query.shape[1],
        max_kv_len=table.shape[1] * keys.shape[1],
        causal=True,
        scale=bmm1_scale,
    )
    return out.unflatten(0, query.shape[:2])


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    qv: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    **others: Any,
) -> Tensor:
    """FlashAttention-3's function of this name, of absorbed queries over latents in pages.

    q: [num_tokens, num_heads, rope]. qv: [..., rank]. k_cache: [num_pages, page_size, 1, rope]. v_cache: [..., rank].
    """
    out, _ = page_table_attention(
        torch.cat((qv, q), dim=-1),
        torch.cat((v_cache, k_cache), dim=-1),
        v_cache,
        cu_seqlens_q,
        Grid.widened(page_table, k_cache.shape[1]),
        cache_seqlens,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        scale=softmax_scale,
    )
    return out


def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Any,
    attn_lse: Any,
    num_kv_splits: Any,
    max_kv_splits: int,
    sm_scale: float,
    *others: Any,
    **named: Any,
) -> None:
    """SGLang's Triton function of this name: each row over its list of slots. q: [bs, num_heads, dim]."""
    bs = q.shape[0]
    lens = kv_indptr[: bs + 1].diff().int()
    starts = torch.arange(bs + 1, dtype=torch.int32, device=q.device)
    out, _ = csr_attention(
        q,
        k_buffer.unsqueeze(1),
        v_buffer.unsqueeze(1),
        starts,
        kv_indptr[: bs + 1],
        from_address(kv_indices),
        lens,
        max_query=1,
        max_kv_len=Grid.max_kv_len,
        causal=True,
        scale=sm_scale,
    )
    o.copy_(out)


def extend_attention_fwd(
    q_extend: Tensor,
    k_extend: Tensor,
    v_extend: Tensor,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    is_causal: bool,
    mask_indptr: Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float,
    *others: Any,
    **named: Any,
) -> None:
    """SGLang's Triton function of this name: each row over its request's list of slots, then over the rows of the step.
    They are causal, or as the mask says. It has a row of all keys for each. q_extend: [num_tokens, num_heads, dim].
    """
    num_tokens, keys = q_extend.shape[0], torch.arange(Grid.max_kv_len, device=q_extend.device)
    row = torch.arange(num_tokens, device=q_extend.device)
    request = torch.searchsorted(qo_indptr[1:].contiguous(), row, right=True).clamp(max=qo_indptr.shape[0] - 2)
    first, end = qo_indptr[request].unsqueeze(1), qo_indptr[request + 1].unsqueeze(1)
    start, before = kv_indptr[request].unsqueeze(1), kv_indptr.diff()[request].unsqueeze(1)
    lists = pad(from_address(kv_indices), (0, 1))
    listed = lists[(start + keys).clamp(max=lists.shape[0] - 1)].clamp(0, k_buffer.shape[0] - 1)
    own = (first + keys - before).clamp(0, num_tokens - 1) + k_buffer.shape[0]
    place = torch.where(keys < before, listed, own).long()
    seen = keys < before + end - first
    if custom_mask is not None:
        assert mask_indptr is not None, "a mask has offsets"
        at = mask_indptr[request].unsqueeze(1) + (row.unsqueeze(1) - first) * (before + end - first) + keys
        seen &= custom_mask.view(torch.uint8)[at.clamp(0, custom_mask.shape[0] - 1).long()].bool()
    elif is_causal:
        seen &= keys <= before + row.unsqueeze(1) - first
    scores = torch.einsum("thd,tkd->thk", q_extend, torch.cat((k_buffer, k_extend)).squeeze(1)[place]) * sm_scale
    weights = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(dim=-1).nan_to_num(0.0)
    o_extend.copy_(torch.einsum("thk,tkd->thd", weights, torch.cat((v_buffer, v_extend)).squeeze(1)[place]))


def write_rows_of_512(*, input: Tensor, cache: Tensor, indices: Tensor, page_size: int, **others: Any) -> None:
    """`fused_store_cache` of DeepSeek-V4's pool: rows [n, 512] go to slots [n] of pages [num_pages, bytes]."""
    write_rows(cache, page_size, indices, input, 0)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    *,
    softmax_scale: float,
    indices: Tensor,
    topk_length: Tensor,
    attn_sink: Tensor,
    extra_k_cache: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """FlashMLA's sparse function of this name, over one cache of 8-bit pages.

    q: [num_tokens, 1, num_heads, 512]. k_cache: [num_pages, page_size, 1, 584]. indices: [num_tokens, 1, n].
    """
    assert extra_k_cache is None, "a layer of a window has one cache"
    keys = Keys(k_cache.flatten(1).view(torch.uint8), k_cache.shape[1], indices.squeeze(1), topk_length)
    out, _ = attend_rows(q.squeeze(1), [keys], softmax_scale, attn_sink)
    return out.unsqueeze(1), None


def concatenate(*parts: Tensor) -> Tensor:
    """A query of its two parts."""
    return torch.cat(parts, dim=-1)


def nothing(*args: Any, **named: Any) -> None:
    """In place of what compiles or allocates for kernels that are not there."""
