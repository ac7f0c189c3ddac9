"""Prefill on a device, eagerly, through graphs in pieces and through whole graphs: the same results, and the same for
prompts whose tokens are hidden behind their embeddings; and how fast each is.

    python -m tests.gpu.prefill --json FILE [--device cpu]

float32 on the torch kernels, so that equal tokens can be asked for. The last rows are of the shipped models.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attn_backends import results
from attn_backends_reference.eagle.serving import serve
from spec_metadata import Capacity
from tests import mm_laws, prefill_laws
from tests.mm_shipped import DRAFTS, NUM_TOKENS, serve_hidden, texts, worker_of
from tests.mtp_scenes import Place
from tests.serving_laws import tokens_per_cycle
from tests.serving_scenes import plain_worker, tokens

PLACES = (
    Place("mla", "flashinfer_mla", 16, checking=False),
    Place("mla", "trtllm_mla", 32, checking=False),
    Place("gqa", "fa3", 4, checking=False),
)
GRAPHS = ("piecewise", "full")
LENGTH = 128

Row = dict[str, Any]


def paths(place: Place, worker: str, graphs: str, chunk: int) -> Row:
    """Random prompts in chunks: results and caches of eager prefill."""
    ran = prefill_laws.check_paths(worker, place, chunk, graphs=graphs)
    return {"steps": len(ran), "buckets": sorted({one.result.bucket.num_tokens for one in ran if one.result.bucket})}


def exact(place: Place, worker: str, graphs: str) -> Row:
    """Bit for bit what the padded step gives eagerly, or of pieces a step that fills its bucket."""
    {"piecewise": prefill_laws.check_exact, "full": prefill_laws.check_full_exact}[graphs](worker, place)
    return {}


def hidden(place: Place, worker: str, prefill: str, chunk: int, host_lag: int) -> Row:
    """Prompts with embeddings of tokens in the places of placeholders: to the bit what the tokens give."""
    place = replace(place, buckets=(1, 2, 4))
    requests = mm_laws.check_hidden(worker, prefill, chunk, place, host_lag)
    return {
        "requests": len(requests),
        "shared_tokens": sum(request.statistics.num_shared_tokens for request in requests),
    }


@cache
def plainly(model: str, device: str) -> list[list[int]]:
    """What plain decoding makes of the texts."""
    worker = plain_worker(model, "fa3", Capacity(4, LENGTH + NUM_TOKENS, 16), checking=False, device=device)
    return tokens(serve(worker, texts(LENGTH), NUM_TOKENS))


def shipped(device: str, draft: str, prefill: str) -> Row:
    """Real text, most of it hidden, with trained drafts: plain decoding's tokens, and how fast prompts are through."""
    captured = mm_laws.PREFILLS[prefill] and mm_laws.PREFILLS[prefill] | {"prefill_buckets": (LENGTH, 4 * LENGTH)}
    worker = worker_of(draft, LENGTH, device, chunk=LENGTH, buckets=(1, 2, 4), **captured)
    requests = serve_hidden(worker, texts(LENGTH))
    assert [request.output for request in requests] == plainly(draft[:3], device), "not the tokens of plain decoding"
    started = time.perf_counter()
    again = serve_hidden(worker, texts(LENGTH))
    seconds = time.perf_counter() - started
    in_prefill = max(request.statistics.seconds["prefill"] for request in again)
    return {
        "tokens_per_cycle": round(tokens_per_cycle(requests), 3),
        "milliseconds_of_a_prefill": round(1000 * in_prefill, 3),
        "seconds": round(seconds, 3),
    }


def rows(device: str) -> Iterator[Row]:
    """Each scene in the places and ways that it has."""
    places = [replace(place, device=device) for place in PLACES]
    gqa = places[-1]
    workers = [(place, worker) for place in places for worker in mm_laws.WORKERS if worker != "eagle3" or place == gqa]
    given: list[tuple[Callable[..., Row], tuple[str, ...], Any]] = [
        (paths, ("worker", "prefill", "chunk"), product(places, prefill_laws.WORKERS, GRAPHS, (7, 16))),
        (exact, ("worker", "prefill"), product(places, prefill_laws.WORKERS, GRAPHS)),
        (
            hidden,
            ("worker", "prefill", "chunk", "host_lag"),
            ((*both, *how) for both, how in product(workers, product(mm_laws.PREFILLS, (5,), (0, 1)))),
        ),
        (shipped, ("draft", "prefill"), product([device], DRAFTS, mm_laws.PREFILLS)),
    ]
    for scene, names, cases in given:
        for where, *how in cases:
            about = {"model": where.model, "backend": where.backend} if isinstance(where, Place) else {}
            row: Row = {"scene": scene.__name__} | about | dict(zip(names, how, strict=True))
            try:
                yield row | {"status": "pass"} | scene(where, *how)
            except AssertionError as error:
                yield row | {"status": "fail", "reason": str(error)}


def main() -> int:
    """Run every scene; 1 if some result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    found = []
    for row in rows(args.device):
        found.append(row)
        print(*row.values(), flush=True)
    command = ["python", "-m", "tests.gpu.prefill", "--json", str(args.json), "--device", args.device]
    results.write(args.json, results.head(command, args.device), found)
    return int(any(row["status"] == "fail" for row in found))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
