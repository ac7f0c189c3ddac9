"""Tiles of dense attention's programs, and the number of programs among which the keys of a request are divided.

A plain rule of sizes and the GPU, so that nothing is tuned at run time and a graph holds what its warm-up ran.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attn_backends.kernels.devices import Gpu


class Tiles(NamedTuple):
    """The tile of a program. rows: query rows times heads. keys: of the loop. num_warps, num_stages: of the
    launch. registers: of a thread, at most; 0: as the assembler thinks best.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int = 0


# Best first: the most rows, which are the fewest passes over the keys. Wide: of more than 256 elements. Measured on an
# H200 (bfloat16, pages of 64 tokens); the last are for GPUs with less shared memory. Left to itself the assembler saves
# registers for a third program of 16 rows, for which there is no shared memory, and batches of 8 and more take 1.02 to
# 1.07 times as long (MLA of 16 heads, timed apart on an H200).
_WIDE_TILES = (Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 3), Tiles(16, 32, 4, 3, 255), Tiles(16, 16, 4, 2))
_TILES = (Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 3), Tiles(16, 32, 4, 4), Tiles(16, 16, 4, 2))
_FLOAT32_TILES = Tiles(16, 16, 4, 1)  # no tensor cores: products are done by elements


def choose_tiles(num_rows: int, sizes: dict[str, int], dot: torch.dtype, gpu: Gpu) -> Tiles:
    """The best tiles that fit a GPU and that requests of so many rows (query rows times heads of a KV head) fill at
    least half. dot: type of the products.
    """
    if dot is torch.float32:
        return _FLOAT32_TILES
    tiles = _WIDE_TILES if sizes["BLOCK_DIM"] > 256 else _TILES
    filled = (each for each in tiles if each.rows <= max(16, 2 * num_rows - 1))
    return next((each for each in filled if tile_bytes(each, sizes, dot, gpu) <= gpu.shared), tiles[-1])


def tile_bytes(tiles: Tiles, sizes: dict[str, int], dot: torch.dtype, gpu: Gpu) -> int:
    """Shared memory of queries, and of keys and values of each stage. A product of 64 rows reads keys and values from
    there; one of fewer rows from registers, so that the last stage needs no place, but the weights do.
    """
    row = sizes["BLOCK_DIM"] + (sizes["BLOCK_REST"] if sizes["REST"] else 0)
    entry = row if sizes["LATENT"] else row + sizes["BLOCK_V_DIM"]
    if tiles.rows >= 64:
        num_blocks, weights = tiles.num_stages * (2 if sizes["LATENT"] and gpu.tensor_memory else 1), 0
    else:
        num_blocks, weights = max(1, tiles.num_stages - 1), tiles.rows * tiles.keys
    return (tiles.rows * row + weights + num_blocks * tiles.keys * entry) * dot.itemsize


def least_bytes(sizes: dict[str, int], dtype: torch.dtype, gpu: Gpu) -> int:
    """Shared memory of the least tiles for sizes and a type of queries."""
    return tile_bytes(_FLOAT32_TILES if dtype is torch.float32 else _TILES[-1], sizes, dtype, gpu)


def largest_head(dtype: torch.dtype, gpu: Gpu) -> int:
    """The largest power of two that the elements of keys and of values may be."""
    size = 16
    while least_bytes(sizes_of(2 * size, 2 * size, latent=False), dtype, gpu) <= gpu.shared:
        size *= 2
    return size


@lru_cache(1024)
def choose_num_splits(num_programs: int, num_slots: int, most: int) -> int:
    """Parts to divide each request's keys into: the fewest that fill the last wave of programs nearly as well as any.

    num_programs: of an undivided batch. num_slots: programs that run at once. most: parts that make sense. Nearly: the
    share of slots in use is at least 0.9 of the best. No more than two waves are made.
    """
    num_programs = max(num_programs, 1)
    most = max(1, min(most, triton.cdiv(2 * num_slots, num_programs)))
    programs = [num_programs * parts for parts in range(1, most + 1)]
    shares = [count / (triton.cdiv(count, num_slots) * num_slots) for count in programs]
    return next(parts for parts, share in enumerate(shares, start=1) if share >= 0.9 * max(shares))


def is_crowded(num_programs: int, num_slots: int, num_held: int) -> bool:
    """Whether programs after those of a batch would leave these where they are. A GPU that holds more programs than
    there are spreads them evenly. With others after them they lay closer together, and took up to 1.18 times as long.
    That was 32 requests of 4096 keys, 32 heads over 8, on an H100 (rows of commit 1a09371).
    """
    return num_held <= num_slots or num_programs >= num_held


def is_one_latent(k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether values are the first elements of the keys, in the same memory."""
    return k_pages.data_ptr() == v_pages.data_ptr() and k_pages.stride() == v_pages.stride()


def sizes_of(dim: int, v_dim: int, latent: bool) -> dict[str, int]:
    """Elements of keys and values, of latents those after the values too, and the powers of two that hold them."""
    main = v_dim if latent else dim
    sizes = {"DIM": main, "REST": dim - main, "V_DIM": v_dim}
    blocks = {f"BLOCK_{name}": max(16, triton.next_power_of_2(size)) for name, size in sizes.items()}
    return {"LATENT": latent} | sizes | blocks
