"""Compressed entries by definition, which of them a row attends to, and the 8-bit page format. Knows no metadata."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_backends.compressed_layer import Compressor

TILE, TILES, TAIL = 64, 7, 64  # of a row of 512 in the 8-bit format: tiles with a scale each, then bfloat16
DATA, SCALES = TILE * TILES + 2 * TAIL, TILES + 1  # bytes of a row: elements, then powers of two and one of padding


def entries(values: Tensor, gates: Tensor, compressor: Compressor, ratio: int, overlap: bool) -> Tensor:
    """The entries [num_blocks, dim] of a request's blocks of `ratio` tokens.

    values, gates: of its tokens, [num_blocks * ratio, channels] each, in float64 or float32. overlap: an entry is also
    made of the first half of channels of the block before, if there is one.
    """
    dim, blocks = compressor.dim, values.shape[0] // ratio
    of_blocks = (blocks, ratio, compressor.channels)
    values = values.reshape(of_blocks)
    gates = gates.reshape(of_blocks) + compressor.position_bias.to(gates)
    terms, weights = values[..., -dim:], gates[..., -dim:]  # the second half, or all
    if overlap:
        none = torch.full_like(gates[:1, :, :dim], -torch.inf)  # before the first block
        terms = torch.cat((torch.cat((torch.zeros_like(none), values[:-1, :, :dim])), terms), dim=1)
        weights = torch.cat((torch.cat((none, gates[:-1, :, :dim])), weights), dim=1)
    mean = (weights.softmax(dim=1) * terms).sum(dim=1)
    length = (mean.square().mean(dim=1, keepdim=True) + compressor.norm_eps).sqrt()
    return rotated(mean / length * compressor.norm_weight.to(mean), torch.arange(blocks) * ratio, compressor.inv_freq)


def rotated(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """The last 2 * len(inv_freq) elements of x [n, dim] turned, as complex numbers, by the angles of positions [n]."""
    angles = positions.to(x).unsqueeze(1) * inv_freq.to(x)
    kept, turned = x.split([x.shape[1] - 2 * len(inv_freq), 2 * len(inv_freq)], dim=1)
    numbers = torch.view_as_complex(turned.unflatten(1, (-1, 2)).contiguous())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((kept, torch.view_as_real(numbers).flatten(1)), dim=1)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> list[float]:
    """The score of each entry for a row. q: [heads, dim]. weights: [heads]. keys: [entries, dim]."""
    return ((keys.double() @ q.double().T).clamp(min=0) @ weights.double()).tolist()


def best(scores: Sequence[float], topk: int) -> list[int]:
    """The entries of the highest scores, in order of position."""
    return sorted(sorted(range(len(scores)), key=lambda w: -scores[w])[:topk])


def gap(scores: Sequence[float], topk: int) -> float:
    """The last selected score less the first that is not; infinite where all are selected."""
    ordered = sorted(scores, reverse=True)
    return ordered[topk - 1] - ordered[topk] if len(ordered) > topk else float("inf")


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., 512] in the 8-bit format: their elements as bytes [..., 576], and bytes [..., 8] of scales."""
    rows = rows.float()
    tiles = rows[..., : TILE * TILES].unflatten(-1, (TILES, TILE))
    fractions, exponents = torch.frexp(tiles.abs().amax(dim=-1).double().clamp(min=1e-4) / 448)
    powers = (127 + exponents - (fractions == 0.5).int()).to(torch.uint8)  # the least power that is no smaller
    elements = (tiles / _scales(powers)).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    tails = rows[..., TILE * TILES :].to(torch.bfloat16).view(torch.uint8)
    return torch.cat((elements, tails), dim=-1), torch.cat((powers, torch.zeros_like(powers[..., :1])), dim=-1)


def dequantised(elements: Tensor, powers: Tensor) -> Tensor:
    """The rows [..., 512] float32 that bytes of `quantised` stand for."""
    tiles = elements[..., : TILE * TILES].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (TILES, TILE))
    tails = elements[..., TILE * TILES :].contiguous().view(torch.bfloat16).float()
    return torch.cat(((tiles * _scales(powers[..., :TILES])).flatten(-2), tails), dim=-1)


def unpadded(pages: Tensor, per_page: int) -> Tensor:
    """Pages [num_pages, bytes] in the 8-bit format, with 0 in the byte that pads the scales of each of their rows. A
    writer may leave it as it was, and SGLang's does. per_page: rows.
    """
    pages = pages.clone()
    pages[:, per_page * DATA : per_page * (DATA + SCALES)][:, SCALES - 1 :: SCALES] = 0
    return pages


def _scales(powers: Tensor) -> Tensor:
    """[..., tiles, 1] float32: the powers of two whose exponents are the bytes, as float32 has them."""
    return (powers.int() << 23).view(torch.float32).unsqueeze(-1)
