"""Torch kernels, one per metadata format; each reads that format's tensors and nothing else.

They are the definition that other kernels are compared with, and run where there is no GPU. Shapes depend on host
bounds only, so they can be recorded into a graph. Arithmetic is float32, or float64 for float64 queries, under autocast
too. Keys that no row sees are never multiplied: unowned memory may hold NaN, and so may what lies before every window.

k_scale, v_scale: what entries of the cache, which may be 8-bit floats, are multiplied by to give keys and values.
window: of what a row sees it attends to the last so many keys. drafted: [num_tokens], what it sees besides, after the
keys here, which its window counts too (None: nothing), or below zero how many of the keys here come after its own.
sinks: [num_heads], the logit of a key without value: it takes its share of the softmax, and the log-sum-exp does not
count it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SINK_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of sinks, which kernels turn into their arithmetic's type."""


class _Extras(NamedTuple):
    """What goes beyond plain attention; as in the module's docstring."""

    k_scale: float
    v_scale: float
    window: int | None = None
    drafted: Tensor | None = None
    sinks: Tensor | None = None


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masked attention of padded requests.

    q: [bs, width, num_heads, dim]. k: [bs, num_keys, num_kv_heads, dim]. v: [bs, num_keys, num_kv_heads, v_dim], finite
    where no row sees it. visible: [bs, width, num_keys] bool. Returns out [bs, width, num_heads, v_dim] and natural lse
    [bs, width, num_heads] in the arithmetic's dtype; a row that sees nothing gets 0 and -inf.
    """
    bs, width, num_heads, dim = q.shape
    num_keys, num_kv_heads, v_dim = k.shape[1], k.shape[2], v.shape[3]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    group = num_heads // num_kv_heads
    grouped = q.to(dtype).reshape(bs, width, num_kv_heads, group, dim).permute(0, 2, 1, 3, 4)
    grouped = grouped.reshape(bs, num_kv_heads, width * group, dim)
    keys, values = k.to(dtype).permute(0, 2, 3, 1), v.to(dtype).transpose(1, 2)
    scores = (matmul(grouped, keys) * scale).view(bs, num_kv_heads, width, group, num_keys)
    scores = scores.masked_fill(~visible[:, None, :, None, :], float("-inf"))
    peak = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
    weights = (scores - peak).exp()
    total = weights.sum(dim=-1, keepdim=True)
    out = matmul(weights.view(bs, num_kv_heads, width * group, num_keys), values)
    out = out.view(bs, num_kv_heads, width, group, v_dim) / total.clamp_min(torch.finfo(dtype).tiny)
    lse = (peak + total.log()).squeeze(-1).transpose(1, 2).reshape(bs, width, num_heads)
    return with_sinks(out.transpose(1, 2).reshape(bs, width, num_heads, v_dim), lse, sinks), lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Outputs [..., num_heads, v_dim] over keys, of which sinks take their share. lse: [..., num_heads], natural."""
    if sinks is None:
        return out
    share = torch.where(lse == float("-inf"), 0, torch.sigmoid(lse - sinks))
    return (out * share.unsqueeze(-1)).to(out.dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the type that they have: autocast, which multiplies in half precision, is off."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def csr_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len: Tensor,
    *,
    max_query: int,
    max_kv_len: int,
    causal: bool,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over CSR page lists (`spec_metadata.plans.csr`).

    q: [num_tokens, num_heads, dim]. k_pages: [num_pages, page_size, num_kv_heads, dim]; v_pages likewise. Returns out
    [num_tokens, num_heads, v_dim] in q's dtype and natural lse [num_tokens, num_heads].
    """
    max_pages = max_kv_len // k_pages.shape[1]
    entries = kv_indptr[:-1].long().unsqueeze(1) + torch.arange(max_pages, device=q.device)
    pages = kv_indices[entries.clamp(max=max(kv_indices.shape[0] - 1, 0))].long()
    extras = _Extras(k_scale, v_scale, window, drafted, sinks)
    return _ragged_over_pages(q, k_pages, v_pages, qo_indptr, pages, kv_len, max_query, causal, scale, extras)


def page_table_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    max_seqlen_q: int,
    causal: bool,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ragged queries over a page table (`spec_metadata.plans.ragged`); shapes as `csr_attention`."""
    pages, extras = page_table.long(), _Extras(k_scale, v_scale, window, drafted, sinks)
    return _ragged_over_pages(q, k_pages, v_pages, cu_seqlens_q, pages, seqused_k, max_seqlen_q, causal, scale, extras)


def block_table_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    width: int,
    max_kv_len: int,
    causal: bool,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a padded block table at one query stride (`spec_metadata.plans.block_table`).

    q: [bs * width, num_heads, dim]; the rest as `csr_attention`.
    """
    pages = block_table[:, : max_kv_len // k_pages.shape[1]].long()
    lens = torch.full_like(cache_seqlens, width)
    padded, extras = q.unflatten(0, (-1, width)), _Extras(k_scale, v_scale, window, drafted, sinks)
    out, lse = _over_pages(padded, lens, k_pages, v_pages, pages, cache_seqlens, causal, scale, extras)
    return out.flatten(0, 1), lse.flatten(0, 1)


def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    request: Tensor,
    num_visible: Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    drafted: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each row over the leading keys of its request (`spec_metadata.plans.slots`).

    q: [num_tokens, num_heads, dim]. k: [bs, max_kv_len, num_kv_heads, dim], v likewise. request, num_visible:
    [num_tokens].
    """
    key = torch.arange(k.shape[1], device=q.device)
    visible = key < num_visible.unsqueeze(1)
    if window is not None:
        visible &= key >= (num_visible + (0 if drafted is None else drafted) - window).unsqueeze(1)
    entries = (_entries(x[request], y, q.dtype) for x, y in ((k, k_scale), (v, v_scale)))
    keys, values = (torch.where(visible[..., None, None], x, 0) for x in entries)
    out, lse = attend(q.unsqueeze(1), keys, values, visible.unsqueeze(1), scale, sinks)
    return out.squeeze(1).to(q.dtype), lse.squeeze(1)


def _entries(gathered: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values of what was read from a cache, for queries of a dtype."""
    if scale == 1.0 and gathered.dtype is dtype:
        return gathered
    return gathered.to(torch.float64 if dtype is torch.float64 else torch.float32) * scale


def _ragged_over_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_indptr: Tensor,
    pages: Tensor,
    kv_lens: Tensor,
    max_query: int,
    causal: bool,
    scale: float,
    extras: _Extras,
) -> tuple[Tensor, Tensor]:
    """Pad the packed queries to [bs, max_query, ...], attend, and pack again."""
    starts = query_indptr.long()
    rows = starts[:-1].unsqueeze(1) + torch.arange(max_query, device=q.device)
    padded = q[rows.clamp(max=max(q.shape[0] - 1, 0))]
    out, lse = _over_pages(padded, query_indptr.diff(), k_pages, v_pages, pages, kv_lens, causal, scale, extras)
    token = torch.arange(q.shape[0], device=q.device)
    request = torch.searchsorted(starts[1:], token, right=True)
    position = token - starts[request]
    return out[request, position], lse[request, position]


def _over_pages(
    q: Tensor,
    query_lens: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    kv_lens: Tensor,
    causal: bool,
    scale: float,
    extras: _Extras,
) -> tuple[Tensor, Tensor]:
    """Attention of padded queries [bs, width, num_heads, dim] over pages [bs, max_pages]; out in q's dtype."""
    width = q.shape[1]
    key = torch.arange(pages.shape[1] * k_pages.shape[1], device=q.device)
    live = key < kv_lens.unsqueeze(1)
    hidden_rows = query_lens.unsqueeze(1) - 1 - torch.arange(width, device=q.device)
    last_key = kv_lens.unsqueeze(1) - (hidden_rows if causal else torch.zeros_like(hidden_rows))
    visible = (key < last_key.unsqueeze(2)) & live.unsqueeze(1)
    if extras.window is not None:
        behind = 0 if extras.drafted is None else extras.drafted.view(-1, width)
        visible &= key >= (last_key + behind - extras.window).unsqueeze(2)
        live = visible.any(dim=1)
    first_key = key[:: k_pages.shape[1]]
    pages = torch.where(first_key < kv_lens.unsqueeze(1), pages, 0)  # ids past the visible keys may be anything
    scaled = ((k_pages, extras.k_scale), (v_pages, extras.v_scale))
    k, v = (_entries(x[pages], y, q.dtype).flatten(1, 2) for x, y in scaled)
    k, v = (torch.where(live[..., None, None], x, 0) for x in (k, v))
    out, lse = attend(q, k, v, visible, scale, extras.sinks)
    return out.to(q.dtype), lse


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Join drafted tokens to a prefix that rows have already seen; sinks take their share of both at once.

    q: [bs * width, num_heads, dim]. k: [bs, num_keys, num_kv_heads, dim], v likewise: the drafted tokens, read by slot.
    mask: [bs, width, num_keys] bool. prefix_out, prefix_lse: the prefix's output and natural lse, [bs * width, ...].
    """
    bs, width, _ = mask.shape
    seen = mask.any(dim=1)[..., None, None]
    k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)
    out, lse = attend(q.view(bs, width, *q.shape[1:]), k, v, mask, scale)
    out, lse = merge_states(prefix_out, prefix_lse, out.flatten(0, 1), lse.flatten(0, 1))
    return with_sinks(out, lse, sinks), lse


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from both parts' outputs [..., v_dim] and natural lse
    [...].

    The result has out_a's dtype. Where a part's lse is -inf it saw no key, and its output may hold anything; a row of
    which neither part saw a key gets 0 and -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    peak = lse.clamp_min(torch.finfo(lse.dtype).min)
    weight_a, weight_b = (lse_a - peak).exp().unsqueeze(-1), (lse_b - peak).exp().unsqueeze(-1)
    out_a, out_b = (out.masked_fill(weight == 0, 0) for out, weight in ((out_a, weight_a), (out_b, weight_b)))
    return (weight_a * out_a + weight_b * out_b).to(out_a.dtype), lse
