"""The reference workers through a device's graphs: what they emit is plain decoding's, every draft a full recompute's.

float32 on the torch kernels, so that equal tokens can be asked for. Requests join and leave at random, chunks of
prompts end anywhere, the host reads in time or a cycle late. Prompts are prefilled eagerly, in pieces and in whole
graphs, as tokens and as embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from attn_backends.graphs import CudaGraph, RecordedGraph
from spec_metadata import Capacity
from tests import mm_laws, mtp_laws, prefill_laws
from tests.mtp_scenes import Place, random_arrivals
from tests.serving_laws import check_scene
from tests.serving_scenes import CHAIN, NEWLINE, TREE, arrivals, eagle_worker, endless

NUM_REQUESTS, NUM_ROUNDS, LONGEST, NEW_TOKENS = 60, 60, 96, 48
PAGED = (("mla", "flashinfer_mla", 16), ("mla", "trtllm_mla", 32), ("gqa", "fa3", 4))
BUCKETS = (1, 2, 4, 8)


def serving(place: tuple[str, str, int], draft: dict[str, int], host_lag: int, device: str) -> None:
    """A chain or a tree on real text: the tokens of plain decoding."""
    model, backend, page_size = place
    scene = arrivals(NUM_REQUESTS, NUM_ROUNDS, LONGEST, NEW_TOKENS)
    capacity = Capacity(16, LONGEST + NEW_TOKENS + 8, page_size, **draft)
    graphs = {"buckets": BUCKETS, "make_graph": CudaGraph if device == "cuda" else RecordedGraph}
    options = {"chunk": 32, "eos_tokens": (NEWLINE,), "host_lag": host_lag, "device": device, **graphs}
    worker = eagle_worker(model, backend, capacity, checking=False, **options)
    check_scene(worker, scene, endless(model, scene, NEW_TOKENS, device))


def mtp(place: tuple[str, str, int], draft_graphs: str, host_lag: int, device: str) -> None:
    """Several MTP modules: every draft is that of a full recompute of all of them."""
    scene = random_arrivals(40, 20, 40, 24, seed=1)
    where = Place(*place, BUCKETS, draft_graphs, host_lag, device, checking=False)
    mtp_laws.check_scene(where, 4 - host_lag, scene, max_bs=10, chunk=7)


def rows(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A row of each law in its places."""
    torch.set_grad_enabled(False)
    for about, law in laws(device):
        try:
            law()
        except AssertionError as error:
            yield about | {"status": "fail", "reason": str(error)}
        else:
            yield about | {"status": "pass"}


def laws(device: str) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """Every law that is asked for, and of what."""
    for place, (name, draft), lag in product(PAGED, {"chain": CHAIN, "tree": TREE}.items(), (0, 1)):
        about = {"law": "serving", "backend": place[1], "draft": name, "host_lag": lag}
        yield about, partial(serving, place, draft, lag, device)
    for place, graphs, lag in product(PAGED, ("one", "per_module"), (0, 1)):
        about = {"law": "mtp", "backend": place[1], "draft_graphs": graphs, "host_lag": lag}
        yield about, partial(mtp, place, graphs, lag, device)
    for place, graphs in product(PAGED, ("one", "per_module")):
        about = {"law": "mtp batches", "backend": place[1], "draft_graphs": graphs}
        yield about, partial(mtp_laws.check_batches, *place, graphs, device)
    for at, worker, graphs in product(PAGED, prefill_laws.WORKERS, ("piecewise", "full")):
        place = Place(*at, checking=False, device=device)
        about = {"law": "prefill", "backend": place.backend, "worker": worker, "graphs": graphs}
        yield about, partial(prefill_laws.check_paths, worker, place, 7, graphs=graphs)
        exact = {"piecewise": prefill_laws.check_exact, "full": prefill_laws.check_full_exact}[graphs]
        yield about | {"law": "exact prefill"}, partial(exact, worker, place)
    for at, worker, prefill, lag in product(PAGED, mm_laws.WORKERS, mm_laws.PREFILLS, (0, 1)):
        place = replace(Place(*at, checking=False, device=device), buckets=(1, 2, 4))
        if worker != "eagle3" or place.model == "gqa":
            about = {
                "law": "embeddings",
                "backend": place.backend,
                "worker": worker,
                "prefill": prefill,
                "host_lag": lag,
            }
            yield about, partial(mm_laws.check_hidden, worker, prefill, 5, place, lag)
