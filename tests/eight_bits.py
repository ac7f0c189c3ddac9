"""Our kernels over 8-bit caches: Gluon beside Triton, and beside itself over bfloat16.

    python -m tests.eight_bits --json docs/results/h200/eight_bits.json

takes 2 minutes. Kernels take turns, under CUDA graphs of one call on every cache of a pool. Entries are rounded to
float8_e4m3fn. `speed` is Triton's time by Gluon's: above 1 Gluon is faster. A shape that Gluon does not run, or where
outputs differ, is a row that says so, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attn_backends import results
from attn_backends.cache import CacheFormat, PagedKV, PagedLatent
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.registry import get_backend
from benchmarks.layers import capture, check_same
from benchmarks.rows import Stage
from benchmarks.shapes import LAYERS, Pool, Problem, fill_pool, problem
from benchmarks.timing import CudaClock, fewer_rounds, take_turns
from tests.gluon_sweep import Shape
from tests.prompt_forms import Lengths, pool_of

ROUNDS, TURNS_US = 10, 2e5  # of each kernel; of all kernels on a shape together, but three rounds
LATENT = 576
_LATENTS = (*((128, width) for width in (1, 4, 16)), *((16, width) for width in (4, 8)))  # heads, width
SHAPES = (
    *(Shape(LATENT, 64, *one, *size) for one in _LATENTS for size in ((32, 4096), (128, 4096))),
    Shape(LATENT, 64, 128, 1024, 1, 8192),
    Shape(128, 64, 32, 8192, 8, 8192),
    Shape(128, 64, 32, 1024, 1, 32768),
    *(Shape(128, page_size, 32, 8192, 1, 8192) for page_size in (1, 16)),
    *(Shape(dim, 64, 32, 8192, 1, 8192) for dim in (64, 192, 256)),
)


def in_8_bits(pool: Pool) -> Pool:
    """A pool whose caches are rounded."""
    caches = (
        PagedLatent(_rounded(cache.latent), cache.rank)
        if isinstance(cache, PagedLatent)
        else PagedKV(_rounded(cache.k), _rounded(cache.v))
        for cache in pool.caches
    )
    return replace(pool, caches=tuple(caches))


def _rounded(entries: torch.Tensor) -> torch.Tensor:
    return entries.to(torch.float8_e4m3fn)


def problem_of(shape: Shape, device: torch.device) -> tuple[str, Problem]:
    """The backend of a shape, and the problem over bfloat16."""
    dim, page_size, heads, width, requests, context = shape
    if dim == LATENT:
        layer = next(each for each in LAYERS[CacheFormat.LATENT] if each.num_heads == heads)
        return "trtllm_mla", problem(fill_pool(layer, requests, context, device, [width]), layer, width)
    layer = AttentionLayer(0, heads, 8, dim, 128 if dim == 192 else dim, dim**-0.5)
    lengths = Lengths("", [width] * requests, context - width)
    return "fa3", problem(pool_of(layer, page_size, lengths, device), layer, width)


def measured(shape: Shape, stage: Stage) -> dict[str, Any]:
    """The row of a shape."""
    name, asked = problem_of(shape, stage.device)
    rounded = replace(asked, pool=in_8_bits(asked.pool))
    kernels = {"us": (rounded, "gluon"), "triton_us": (rounded, "triton"), "bfloat16_us": (asked, "gluon")}
    try:
        found = {
            column: capture(each.call(get_backend(name), kernel), each.pool.caches, stage)
            for column, (each, kernel) in kernels.items()
        }
        check_same(found["us"].output, found["triton_us"].output)
    except Exception as error:  # one that no kernel takes: the others are measured all the same
        reason = results.without_folders(f"{type(error).__name__}: {error}")[:300]
        return {**shape._asdict(), "status": "fail", "reason": reason}
    replays = [each.graph.replay for each in found.values()]
    rounds = fewer_rounds(replays, stage.rounds, TURNS_US, stage.clock)
    times = [us / len(asked.pool.caches) for us in take_turns(replays, rounds, stage.clock)]
    speed = {"speed": round(times[1] / times[0], 3), "status": "pass"}
    return {**shape._asdict(), **{column: round(us, 2) for column, us in zip(found, times, strict=True)}, **speed}


def main() -> int:
    """Measure, write and print the rows; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="file to write")
    args = parser.parse_args()
    stage, failed = Stage(torch.device("cuda"), CudaGraph, CudaClock(), ROUNDS), 0
    head = results.head(("python", "-m", "tests.eight_bits", *sys.argv[1:]), "cuda")
    with results.Recording(args.json, head) as recording:
        for shape in SHAPES:
            row = measured(shape, stage)
            recording.add(row)
            print(*row.values(), flush=True)
            failed += row["status"] == "fail"
        recording.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
