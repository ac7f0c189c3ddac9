"""Compressed entries by definition, which of them a row attends to, and the 8-bit page format. Knows no metadata."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_backends.compressed_layer import Compressor

TILE, TILES, TAIL = 64, 7, 64  # of a row of 512 in the 8-bit format: tiles with a scale each, then bfloat16
DATA, SCALES = TILE * TILES + 2 * TAIL, TILES + 1  # bytes of a row: elements, then powers of two and one of padding


def entry(
    before: Sequence[tuple[Tensor, Tensor]], own: Sequence[tuple[Tensor, Tensor]], compressor: Compressor, first: int
) -> Tensor:
    """The entry [dim] of a block of tokens whose first stands at position `first`.

    own: (values, gates) of the block's tokens, [channels] each, in float64 or float32. before: of the tokens of the
    block before, of which an overlapping entry takes the first half of channels; empty where there is none.
    """
    dim, dtype = compressor.dim, own[0][0].dtype
    bias = compressor.position_bias.to(own[0][0].device, dtype)
    own_half = slice(compressor.channels - dim, None)  # the second half, or all
    terms = [(v[own_half], (g + bias[j])[own_half]) for j, (v, g) in enumerate(own)]
    terms += [(v[:dim], (g + bias[j])[:dim]) for j, (v, g) in enumerate(before)]
    values, gates = (torch.stack(x) for x in zip(*terms, strict=True))
    mean = (gates.softmax(dim=0) * values).sum(dim=0)
    normed = mean / (mean.square().mean() + compressor.norm_eps).sqrt() * compressor.norm_weight.to(mean)
    return rotated(normed, first, compressor.inv_freq)


def rotated(x: Tensor, position: int, inv_freq: Tensor) -> Tensor:
    """The last 2 * len(inv_freq) elements of x [dim] turned, as complex numbers, by a position's angles."""
    angles = position * inv_freq.to(x)
    num_kept = len(x) - 2 * len(angles)
    numbers = torch.view_as_complex(x[num_kept:].reshape(-1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((x[:num_kept], torch.view_as_real(numbers).flatten()))


def index_scores(q: Tensor, weights: Tensor, keys: Sequence[Tensor]) -> list[float]:
    """The score of each entry for a row. q: [heads, dim]. weights: [heads]. keys: [dim] of each entry."""
    return [float((weights.double() * (q.double() @ key.double()).clamp(min=0)).sum()) for key in keys]


def best(scores: Sequence[float], topk: int) -> list[int]:
    """The entries of the highest scores, in order of position."""
    return sorted(sorted(range(len(scores)), key=lambda w: -scores[w])[:topk])


def gap(scores: Sequence[float], topk: int) -> float:
    """How far the last selected score is above the first that is not; infinite where all are selected."""
    ordered = sorted(scores, reverse=True)
    return ordered[topk - 1] - ordered[topk] if len(ordered) > topk else float("inf")


def quantised(row: Tensor) -> tuple[Tensor, Tensor]:
    """A row [512] in the 8-bit format: its elements as bytes [576], and the bytes [8] of its scales."""
    row = row.float()
    tiles, exponents = row[: TILE * TILES].reshape(TILES, TILE), []
    for tile in tiles:
        largest = max(float(tile.abs().max()), 1e-4) / 448
        exponents.append(next(e for e in range(-126, 128) if 2.0**e >= largest))
    scales = torch.tensor([2.0**e for e in exponents], device=row.device).unsqueeze(1)
    elements = (tiles / scales).to(torch.float8_e4m3fn).flatten().view(torch.uint8)
    tail = row[TILE * TILES :].to(torch.bfloat16).view(torch.uint8)
    powers = torch.tensor([*(127 + e for e in exponents), 0], dtype=torch.uint8, device=row.device)
    return torch.cat((elements, tail)), powers


def dequantised(elements: Tensor, powers: Tensor) -> Tensor:
    """The row [512] float32 that bytes of `quantised` stand for."""
    scales = torch.tensor([2.0 ** (int(p) - 127) for p in powers[:TILES]], device=elements.device).unsqueeze(1)
    tiles = elements[: TILE * TILES].view(torch.float8_e4m3fn).float().reshape(TILES, TILE) * scales
    return torch.cat((tiles.flatten(), elements[TILE * TILES :].view(torch.bfloat16).float()))
