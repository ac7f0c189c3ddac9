"""Multimodal prompts on the shipped models and their trained drafts: real text, most of which is hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends_reference.eagle.requests import Request, RequestOptions
from attn_backends_reference.eagle.serving import Server
from attn_backends_reference.eagle.worker import SpeculativeWorker, TargetWorker
from spec_metadata import Capacity
from tests import eagle3_shipped, mtp_shipped
from tests.mtp_scenes import capacity_of
from tests.serving_scenes import CHAIN, TREE, check_nothing_kept, eagle_worker, heldout

PLACEHOLDER = 255
"""No text has this byte."""
BACKENDS = {"mla": "flashinfer_mla", "gqa": "fa3"}
DRAFTS = {"mla-chain": CHAIN, "gqa-chain": CHAIN, "gqa-tree": TREE, "gqa-eagle3": CHAIN, "mla-mtp": None}
NUM_TOKENS = 12


def texts(length: int) -> list[list[int]]:
    """Passages of the held-out files."""
    return [list(file[700 : 700 + length].encode()[:length]) for file in heldout()]


def worker_of(draft: str, longest: int, device: str = "cpu", **options: object) -> SpeculativeWorker:
    """A worker with trained drafts that takes embeddings. longest: of its texts."""
    model, longest, shape = draft[:3], longest + NUM_TOKENS + 8, DRAFTS[draft]
    given = {"make_graph": CudaGraph if device == "cuda" else RecordedGraph, "placeholder_token": PLACEHOLDER} | options
    given |= {"device": device, "checking": device == "cpu"}
    if shape is None:
        return mtp_shipped.shipped_worker(model, BACKENDS[model], capacity_of(3, 4, longest, 16), **given)
    capacity = Capacity(4, longest, 16, **shape)
    if draft == "gqa-eagle3":
        return eagle3_shipped.shipped_worker(BACKENDS[model], capacity, **given)
    return eagle_worker(model, BACKENDS[model], capacity, **given)


def serve_hidden(worker: TargetWorker, given: Sequence[Sequence[int]]) -> list[Request]:
    """Serve texts all of whose tokens but the first four and the last are hidden."""
    server, requests = Server(worker), list[Request]()
    for text in given:
        hidden = torch.tensor(text[4:-1], device=worker.device)
        prompt = [*text[:4], *[PLACEHOLDER] * len(hidden), text[-1]]
        embeddings = worker.target.embedding(hidden).detach()
        requests.append(server.submit(prompt, RequestOptions(NUM_TOKENS), embeddings))
    for _ in server.stream():
        pass
    check_nothing_kept(worker)
    return requests
