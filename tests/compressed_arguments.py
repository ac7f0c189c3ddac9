"""Arguments of the operators of compressed layers, for tests here and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels import fp8_pages, torch_compressed
from attn_backends.kernels.torch_compressed import Keys

NAN = float("nan")


def float_pool(num_pages: int, num_rows: int, dim: int, live: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Strided pages of NaN but for the live slots."""
    data = torch.full((num_pages * num_rows, 2 * dim), NAN)
    data[live] = torch.randn(len(live), 2 * dim)
    return data.view(num_pages, num_rows, 2 * dim)[..., ::2].to(dtype)


def byte_pool(num_pages: int, num_rows: int, live: Tensor) -> Tensor:
    """8-bit pages of NaN but for the live slots, whose elements are normal and subnormal and of all scales."""
    pages = torch.full((num_pages, fp8_pages.page_bytes(num_rows)), 0xFF, dtype=torch.uint8)
    rows = (
        torch.randn(len(live), 512) * torch.randn(len(live), 512).exp2() * 2.0 ** torch.randint(-3, 3, (len(live), 1))
    )
    torch_compressed.write_rows(pages, num_rows, live, rows, 0)
    return pages


def keys_of(pages: Tensor, num_rows: int, live: Tensor, num_tokens: int, width: int, gaps: bool = False) -> Keys:
    """Slots of random lengths, the last row's 0 and the first row's all; behind them are slots that no row sees."""
    lens = torch.randint(1, width + 1, (num_tokens,), dtype=torch.int32)
    lens[0], lens[-1] = width, 0
    slots = live[torch.randint(len(live), (num_tokens, width))].int()
    if gaps:
        slots[:, ::3] = -1
    return Keys(pages, num_rows, slots, lens)


def attention_scene(num_heads: int, dim: int, *, bytes: bool, gaps: bool = False) -> tuple[Tensor, list[Keys]]:
    live, live_entries = torch.randperm(40)[:20], torch.randperm(30)[:13]
    if bytes:
        rows, entries = byte_pool(5, 8, live), byte_pool(3, 10, live_entries)
    else:
        rows, entries = float_pool(5, 8, dim, live), float_pool(3, 10, dim, live_entries)
    q = torch.randn(num_heads, 4, dim + 1).transpose(0, 1)[..., 1:]
    return q, [keys_of(rows, 8, live, 4, 21, gaps), keys_of(entries, 10, live_entries, 4, 37, gaps)]


def blocks_scene(num_heads: int, *, bytes: bool) -> tuple[Tensor, list[Keys]]:
    """Rows of 512 bfloat16 elements, of several blocks of keys, some of them -1; queries apart from one another."""
    live, live_entries = torch.randperm(40)[:20], torch.randperm(30)[:13]
    if bytes:
        rows, entries = byte_pool(5, 8, live), byte_pool(3, 10, live_entries)
    else:
        rows, entries = (
            float_pool(pages, each, 512, lives, torch.bfloat16)
            for pages, each, lives in ((5, 8, live), (3, 10, live_entries))
        )
    q = torch.randn(num_heads, 3, 513).transpose(0, 1)[..., 1:].bfloat16()
    return q, [keys_of(rows, 8, live, 3, 150, True), keys_of(entries, 10, live_entries, 3, 350, True)]


def index_scene(lens: list[int], positions: list[int], heads: int, *, ties: bool = False) -> list[Any]:
    """Arguments of `select_entries` for requests of so many rows, the last at a position each. ties: of most scores."""
    bs, num_rows, max_pages, dim = len(lens), 4, 8, 24
    pages = torch.randperm(bs * max_pages).view(bs, max_pages).int()
    keys = torch.randn(bs * max_pages, num_rows, 2 * dim)[..., ::2]
    q, weights = torch.randn(sum(lens), heads, dim), torch.randn(sum(lens), heads)
    if ties:
        keys, q, weights = keys.round() * (torch.rand(keys.shape[:2]) < 0.3).unsqueeze(2), q.round(), weights.round()
    visible = [last - length + 1 + row for length, last in zip(lens, positions, strict=True) for row in range(length)]
    request = torch.repeat_interleave(torch.arange(bs), torch.tensor(lens)).int()
    starts = torch.nn.functional.pad(torch.tensor(lens).cumsum(0), (1, 0)).int()
    wide = torch.cat((pages, pages), dim=1)[:, :max_pages]
    return [q, weights.T.contiguous().T, keys, wide, starts, request, torch.tensor(visible).int().clamp_min(0)]


def poisoned(num_pages: int, num_rows: int, dim: int, bytes: bool) -> Tensor:
    if bytes:
        return torch.full((num_pages, fp8_pages.page_bytes(num_rows)), 0xA5, dtype=torch.uint8)
    return torch.full((num_pages, num_rows, 2 * dim), NAN)[..., ::2]


def entry_scene(ratio: int, dim: int, *, overlap: bool, position: int = 40) -> list[Any]:
    """Arguments of `write_entries` from the slots on, of entries from inputs, states, both and nothing."""
    window, channels = ratio * (1 + overlap), dim * (1 + overlap)
    values, gates = torch.randn(9, 2 * channels)[:, ::2], torch.randn(channels, 9).T
    states = poisoned(4, 6, 2 * channels, False)
    states[1:3] = torch.randn(2, 6, 2 * channels)
    source = torch.randint(0, 3, (5, window))
    source[:, -1] = 0
    source[4] = torch.arange(window) < window - ratio if overlap else 0
    source[4] = torch.where(source[4] > 0, 2, 0)
    inputs = torch.where(source == 0, torch.randint(0, 9, (5, window)), -1).int()
    reads = torch.where(source == 1, torch.randint(6, 18, (5, window)), -1).int()
    slots = torch.tensor([3, 11, -1, 0, 6]).int()
    positions = torch.tensor([0, 4, 0, position, 12]).int()
    inv_freq = 10000.0 ** -(torch.arange(dim // 8) / (dim // 8))
    made_of = [torch.randn(ratio, channels), torch.rand(dim) + 0.5, 1e-6, inv_freq, overlap]
    return [slots, values, gates, states, inputs, reads, positions, *made_of]
