"""Runs of multi-layer MTP on tiny random models, watched cycle by cycle: what was drafted, what was verified in its
place, what was accepted.

Random modules are mostly rejected. So a `Chooser` may replace what they drafted by the target's own tokens down to some
depth: then cycles accept every length, different ones in one batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.cache import PagedCache
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.registry import get_backend
from attn_backends.runner import PhaseRunner
from attn_backends_reference.eagle.mtp import MtpWorker
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.requests import RequestOptions
from attn_backends_reference.models.decoder import DraftModel, PagedModel, TargetModel
from attn_backends_reference.models.interface import IMPLEMENTATION
from attn_backends_reference.models.mtp import MtpModule, module_config
from spec_metadata import CacheGeometry, Capacity, Sampling
from tests import reference_models as rm
from tests.mtp_oracle import Oracle
from tests.serving_scenes import PHASES, Arrival

MAX_STEPS = 4
Tokens = Sequence[int]


@dataclass(frozen=True)
class Place:
    """Where a scene runs. buckets: batch sizes to capture, none to run eagerly. checking: of the backend."""

    model: str
    backend: str
    page_size: int
    buckets: tuple[int, ...] = ()
    draft_graphs: str = "one"
    host_lag: int = 0
    device: str = "cpu"
    checking: bool = True

    def __str__(self) -> str:
        path = f"{self.draft_graphs}-graph" if self.buckets else "eager"
        return f"{self.model}-{self.backend}-{self.page_size}-{path}-lag{self.host_lag}"


@cache
def oracle_of(model: str, device: str = "cpu") -> Oracle:
    """A tiny random target with `MAX_STEPS` modules."""
    modules = [tiny_module(model, index).to(device) for index in range(MAX_STEPS)]
    return Oracle(rm.tiny_target(model).to(device), modules)


def tiny_module(model: str, index: int) -> MtpModule:
    """A random float32 module of the sizes of a tiny target."""
    dense = {"first_k_dense_replace": 2 + MAX_STEPS} if model == "mla" else {}
    config = module_config(rm.tiny_config(model, **dense), index)
    config._experts_implementation = "eager"
    module = MtpModule(config, "eager").eval()
    rm.randomize(module, seed=1 + index)
    return module.requires_grad_(False)


def served_module(module: MtpModule, target: TargetModel) -> DraftModel:
    """A copy of a module, attending through backends on capture-safe experts."""
    module = copy.deepcopy(module)
    module.config._experts_implementation = IMPLEMENTATION
    return DraftModel(module, target)


def capacity_of(num_steps: int, max_bs: int, max_context: int, page_size: int) -> Capacity:
    """For chains of num_steps drafts."""
    return Capacity(
        max_bs,
        max_context,
        page_size,
        topk=1,
        num_steps=num_steps,
        num_draft_tokens=num_steps + 1,
        num_rerun=num_steps - 1,
    )


def mtp_worker(place: Place, capacity: Capacity, num_modules: int = MAX_STEPS, **options: Any) -> MtpWorker:
    """A worker on copies of the oracle's models, whose caches hold NaN where nobody has written yet."""
    oracle = oracle_of(place.model, place.device)
    target = rm.served_target(place.model, oracle.target)
    modules = [served_module(module, target) for module in oracle.modules[:num_modules]]
    for model in (target, *modules):
        model.allocate_caches = poisoned(model)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    kind, kernel = get_backend(place.backend), "auto" if place.device == "cpu" else "torch"
    backend = kind(capacity, geometry, place.device, kernel=kernel, checking=place.checking)
    if place.buckets:
        graph = CudaGraph if place.device == "cuda" else RecordedGraph
        options |= {"buckets": place.buckets, "make_graph": graph, "draft_graphs": place.draft_graphs}
    backends = PhaseBackends(**dict.fromkeys(PHASES, backend))
    return MtpWorker(target, modules, backends, capacity, geometry, WorkerOptions(host_lag=place.host_lag, **options))


def poisoned(model: PagedModel) -> Callable[..., list[PagedCache]]:
    """A model's `allocate_caches`, with NaN in every page but the reserved one."""
    allocate = model.allocate_caches

    def allocated(backend: AttentionBackend, dtype: torch.dtype | None) -> list[PagedCache]:
        caches = allocate(backend, dtype)
        for cache_ in caches:
            for pages in cache_.pages:
                pages[torch.arange(pages.shape[0], device=pages.device) != backend.geometry.reserved_page] = float(
                    "nan"
                )
        return caches

    return allocated


@dataclass(frozen=True)
class Cycle:
    """A cycle of a request. committed: tokens before it. drafts: of the modules. verified: in their place. accepted:
    those of them that were, and the target's own token. bucket: of the verify's graph, 0 if it ran eagerly.
    """

    committed: int
    drafts: list[int]
    verified: list[int]
    accepted: list[int]
    bs: int
    bucket: int


@dataclass(eq=False)
class Watched:
    """A request as the worker saw it. prompt: the request's own list. text: prompt, the target's first token, and what
    cycles accepted.
    """

    prompt: Tokens
    text: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)

    def forget_from(self, committed: int) -> None:
        """Its last cycle failed behind the verify, and is tried again."""
        if self.cycles and self.cycles[-1].committed == committed:
            self.cycles.pop()
            del self.text[committed + 1 :]


Chooser = Callable[[Watched, list[int]], list[int]]


@contextmanager
def watch(worker: MtpWorker, choose: Chooser = lambda request, drafts: drafts) -> Iterator[list[Watched]]:
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
        requests, drafted = [by_row[row] for row in step.paging.rows.tolist()], inputs.tokens.tolist()
        chosen = list[list[int]]()
        for request, committed, (root, *drafts) in zip(requests, step.seq_lens.tolist(), drafted, strict=True):
            request.text = request.text or [*request.prompt, root]
            request.forget_from(committed)
            assert request.text[committed:] == [root], f"{committed} committed and root {root} after {request.text}"
            chosen.append([root, *choose(request, drafts)])
        result = run(runner, step, replace(inputs, tokens=torch.tensor(chosen, device=inputs.tokens.device)))
        accepted, bucket = result.value.tokens.tolist(), result.bucket.bs if result.bucket else 0
        for i, num in enumerate(result.value.num_accepted.tolist()):
            new, committed = accepted[i][:num], len(requests[i].text) - 1
            requests[i].cycles.append(Cycle(committed, drafted[i][1:], chosen[i][1:], new, step.bs, bucket))
            requests[i].text += new
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "prefill", watched_prefill)
        patch.setattr(PhaseRunner, "run", watched_run)
        yield seen


def accept_any_length(prompts: Sequence[Tokens], texts: Sequence[Tokens], seed: int = 0) -> Chooser:
    """By chance, a cycle accepts any length from 1 to K + 1, or of what the modules drafted as much as is right.

    texts: what plain decoding makes of the prompts, by K + 1 tokens longer than requests get.
    """
    texts_of = {tuple(prompt): [*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)}

    def choose(request: Watched, drafts: list[int]) -> list[int]:
        begin, num_steps = len(request.text), len(drafts)
        right = texts_of[tuple(request.prompt)][begin : begin + num_steps]
        rng = random.Random(f"{seed} {request.text}")
        num_right = rng.randint(0, num_steps + 1)
        if num_right > num_steps or len(right) < num_steps:
            return drafts
        wrong = [(token + rng.randint(1, rm.VOCAB - 1)) % rm.VOCAB for token in right]
        return right[:num_right] + wrong[num_right:]

    return choose


def random_tokens(length: int, seed: int) -> list[int]:
    """Of the tiny models' vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(rm.VOCAB) for _ in range(length)]


def steady(lens: Sequence[int], new_tokens: Sequence[int], joins: Sequence[int] = ()) -> list[Arrival]:
    """Greedy requests with prompts of these lengths that join in these rounds, by default all in the first."""
    rounds = joins or [0] * len(lens)
    both = zip(lens, new_tokens, rounds, strict=True)
    made = [
        Arrival(r, random_tokens(length, seed), RequestOptions(most)) for seed, (length, most, r) in enumerate(both)
    ]
    return sorted(made, key=lambda arrival: arrival.round)


def random_arrivals(num_requests: int, num_rounds: int, longest: int, new_tokens: int, seed: int = 0) -> list[Arrival]:
    """Requests that join and leave at random, two fifths of them sampled; half of the prompts begin like a recent one,
    up to any token.
    """
    rng, made = random.Random(seed), list[Arrival]()
    rounds = sorted(rng.randrange(num_rounds) for _ in range(num_requests))
    for number, joins in enumerate(rounds):
        other = rng.choice(made[-4:]).prompt if made and rng.random() < 0.5 else []
        own = random_tokens(rng.randint(1, rng.choice((4, longest))), seed=1000 * seed + number)
        prompt = [*other[: rng.randint(0, len(other))], *own][:longest]
        sampling = Sampling(0.8, 0.9, rng.choice((0, 20)), seed=number) if rng.random() < 0.4 else Sampling()
        options = RequestOptions(rng.randint(1, new_tokens), sampling)
        leaves = rng.randint(0, 6) if rng.random() < 0.1 else None
        made.append(Arrival(joins, prompt, options, leaves))
    return made
