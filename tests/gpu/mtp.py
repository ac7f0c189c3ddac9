"""Multi-layer MTP on a device, through its graphs: every draft is what a full recompute of all modules gives, every
token plain decoding's, with the host in time and a cycle late; and how fast it is.

    python -m tests.gpu.mtp --json FILE [--device cpu]

float32 on the torch kernels, so that equal tokens can be asked for. The first rows are of tiny random models whose
cycles accept every length, the last ones of the shipped model and its trained modules.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attn_backends import results
from attn_backends.graphs import CudaGraph, RecordedGraph
from tests import mtp_laws as laws
from tests import serving_laws
from tests.mtp_scenes import Place, capacity_of, random_arrivals, watch
from tests.mtp_shipped import NUM_STEPS, shipped_worker, trained
from tests.serving_scenes import NEWLINE, Arrival, arrivals, endless, play

PLACES = (("mla", "flashinfer_mla", 16), ("mla", "trtllm_mla", 32), ("gqa", "fa3", 4))
GRAPHS = ("one", "per_module")
BUCKETS = (1, 2, 4, 8)

Row = dict[str, Any]


def random_scene(place: tuple[str, str, int], draft_graphs: str, host_lag: int, device: str) -> Row:
    """Requests join and leave at random, and chunks of prompts end anywhere."""
    scene, num_steps = random_arrivals(40, 20, 40, 24, seed=1), 4 - host_lag
    where = Place(*place, BUCKETS, draft_graphs, host_lag, device, checking=False)
    requests, seen = laws.check_scene(where, num_steps, scene, max_bs=10, chunk=7)
    cycles = [cycle for request in seen for cycle in request.cycles]
    return {
        "num_steps": num_steps,
        "drafts": num_steps * len(cycles),
        "accepted_lengths": {str(length): count for length, count in sorted(laws.accepted_lengths(seen).items())},
        "largest_batch": max(cycle.bs for cycle in cycles),
        "buckets": sorted({cycle.bucket for cycle in cycles}),
        "tokens": sum(len(request.output) for request in requests),
        "shared_tokens": sum(request.statistics.num_shared_tokens for request in requests),
    }


def batches(place: tuple[str, str, int], draft_graphs: str, host_lag: int, device: str) -> Row:
    """5, 40 and 6 requests, with graphs for up to 8."""
    laws.check_batches(*place, draft_graphs, device)
    return {"num_steps": 3}


@cache
def text(model: str, device: str) -> tuple[list[Arrival], list[list[int]]]:
    """Requests on real text, and what plain decoding makes of them."""
    scene = arrivals(40, 40, 96, 32)
    return scene, endless(model, scene, 32, device)


def shipped_scene(place: tuple[str, str, int], draft_graphs: str, host_lag: int, device: str) -> Row:
    """Real text on trained modules: figures of the scene, and its speed without anybody watching."""
    model, backend, page_size = place
    scene, expected = text(model, device)
    worker = shipped_worker(
        model,
        backend,
        capacity_of(NUM_STEPS, 10, 96 + 32 + 8, page_size),
        checking=False,
        device=device,
        buckets=BUCKETS,
        make_graph=CudaGraph if device == "cuda" else RecordedGraph,
        draft_graphs=draft_graphs,
        chunk=32,
        eos_tokens=(NEWLINE,),
        host_lag=host_lag,
    )
    with watch(worker) as seen:
        figures = serving_laws.check_scene(worker, scene, expected)
    for request in seen:
        laws.check_drafts(trained(device), request)
    started = time.perf_counter()
    requests, _ = play(serving_laws.server_of(worker), scene)
    seconds, num_tokens = time.perf_counter() - started, sum(len(request.output) for request in requests)
    speed = {"seconds": round(seconds, 3), "tokens_per_second": round(num_tokens / seconds, 1)}
    return (
        {"num_steps": NUM_STEPS, "drafts": NUM_STEPS * sum(len(request.cycles) for request in seen)} | figures | speed
    )


def rows(device: str) -> Iterator[Row]:
    """Each scene in the places, ways to capture modules, and lags that it has."""
    given: list[tuple[Callable[..., Row], Any]] = [
        (random_scene, product(PLACES, GRAPHS, (0, 1))),
        (batches, zip(PLACES, (*GRAPHS, "one"), (0, 0, 0), strict=True)),
        (shipped_scene, product(PLACES[:1], GRAPHS, (0, 1))),
    ]
    for scene, cases in given:
        for place, draft_graphs, host_lag in cases:
            about = dict(zip(("model", "backend", "page_size"), place, strict=True))
            row: Row = {"scene": scene.__name__, **about, "draft_graphs": draft_graphs, "host_lag": host_lag}
            try:
                yield row | {"status": "pass"} | scene(place, draft_graphs, host_lag, device)
            except AssertionError as error:
                yield row | {"status": "fail", "reason": str(error)}


def main() -> int:
    """Run every scene; 1 if some draft or token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    found = []
    for row in rows(args.device):
        found.append(row)
        print(*row.values(), flush=True)
    command = ["python", "-m", "tests.gpu.mtp", "--json", str(args.json), "--device", args.device]
    results.write(args.json, results.head(command, args.device), found)
    return int(any(row["status"] == "fail" for row in found))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
