"""Runs of the reference workers on the shipped models, for tests: which models, prompts and engines."""

from __future__ import annotations

from functools import cache
from importlib import resources

import torch

from attn_backends.eagle.serving import Completion, serve
from attn_backends.eagle.worker import EagleWorker, PhaseBackends, PlainWorker, WorkerOptions
from attn_backends.graphs import RecordedGraph
from attn_backends.models import DraftModel, TargetModel, load_draft, load_target, load_tokenizer
from attn_backends.registry import get_backend
from spec_metadata import CacheGeometry, Capacity

CHAIN = {"topk": 1, "num_steps": 3, "num_draft_tokens": 4}
TREE = {"topk": 4, "num_steps": 3, "num_draft_tokens": 16}
PHASES = ("prefill", "decode", "draft", "verify", "draft_extend")


@cache
def models(name: str) -> tuple[TargetModel, DraftModel]:
    """A shipped target and its draft, float32."""
    target = load_target(name, torch.float32)
    return target, load_draft(name, target)


@cache
def prompts(count: int, longest: int) -> list[list[int]]:
    """Beginnings of passages of the held-out files, of 1 to `longest` bytes."""
    tokenizer = load_tokenizer("gqa", 256)
    files = sorted(resources.files("attn_backends.models").joinpath("heldout").iterdir(), key=lambda path: path.name)
    texts = [path.read_text(encoding="utf-8") for path in files if path.name.endswith(".py.txt")]
    found = []
    for i in range(count):
        text, start = texts[i % len(texts)], 997 * i % 9000
        length = 1 + (i * 7919) % (longest - 1)
        found.append(tokenizer.encode(text[start : start + length])[:longest])
    return found


def engine_parts(
    model: str, backend: str | dict[str, str], capacity: Capacity, *, checking: bool = True
) -> tuple[TargetModel, DraftModel, PhaseBackends, CacheGeometry]:
    """Models and one backend per phase, on a cache that holds every request at its longest."""
    target, draft = models(model)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    names = dict.fromkeys(PHASES, backend) if isinstance(backend, str) else backend
    made = {name: get_backend(name)(capacity, geometry, checking=checking) for name in set(names.values())}
    return target, draft, PhaseBackends(**{phase: made[name] for phase, name in names.items()}), geometry


def plain(model: str, backend: str, capacity: Capacity, given: list[list[int]], new_tokens: int, **options: object):
    """Plain greedy decoding; returns completions and worker."""
    target, _, backends, geometry = engine_parts(model, backend, capacity)
    worker = PlainWorker(target, backends, capacity, geometry, WorkerOptions(**options))
    return serve(worker, given, new_tokens), worker


def eagle(
    model: str,
    backend: str | dict[str, str],
    capacity: Capacity,
    given: list[list[int]],
    new_tokens: int,
    *,
    checking: bool = True,
    **options: object,
) -> tuple[list[Completion], EagleWorker]:
    """EAGLE decoding; returns completions and worker."""
    target, draft, backends, geometry = engine_parts(model, backend, capacity, checking=checking)
    worker = EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(**options))
    completions = serve(worker, given, new_tokens)
    for phase in PHASES:
        getattr(backends, phase).check_buffers()
    assert worker.slots.num_free_rows == capacity.max_bs, "a request kept its row"
    assert worker.slots.num_free_pages == geometry.num_pages - 1, "a request kept pages"
    return completions, worker


def tokens(completions: list[Completion]) -> list[list[int]]:
    """What was emitted."""
    return [completion.tokens for completion in completions]


GRAPH = {"buckets": (1, 2), "make_graph": RecordedGraph}
EAGER: dict[str, object] = {}
