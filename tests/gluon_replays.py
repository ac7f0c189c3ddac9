"""Replays of our Gluon kernels give the bits of the first launch, a hundred times, whatever runs beside them.

Their warp groups hand memory to one another by mbarriers. Work of other lengths on a second stream delays some of their
programs in each replay, as many as a seed draws. `tests/gluon_model.py` draws other orders on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch

from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.errors import BackendUnavailableError
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.registry import get_backend
from benchmarks.compressed import compressed_problems
from benchmarks.shapes import LAYERS, fill_pool, problem

NUM_REPLAYS, SIZES = 100, (5, 1300)  # requests, and tokens of each
_MLA = (("trtllm_mla", "gluon"), ("flashinfer_mla", "gluon"), ("fa3", "gluon_mla"))
CASES = [(*kernel, CacheFormat.LATENT, width) for kernel in _MLA for width in (1, 8)]
CASES += [("fa3", "gluon", CacheFormat.KV, 300)]
CASES += [("dsv4", "gluon", CompressedFormat.COMPRESSED, width) for width in (1, 8)]


def rows(device: str) -> Iterator[dict[str, Any]]:
    """A row for each kernel and width: how many replays gave other bits than the first launch."""
    for name, kernel, format, width in CASES:
        about = {"backend": name, "kernel": kernel, "width": width}
        try:
            asked = problem_of(format, width, torch.device(device))
            call, cache = asked.call(get_backend(name), kernel), asked.pool.caches[0]
        except BackendUnavailableError as error:
            yield {**about, "status": "not_run", "reason": str(error)}
            continue
        first, square = call(cache).clone(), torch.ones(1024, 1024, device=device)
        graph, beside = (CudaGraph(), torch.cuda.Stream()) if device == "cuda" else (RecordedGraph(), None)
        out, other, delays = graph.capture(partial(call, cache)), 0, Random(width)
        for _ in range(NUM_REPLAYS):
            with torch.cuda.stream(beside):
                [square @ square for _ in range(delays.randrange(8))]
            graph.replay()
            other += not torch.equal(out, first)
        yield {**about, "replays": NUM_REPLAYS, "other": other, "status": "fail" if other else "pass"}


def problem_of(format: CacheFormat | CompressedFormat, width: int, device: torch.device) -> Any:
    """Queries on a pool; those of compressed layers have 64 heads."""
    if isinstance(format, CompressedFormat):
        return next(compressed_problems([width], *SIZES, device))
    layer = LAYERS[format][-1]
    return problem(fill_pool(layer, *SIZES, device, [width]), layer, width)
