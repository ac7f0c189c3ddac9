"""The reference workers through a device's graphs: what they emit is plain decoding's, every draft a full recompute's.

float32 on the torch kernels, so that equal tokens can be asked for (`tests/device_laws.py`). Requests join and leave at
random, chunks of prompts end anywhere, the host reads in time or a cycle late. Prompts are
prefilled eagerly, in pieces and in whole graphs, as tokens and as embeddings. `drafts` has the other ways to draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from tests import device_laws, mm_laws, mtp_laws, prefill_laws
from tests.mtp_scenes import Place
from tests.serving_scenes import CHAIN, TREE

Law = tuple[dict[str, Any], Callable[[], object]]
"""What a row is of, and what raises if it does not hold."""
PAGED = (("mla", "flashinfer_mla", 16), ("mla", "trtllm_mla", 32), ("gqa", "fa3", 4))
SHAPES = {"chain": CHAIN, "tree": TREE}


def rows(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A row of each law in its places."""
    return judged(laws(device))


def judged(laws: Iterable[Law]) -> Iterator[dict[str, Any]]:
    """A row of each law. One that can't be run does not hide the others."""
    torch.set_grad_enabled(False)
    for about, law in laws:
        try:
            law()
        except Exception as error:
            yield about | {"status": "fail", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
        else:
            yield about | {"status": "pass"}


def laws(device: str) -> Iterator[Law]:
    """Every law that is asked for, and of what."""
    for place, (name, draft), lag in product(PAGED, SHAPES.items(), (0, 1)):
        about = {"law": "serving", "backend": place[1], "draft": name, "host_lag": lag}
        yield about, partial(device_laws.check_serving, place, draft, lag, device)
    for place, graphs, lag in product(PAGED, ("one", "per_module"), (0, 1)):
        about = {"law": "mtp", "backend": place[1], "draft_graphs": graphs, "host_lag": lag}
        yield about, partial(device_laws.check_mtp, place, graphs, lag, device)
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
            about = {"law": "embeddings", "backend": place.backend, "worker": worker}
            about |= {"prefill": prefill, "host_lag": lag}
            yield about, partial(mm_laws.check_hidden, worker, prefill, 5, place, lag)
