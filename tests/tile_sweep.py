"""Times the tiles that our Triton kernels choose from: `python -m tests.tile_sweep --json FILE [--seconds 170]`.

Each entry of a line of tiles is timed on shapes that the line is for, in turn with the others, beside the one
that the rule takes there. FILE keeps each shape; the same command goes on after the last one.
At the end it names the entries that are nowhere 5 % faster than that one: they stay only for GPUs with less shared
memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from attn_backends.cache import CacheFormat
from attn_backends.graphs import CudaGraph
from attn_backends.kernels import triton_decode, triton_prefill, triton_sparse, triton_tiles
from attn_backends.kernels.devices import gpu_of
from attn_backends.registry import get_backend
from benchmarks.compressed import HEADS, compressed_problems
from benchmarks.layers import Captured, capture, check_same
from benchmarks.rows import Stage
from benchmarks.shapes import DTYPE, LAYERS, PAGE_SIZE, fill_pool, problem
from benchmarks.timing import CudaClock, take_turns

GAIN, ROUNDS = 1.05, 10
Tiles, Blocks = triton_tiles.Tiles, triton_sparse.Blocks


class Line(NamedTuple):
    """Tiles to choose from. rule: the function of `module` that chooses. more: entries that no rule takes yet. shapes:
    heads, width, requests and tokens of each.
    """

    backend: str
    format: CacheFormat | None
    module: Any
    rule: str
    entries: Sequence[Any]
    more: Sequence[Any]
    shapes: Sequence[tuple[int, int, int, int]]


_SIZES = ((1, 4096), (32, 4096))
_SPARSE = (Blocks(64, 128, 8, 1), Blocks(64, 32, 8, 2), Blocks(16, 32, 4, 3), Blocks(16, 16, 4, 2))
_LATENT, _KV = CacheFormat.LATENT, CacheFormat.KV
LINES = {
    "decode, latents": Line(
        "trtllm_mla",
        _LATENT,
        triton_decode,
        "choose_tiles",
        triton_tiles._WIDE_TILES,
        (Tiles(32, 64, 4, 2), Tiles(16, 64, 4, 2)),
        [(16, width, *size) for width in (1, 4) for size in _SIZES],
    ),
    "decode, keys and values": Line(
        "fa3",
        _KV,
        triton_decode,
        "choose_tiles",
        triton_tiles._TILES,
        (Tiles(16, 64, 4, 3), Tiles(16, 128, 4, 2)),
        [(32, width, *size) for width in (1, 8, 16) for size in _SIZES],
    ),
    "prompts, latents": Line(
        "trtllm_mla",
        _LATENT,
        triton_prefill,
        "choose_tiles",
        triton_prefill._LATENT_TILES,
        (),
        [(16, 1024, 1, 8192)],
    ),
    "prompts, keys and values": Line(
        "fa3",
        _KV,
        triton_prefill,
        "choose_tiles",
        triton_prefill._TILES,
        (Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 2)),
        [(32, 1024, 1, 8192), (32, 1024, 8, 1024)],
    ),
    "sparse rows": Line(
        "dsv4",
        None,
        triton_sparse,
        "choose_blocks",
        _SPARSE,
        (Blocks(32, 64, 4, 2),),
        [(heads, width, *size) for heads in HEADS for width in (1, 8) for size in _SIZES],
    ),
}


def rows(done: Sequence[dict[str, Any]], seconds: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row of each shape that is not done: microseconds of each entry, None of those that do not run here."""
    stage, start = Stage(device, CudaGraph, CudaClock(), ROUNDS), time.perf_counter()
    seen = {(row["line"], *row["shape"]) for row in done}
    for name, line in LINES.items():
        for shape in line.shapes:
            if (name, *shape) in seen:
                continue
            if time.perf_counter() - start > seconds:
                return
            yield {"line": name, "shape": shape, "page_size": PAGE_SIZE, "us": _times(line, shape, stage)}


def _times(line: Line, shape: tuple[int, int, int, int], stage: Stage) -> dict[str, float | None]:
    asked, entries = _problem(line, shape, stage.device), [*line.entries, *line.more]
    caches, found = asked.pool.caches, dict[str, Captured]()
    for entry in entries:
        with patch.object(line.module, line.rule, partial(_always, entry)):
            _forget(line.module)
            try:
                found[str(tuple(entry))] = capture(asked.call(get_backend(line.backend), "triton"), caches, stage)
            except Exception as error:  # too much shared memory, or tiles that do not suit the kernel
                print(f"{tuple(entry)}: {type(error).__name__}: {error}"[:200], flush=True)
    _forget(line.module)
    for each in found.values():
        each.graph.replay()
        check_same(each.output, next(iter(found.values())).output)
    us = take_turns([each.graph.replay for each in found.values()], stage.rounds, stage.clock)
    times = {name: round(each / len(caches), 2) for name, each in zip(found, us, strict=True)}
    return {str(tuple(entry)): times.get(str(tuple(entry))) for entry in entries}


def _problem(line: Line, shape: tuple[int, int, int, int], device: torch.device) -> Any:
    heads, width, *size = shape
    if line.format is None:
        found = compressed_problems([width], *size, device)
        return next(each for each in found if each.layer.num_heads == heads)
    layer = next(each for each in LAYERS[line.format] if each.num_heads == heads)
    return problem(fill_pool(layer, *size, device, [width]), layer, width)


def _always(entry: Any, *given: Any) -> Any:
    """A rule that takes one entry."""
    return entry


def _forget(module: Any) -> None:
    """Drop launches and shares that were chosen for another entry."""
    if module is triton_decode:
        triton_decode._shares.cache_clear()
    launch = getattr(module, "_launch", None)
    if launch is not None:
        launch._kept.clear()


def summary(found: Sequence[dict[str, Any]], device: torch.device) -> Iterator[str]:
    """A line for each entry: its best gain over what the rule takes, and where."""
    for name, line in LINES.items():
        for entry in map(str, map(tuple, (*line.entries, *line.more))):
            gains = []
            for row in found:
                chosen = chosen_here(name, row["shape"], device) if row["line"] == name else entry
                if entry != chosen and row["us"].get(entry) and row["us"].get(chosen):
                    gains.append((row["us"][chosen] / row["us"][entry], row["shape"], chosen))
            gain, shape, chosen = max(gains, key=lambda each: each[0], default=(0.0, (), None))
            verdict = "wins" if gain >= GAIN else "NEVER 5 % faster"
            yield f"{name}: {entry} {verdict}: {gain:.3f} of {chosen} at heads, width, requests, tokens {(*shape,)}"


def chosen_here(name: str, shape: Sequence[int], device: torch.device) -> str:
    """What the rule takes for a shape; on a CPU, for an H200."""
    line, (heads, width, *_), gpu = LINES[name], shape, gpu_of(device)
    if line.format is None:
        return str(tuple(triton_sparse.choose_blocks(heads, DTYPE, gpu.shared)))
    layer = LAYERS[line.format][0]
    sizes = triton_tiles.sizes_of(layer.head_dim, layer.v_head_dim, line.format is _LATENT)
    if line.module is triton_prefill:
        return str(tuple(triton_prefill.choose_tiles(sizes, DTYPE, gpu.shared)))
    return str(tuple(triton_tiles.choose_tiles(heads // layer.num_kv_heads * width, sizes, DTYPE, gpu)))


def main() -> None:
    """Measure what is missing, write it, and say which entries never win."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=170.0, help="begin no shape later (default: %(default)s)")
    args = parser.parse_args()
    found = json.loads(args.json.read_text()) if args.json.exists() else []
    for row in rows(found, args.seconds, torch.device("cuda")):
        found.append(row)
        args.json.write_text(json.dumps(found, indent=1))
        print(row["line"], row["shape"], row["us"], flush=True)
    print(*summary(found, torch.device("cuda")), sep="\n")
    missing = sum(len(line.shapes) for line in LINES.values()) - len(found)
    print(f"{missing} shapes are left; the same command goes on" if missing else "all shapes were timed")


if __name__ == "__main__":
    main()
