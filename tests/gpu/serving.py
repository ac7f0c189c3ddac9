"""Requests that join and leave at random on a device, through its graphs: the tokens of plain decoding, with the host
in time and a cycle late, and how fast each is.

    python -m tests.gpu.serving --json FILE [--device cpu]

float32 on the torch kernels, so that equal tokens can be asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attn_backends import results
from attn_backends.graphs import CudaGraph, RecordedGraph
from spec_metadata import Capacity
from tests.serving_laws import check_scene, server_of
from tests.serving_scenes import CHAIN, NEWLINE, TREE, Arrival, arrivals, eagle_worker, endless, play

NUM_REQUESTS, NUM_ROUNDS, LONGEST, NEW_TOKENS = 60, 60, 96, 48
PAGED = (("mla", "flashinfer_mla", 16), ("mla", "trtllm_mla", 32), ("gqa", "fa3", 16))
DRAFTS = {"chain": CHAIN, "tree": TREE}


def run(
    place: tuple[str, str, int], draft: str, host_lag: int, device: str, scene: list[Arrival], text: list[list[int]]
) -> dict[str, Any]:
    """A row."""
    model, backend, page_size = place
    capacity = Capacity(16, LONGEST + NEW_TOKENS + 8, page_size, **DRAFTS[draft])
    graphs = {"buckets": (1, 2, 4, 8), "make_graph": CudaGraph if device == "cuda" else RecordedGraph}
    worker = eagle_worker(
        model,
        backend,
        capacity,
        checking=False,
        device=device,
        chunk=32,
        eos_tokens=(NEWLINE,),
        host_lag=host_lag,
        **graphs,
    )
    row: dict[str, Any] = {"backend": backend, "model": model, "draft": draft, "host_lag": host_lag, "status": "pass"}
    try:
        figures = check_scene(worker, scene, text)
    except AssertionError as error:
        return row | {"status": "fail", "reason": str(error)}
    started = time.perf_counter()
    requests, _ = play(server_of(worker), scene)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(request.output) for request in requests)
    return row | figures | {"seconds": round(seconds, 3), "tokens_per_second": round(num_tokens / seconds, 1)}


def main() -> int:
    """Serve the scene on every backend; 1 if some tokens are not plain decoding's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    scene = arrivals(NUM_REQUESTS, NUM_ROUNDS, LONGEST, NEW_TOKENS)
    texts = {model: endless(model, scene, NEW_TOKENS, args.device) for model in ("mla", "gqa")}
    rows = []
    for place, draft, host_lag in product(PAGED, DRAFTS, (0, 1)):
        rows.append(run(place, draft, host_lag, args.device, scene, texts[place[0]]))
        print(*rows[-1].values(), flush=True)
    command = ["python", "-m", "tests.gpu.serving", "--json", str(args.json), "--device", args.device]
    results.write(args.json, results.head(command, args.device), rows)
    return int(any(row["status"] == "fail" for row in rows))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
