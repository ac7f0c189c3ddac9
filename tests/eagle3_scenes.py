"""Runs of EAGLE-3 on a tiny random target, watched cycle by cycle: what was drafted and what was accepted.

A random draft is mostly rejected. So some of what it drafted is replaced by the target's own tokens along a path of the
tree: then cycles accept every length, different ones in one batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.registry import get_backend
from attn_backends.runner import PhaseRunner
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from spec_metadata import CacheGeometry, Capacity
from tests.eagle3_models import served
from tests.mtp_scenes import poisoned
from tests.serving_scenes import PHASES

Tokens = Sequence[int]


@dataclass(frozen=True)
class Place:
    """Where a scene runs. buckets: batch sizes to capture, none to run eagerly."""

    backend: str = "fa3"
    page_size: int = 4
    buckets: tuple[int, ...] = ()
    host_lag: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.backend}-{self.page_size}-{'graph' if self.buckets else 'eager'}-lag{self.host_lag}"


def workers(place: Place, capacity: Capacity, **options: Any) -> tuple[EagleWorker, PlainWorker]:
    """Workers on copies of the oracle's models, whose caches hold NaN where nobody has written yet."""
    target, draft = served(place.device)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    backend = get_backend(place.backend)(capacity, geometry, place.device, kernel="torch", checking=True)
    backends = PhaseBackends(**dict.fromkeys(PHASES, backend))
    plain = PlainWorker(target, backends, capacity, geometry)
    for model in (target, draft):
        model.allocate_caches = poisoned(model)
    if place.buckets:
        options |= {"buckets": place.buckets, "make_graph": CudaGraph if place.device == "cuda" else RecordedGraph}
    drafting = EagleWorker(
        target, draft, backends, capacity, geometry, WorkerOptions(host_lag=place.host_lag, **options)
    )
    return drafting, plain


@dataclass(frozen=True)
class Cycle:
    """A cycle of a request. committed: tokens before it. paths: of drafted nodes, what follows the root down to each.
    accepted: drafts that were, and the target's own token. bucket: of the verify's graph, 0 if it ran eagerly.
    """

    committed: int
    paths: list[list[int]]
    accepted: list[int]
    bs: int
    bucket: int


@dataclass(eq=False)
class Watched:
    """A request as the worker saw it. text: prompt, the target's first token, and what cycles accepted."""

    prompt: Tokens
    text: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)

    def forget_from(self, committed: int) -> None:
        """Its last cycle failed behind the verify, and is tried again."""
        if self.cycles and self.cycles[-1].committed == committed:
            self.cycles.pop()
            del self.text[committed + 1 :]


Chooser = Callable[[Watched, list[int], list[int]], list[int]]


@contextmanager
def watch(worker: EagleWorker, choose: Chooser = lambda request, tokens, parents: tokens) -> Iterator[list[Watched]]:
    """Yields the requests that a worker serves while it lasts. choose: what is verified in place of drafts."""
    seen, by_row, run, prefill = list[Watched](), dict[int, Watched](), PhaseRunner.run, worker.prefill

    def watched_prefill(chunks):
        for chunk in chunks:
            if chunk.row not in by_row or by_row[chunk.row].prompt is not chunk.prompt:
                by_row[chunk.row] = Watched(chunk.prompt)
                seen.append(by_row[chunk.row])
        return prefill(chunks)

    def watched_run(runner, step, inputs):
        if runner.phase.name != "verify":
            return run(runner, step, inputs)
        requests, lens = [by_row[row] for row in step.paging.rows.tolist()], step.seq_lens.tolist()
        drafted, parents = inputs.tokens.tolist(), inputs.parents.tolist()
        for request, committed, (root, *_) in zip(requests, lens, drafted, strict=True):
            request.text = request.text or [*request.prompt, root]
            request.forget_from(committed)
            assert request.text[committed:] == [root], f"{committed} committed and root {root} after {request.text}"
        chosen = [choose(*given) for given in zip(requests, drafted, parents, strict=True)]
        result = run(runner, step, replace(inputs, tokens=torch.tensor(chosen, device=inputs.tokens.device)))
        accepted, bucket = result.value.tokens.tolist(), result.bucket.bs if result.bucket else 0
        for i, num in enumerate(result.value.num_accepted.tolist()):
            paths = paths_of(drafted[i], parents[i])
            requests[i].cycles.append(Cycle(lens[i], paths, accepted[i][:num], step.bs, bucket))
            requests[i].text += accepted[i][:num]
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "prefill", watched_prefill)
        patch.setattr(PhaseRunner, "run", watched_run)
        yield seen


def paths_of(tokens: Tokens, parents: Sequence[int]) -> list[list[int]]:
    """Of every node but the root, the tokens from its ancestor below the root to itself."""
    paths: list[list[int]] = [[]]
    for token, parent in list(zip(tokens, parents, strict=True))[1:]:
        paths.append([*paths[parent], token])
    return paths[1:]


def accept_any_length(prompts: Sequence[Tokens], texts: Sequence[Tokens], seed: int = 0) -> Chooser:
    """Put the target's own tokens down a path of the tree, any number of them.

    texts: what plain decoding makes of the prompts, longer than requests get.
    """
    texts_of = {tuple(prompt): [*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)}

    def choose(request: Watched, tokens: list[int], parents: list[int]) -> list[int]:
        rng, tokens, node = random.Random(f"{seed} {request.text}"), list(tokens), 0
        right = texts_of[tuple(request.prompt)][len(request.text) :]
        for token in right[: rng.randint(0, 4)]:
            children = [child for child in range(1, len(tokens)) if parents[child] == node]
            if not children:
                break
            node = next((child for child in children if tokens[child] == token), rng.choice(children))
            tokens[node] = token
        return tokens

    return choose
