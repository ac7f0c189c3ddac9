"""FlashAttention-3's scheduler metadata, word by word, and on a GPU beside the vendor's own.

    python -m tests.tile_words --json FILE

plans random batches of every shape of layers by the launch that plans a captured step, and again by the vendor's
`get_scheduler_metadata`; it fails if a word differs. A row is one shape of layers, page size and window.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attn_backends import results
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.contract.kernel import LayerShape, Scheduled
from attn_backends.kernels.tile_sizes import TileSizes
from attn_backends.vendors.flash_attention_tiles import TileSchedule
from spec_metadata import BlockTable, BoundInputs, CacheGeometry, Capacity, StepKind

HEADS = {"64": (64, 8, 64, 64), "128": (32, 8, 128, 128), "256": (8, 8, 256, 256), "MLA": (16, 1, 576, 512)}
KINDS = [
    (StepKind.DECODE, 1),
    (StepKind.TARGET_VERIFY, 4),
    (StepKind.DRAFT_BLOCK, 16),
    (StepKind.TARGET_VERIFY, 64),
]
PAGE_SIZES, WINDOWS, BATCH_SIZES, BATCHES = (1, 64, 256), (None, 1000), (1, 3, 33, 128), 30
KERNEL, DTYPE = "vllm_flash_attn", torch.bfloat16


def words_of(num_rows: Sequence[int], lens: Sequence[int], tiles: TileSizes) -> list[int]:
    """The words of requests with so many query tokens and keys; what fills a run up is 0."""
    rows, blocks = [tiles.pack * each for each in num_rows], [-(-each // tiles.keys) for each in lens]
    total = sum(-(-of_query // tiles.rows) * of_keys for of_query, of_keys in zip(rows, blocks, strict=True))
    cost = np.float32(total) * np.float32(1.1) * np.float32(tiles.heads) / np.float32(tiles.processors)
    share = max(math.ceil(cost), 1)
    splits = [max(min(-(-each // share), tiles.most_splits), 1) for each in blocks]
    heads = [_heads(-(-each // split), tiles) for each, split in zip(blocks, splits, strict=True)]
    kinds = [rows, *[splits] * tiles.has_splits, *[heads] * tiles.has_heads]
    return [word for kind in kinds for word in kind + [0] * (tiles.stride - len(kind))] + [0]


def _heads(blocks: int, tiles: TileSizes) -> int:
    fitting = next((each for each in (16, 8, 4, 2) if max(blocks, 1) * each <= tiles.cached_blocks), 1)
    return min(fitting * tiles.heads_a_key, tiles.heads)


def rows(device: str) -> Iterator[dict[str, Any]]:
    """Every shape of layers, page size and window."""
    rng = torch.Generator().manual_seed(0)
    for (name, heads), page_size, window in product(HEADS.items(), PAGE_SIZES, WINDOWS):
        if name != "MLA" or window is None:
            shape = LayerShape(*heads, 0.1, DTYPE, DTYPE, window)
            equal = [
                is_equal
                for (kind, width), bs in product(KINDS, BATCH_SIZES)
                for is_equal in _compared(shape, page_size, kind, width, bs, rng, torch.device(device))
            ]
            found = {"batches": len(equal), "equal": sum(equal), "status": "pass" if all(equal) else "fail"}
            yield {"head_size": name, "page_size": page_size, "window": window, **found}


def _compared(
    shape: LayerShape,
    page_size: int,
    kind: StepKind,
    width: int,
    bs: int,
    rng: torch.Generator,
    device: torch.device,
) -> Iterator[bool]:
    """Whether both plan random batches of one captured step alike."""
    context = 65536 if bs <= 33 else 8192
    capacity = Capacity(bs, context, page_size, 1, max(width - 1, 1), max(width, 2), block_size=width)
    geometry = CacheGeometry(capacity.max_pages + 1, page_size)
    pages = torch.arange(1, capacity.max_pages + 1, dtype=torch.int32, device=device).repeat(bs, 1)
    lens = torch.ones(bs, dtype=torch.int32, device=device)
    backend = FA3Backend(capacity, geometry, device, kernel=KERNEL)
    inputs = BoundInputs(lens, num_real=torch.full((1,), bs, dtype=torch.int32, device=device))
    meta = backend.capture(capacity.bucket(kind, bs), BlockTable(pages, geometry), inputs, layers=[shape])
    scheduled = meta.schedules.planned(0, shape)
    assert isinstance(scheduled, Scheduled)
    schedule = scheduled.schedule
    assert isinstance(schedule, TileSchedule)
    for _ in range(BATCHES):
        longest = int(torch.randint(2, context - width, (), generator=rng))
        lens.copy_(torch.randint(1, longest, (bs,), generator=rng))
        schedule.metadata.fill_(-1)
        backend.refresh(meta)
        ours = _told(schedule.metadata, bs)
        schedule.refresh()
        yield ours == _told(schedule.metadata, bs)


def _told(words: torch.Tensor, bs: int) -> list[int]:
    """All words but those that fill a run up."""
    *runs, counter = words.tolist()
    return [word for place, word in enumerate(runs) if place % (-(-bs // 4) * 4) < bs] + [counter]


def main() -> int:
    """Compare; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    file, failed = parser.parse_args().json, 0
    head = results.head(["python", "-m", "tests.tile_words", "--json", str(file)], "cuda")
    with results.Recording(file, head) as made:
        for row in rows("cuda"):
            made.add(row)
            print(*row.values(), flush=True)
            failed += row["status"] == "fail"
    made.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
