"""FlashAttention-3's tiles, and what the words of its scheduler metadata follow from beside lengths and rows.

Of vLLM 0.33's build, for queries and caches of two bytes a number: hopper/tile_size.h, hopper/heuristics.h and
hopper/flash_api.cpp. What bounds splits, and how many rows a query token fills, is read off words of the vendor's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_CACHE_BYTES, _NUMBER_BYTES = 2**25, 2
_LATENT = 512


class TileSizes(NamedTuple):
    """Sizes that determine the words of scheduler metadata.

    pack: rows of a tile that a query token fills. rows, keys: of a tile. heads: that have tiles of their own.
    heads_a_key: of these, heads that read the same keys. processors: that tiles are shared out to. most_splits: of a
    request's keys. cached_blocks: blocks of keys of a head that the L2 cache is thought to hold. has_splits, has_heads:
    1 where words tell splits, and how many heads run beside each other, else 0. stride: words of each kind.
    """

    pack: int
    rows: int
    keys: int
    heads: int
    heads_a_key: int
    processors: int
    most_splits: int
    cached_blocks: int
    has_splits: int
    has_heads: int
    stride: int


def tile_sizes(words: Sequence[int], arguments: Mapping[str, Any], num_processors: int) -> TileSizes:
    """The sizes of a batch's words. words: the vendor's, of one request with as many rows and keys as any may have.
    arguments: those of the vendor's `get_scheduler_metadata` for the batch.
    """
    most_rows, head_sizes = arguments["max_seqlen_q"], (arguments["headdim"], arguments["headdim_v"])
    num_heads, num_kv_heads = arguments["num_heads_q"], arguments["num_heads_kv"]
    group, is_local = num_heads // num_kv_heads, 0 <= arguments["window_size"][0] < arguments["max_seqlen_k"] - 1
    is_masked = is_local or (arguments["causal"] and (most_rows > 1 or 64 < head_sizes[0] <= 128))
    rows, keys = _tile(head_sizes, most_rows * group, arguments["page_size"], is_local=is_local, is_masked=is_masked)
    pack, has_splits = words[0] // most_rows, len(words) // 4 - 1 - is_masked
    own_heads = num_kv_heads if pack == group else num_heads
    sharing = min(1 << (group - 1).bit_length(), 16)
    return TileSizes(
        pack=pack,
        rows=rows,
        keys=keys,
        heads=own_heads,
        heads_a_key=own_heads // num_kv_heads,
        processors=num_processors,
        most_splits=words[4] if has_splits else 1,
        cached_blocks=_CACHE_BYTES // sharing // (keys * sum(head_sizes) * _NUMBER_BYTES),
        has_splits=has_splits,
        has_heads=int(is_masked),
        stride=-(-arguments["batch_size"] // 4) * 4,
    )


def _tile(
    head_sizes: tuple[int, int], most_rows: int, page_size: int, *, is_local: bool, is_masked: bool
) -> tuple[int, int]:
    """Rows and keys of a tile. Where pages are whole tiles of keys, and a request has more rows than a tile, the kernel
    fetches pages as they are; gathered rows make other tiles.
    """
    is_short = not is_local and most_rows <= 64
    if head_sizes[1] == _LATENT:
        rows, keys, gathered = 64, 64, 64
    elif head_sizes[0] == 64:
        masked = 160 if is_local else 128
        rows, keys, gathered = (192, masked, masked) if is_masked else (192, 192, 160)
        rows, keys, gathered = (64, 192, 192) if is_short else (rows, keys, gathered)
    elif head_sizes[0] == 128:
        rows, keys = (64, 176) if is_short else (128, 160)
        keys, gathered = 128 if is_masked else keys, 128
    else:
        rows, keys, gathered = (128, 64, 64) if is_local else (128, 80, 80)
    is_fetched = not is_local and page_size % keys == 0 and most_rows > rows
    return rows, keys if is_fetched else gathered
