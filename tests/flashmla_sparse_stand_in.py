"""A stand-in for FlashMLA's sparse launch and its schedule: what the documented calls do, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.share_outs import one_part_each, reach

FP8 = torch.float8_e4m3fn


@dataclass
class FlashMLASchedMeta:
    """The documented fields that a caller may fill."""

    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def num_parts(num_heads: int) -> int:
    """Parts of a schedule for so many heads."""
    return 132 // (num_heads // 64)


def get_mla_decoding_metadata(
    seqlens_k: Tensor, num_q_tokens_per_head_k: int, h_k: int, h_q: int | None = None, use_legacy: bool = False
) -> tuple[Tensor, Tensor]:
    """A schedule: a part for each row, as far as there are parts."""
    assert use_legacy
    assert h_k == 1
    assert seqlens_k.dtype is torch.int32
    assert seqlens_k.is_contiguous()
    return one_part_each(seqlens_k, num_parts(num_q_tokens_per_head_k))


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    softmax_scale: float | None = None,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """The checks of csrc/api/sparse_decode.h. A launch reads no more groups of keys than its schedule knows."""
    parts, splits = tile_scheduler_metadata.tile_scheduler_metadata, tile_scheduler_metadata.num_splits
    bs, width, num_heads, dim = q.shape
    assert use_legacy
    assert is_fp8_kvcache
    assert block_table is cache_seqlens is None
    assert num_heads in (64, 128)
    assert (width, dim, head_dim_v, q.dtype, q.stride(-1)) == (1, 512, 512, torch.bfloat16, 1)
    assert parts is not None
    assert splits is not None
    assert parts.shape == (num_parts(num_heads), 8)
    assert splits.shape == (bs + 1,)
    assert all(x.is_contiguous() and x.dtype is torch.int32 for x in (parts, splits))
    keys_in_groups = whole_groups(topk_length)
    if extra_topk_length is not None:
        keys_in_groups = keys_in_groups + whole_groups(extra_topk_length)
    known = reach(parts, splits, keys_in_groups)
    found = [scope_of(k_cache, indices, topk_length, known)]
    if extra_k_cache is not None:
        rest = known - whole_groups(topk_length)
        found.append(scope_of(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, rest))
    keys, visible = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
    scores = torch.einsum("thd,tkd->thk", q[:, 0].float(), keys) * softmax_scale
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("thk,tkd->thd", (scores - lse.unsqueeze(-1)).exp(), keys)
    if attn_sink is not None:
        assert (attn_sink.shape, attn_sink.dtype) == ((num_heads,), torch.float32)
        out = out * torch.sigmoid(lse - attn_sink).unsqueeze(-1)
    return out.to(q.dtype).unsqueeze(1), lse.unsqueeze(2)


def whole_groups(lens: Tensor) -> Tensor:
    """Lengths, up to whole groups of 64."""
    return -(-lens // 64) * 64


def scope_of(pages: Tensor, indices: Tensor, lens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [bs, n, 512], from a page's bytes as the kernel reads them, and which of them are visible. known: [bs] keys
    that the schedule gives to this pool. A row whose length is not that of its slots gets NaN.
    """
    num_pages, num_rows, heads, size = pages.shape
    assert (heads, size, pages.stride(1), pages.dtype) == (1, 584, 584, torch.uint8)
    assert pages.stride(0) % 576 == 0
    assert pages.stride(0) >= num_rows * 584
    assert indices.shape[:2] == (len(known), 1)
    assert indices.shape[2] % 64 == 0
    assert {indices.dtype, lens.dtype} == {torch.int32}
    assert lens.shape == known.shape
    assert lens.is_contiguous()
    slots = indices[:, 0].long()
    place = torch.arange(slots.shape[1])
    visible = (slots >= 0) & (place < torch.minimum(lens, known).unsqueeze(1))
    slots = slots.clamp_min(0)
    bytes = pages.as_strided((num_pages, num_rows * 584), (pages.stride(0), 1))
    page, row = (slots // num_rows).unsqueeze(-1), (slots % num_rows).unsqueeze(-1)
    data = bytes[page, row * 576 + torch.arange(576)]
    exponents = bytes[page, num_rows * 576 + row * 8 + torch.arange(7)].float() - 127
    elements = data[..., :448].contiguous().view(FP8).float().unflatten(-1, (7, 64)) * exponents.exp2().unsqueeze(-1)
    keys = torch.cat((elements.flatten(-2), data[..., 448:].contiguous().view(torch.bfloat16).float()), dim=-1)
    undefined = (indices[:, 0] >= 0).sum(1) != lens
    return torch.where(visible.unsqueeze(-1), keys, 0).masked_fill(undefined[:, None, None], float("nan")), visible


CALLS = {
    "flash_mla:flash_mla_with_kvcache": flash_mla_with_kvcache,
    "flash_mla:get_mla_decoding_metadata": get_mla_decoding_metadata,
    "flash_mla.flash_mla_interface:FlashMLASchedMeta": FlashMLASchedMeta,
    "flash_mla:has_legacy": lambda: True,
}
