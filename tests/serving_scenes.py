"""Runs of the reference workers on the shipped models, for tests: which models, prompts, engines and requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from attn_backends.memory.static_memory import StaticMemory
from attn_backends.registry import get_backend
from attn_backends.runner import Runner
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.requests import Completion, Request, RequestOptions
from attn_backends_reference.eagle.serving import Server, serve
from attn_backends_reference.eagle.slots import SlotAllocator
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import DraftModel, TargetModel, load_draft, load_target, load_tokenizer
from spec_metadata import CacheGeometry, Capacity, Sampling, Step, StepKind
from tests import head_formats
from tests import reference_models as rm
from tests.head_catalogue import FORMATS

CHAIN = {"topk": 1, "num_steps": 3, "num_draft_tokens": 4}
TREE = {"topk": 4, "num_steps": 3, "num_draft_tokens": 16}
PHASES = ("prefill", "decode", "draft", "verify", "draft_extend")
NEWLINE = 10


@cache
def models(name: str, device: str = "cpu") -> tuple[TargetModel, DraftModel]:
    """A shipped target and its draft, float32; or "gpt_oss", a random target of bytes with sinks and windows, and a
    random EAGLE-3 head.
    """
    if name != "gpt_oss":
        target = load_target(name, torch.float32, torch.device(device))
        return target, load_draft(name, target)
    target = rm.served_target(name, rm.tiny_target(name, num_hidden_layers=4, vocab_size=256).to(device))
    published = FORMATS["SpecForge, gpt-oss"]
    of_bytes = replace(published, config={**published.config, "vocab_size": 256}, sizes={"V": 256})
    with TemporaryDirectory() as folder:
        head_formats.write(of_bytes, Path(folder))
        return target, load_draft(folder, target)


@cache
def heldout() -> list[str]:
    """The held-out files."""
    files = sorted(
        resources.files("attn_backends_reference.models").joinpath("heldout").iterdir(), key=lambda path: path.name
    )
    return [path.read_text(encoding="utf-8") for path in files if path.name.endswith(".py.txt")]


@cache
def prompts(count: int, longest: int) -> list[list[int]]:
    """Beginnings of passages of the held-out files, of 1 to `longest` bytes."""
    tokenizer, texts = load_tokenizer("gqa", 256), heldout()
    found = []
    for i in range(count):
        text, start = texts[i % len(texts)], 997 * i % 9000
        length = 1 + (i * 7919) % (longest - 1)
        found.append(tokenizer.encode(text[start : start + length])[:longest])
    return found


def engine_parts(
    model: str,
    backend: str | dict[str, str],
    capacity: Capacity,
    *,
    checking: bool = True,
    num_pages: int | None = None,
    device: str = "cpu",
) -> tuple[TargetModel, DraftModel, PhaseBackends, CacheGeometry]:
    """Models and one backend per phase, on a cache that holds every request at its longest, or has num_pages."""
    target, draft = models(model, device)
    geometry = CacheGeometry(num_pages or 1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    names = dict.fromkeys(PHASES, backend) if isinstance(backend, str) else backend
    kernel = "auto" if device == "cpu" else "torch"
    memory = StaticMemory()
    made = {
        name: get_backend(name)(capacity, geometry, device, kernel=kernel, memory=memory, checking=checking)
        for name in set(names.values())
    }
    return target, draft, PhaseBackends(**{phase: made[name] for phase, name in names.items()}), geometry


def plain_worker(
    model: str, backend: str, capacity: Capacity, *, checking: bool = True, device: str = "cpu", **options: object
) -> PlainWorker:
    """A worker that decodes plainly."""
    target, _, backends, geometry = engine_parts(model, backend, capacity, checking=checking, device=device)
    return PlainWorker(target, backends, capacity, geometry, WorkerOptions(**options))


def eagle_worker(
    model: str,
    backend: str | dict[str, str],
    capacity: Capacity,
    *,
    checking: bool = True,
    num_pages: int | None = None,
    device: str = "cpu",
    **options: object,
) -> EagleWorker:
    """A worker that drafts."""
    parts = engine_parts(model, backend, capacity, checking=checking, num_pages=num_pages, device=device)
    target, draft, backends, geometry = parts
    return EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(**options))


def plain(model: str, backend: str, capacity: Capacity, given: list[list[int]], new_tokens: int, **options: object):
    """Plain greedy decoding; returns completions and worker."""
    worker = plain_worker(model, backend, capacity, **options)
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
    worker = eagle_worker(model, backend, capacity, checking=checking, **options)
    completions = serve(worker, given, new_tokens)
    check_nothing_kept(worker)
    return completions, worker


def check_nothing_kept(worker: EagleWorker) -> None:
    """No request left anything behind: rows, pages, or writes beside a buffer."""
    for phase in PHASES:
        getattr(worker.backends, phase).phases.check()
    assert not worker.slots.in_use, "a request kept its row or pages"


def tokens(completions: list[Completion]) -> list[list[int]]:
    """What was emitted."""
    return [completion.tokens for completion in completions]


GRAPH = {"buckets": (1, 2), "make_graph": RecordedGraph}
EAGER: dict[str, object] = {}


@dataclass(frozen=True)
class Arrival:
    """A request of a scene that changes by the round. leaves: rounds after which it is cancelled, if ever."""

    round: int
    prompt: list[int]
    options: RequestOptions
    leaves: int | None = None


def arrivals(num_requests: int, num_rounds: int, longest: int, new_tokens: int, seed: int = 0) -> list[Arrival]:
    """Requests that join and leave at random: prompts that begin alike, of 2 to `longest` tokens, ends of every kind.

    Three waves bring many at once, the rest trickles in, so that the batch grows, shrinks and is empty for a while.
    """
    rng, texts = random.Random(seed), heldout()
    beginnings = [text[500 * i : 500 * i + longest - 25] for i, text in enumerate(texts[:4])]
    waves = [rng.randrange(num_rounds // 2) for _ in range(3)]
    made = []
    for number in range(num_requests):
        beginning = rng.choice(beginnings)[: rng.choice((0, 33, longest))]
        start, length = rng.randrange(5000), rng.randint(1, 24)
        prompt = [0, *(beginning + rng.choice(texts)[start : start + length]).encode()][:longest]
        sampling = Sampling(0.7, 0.9, rng.choice((0, 20)), seed=number) if rng.random() < 0.4 else Sampling()
        stop = ("self", ":\n", "in", "s.") if rng.random() < 0.2 else ()
        joins = rng.choice(waves) if rng.random() < 0.7 else rng.randrange(num_rounds - num_rounds // 6)
        most = rng.randint(3 * new_tokens // 4 if joins in waves else 1, new_tokens)
        options = RequestOptions(most, sampling, stop, ignore_eos=joins in waves or rng.random() < 0.3)
        made.append(Arrival(joins, prompt, options, rng.randint(0, 8) if rng.random() < 0.1 else None))
    return sorted(made, key=lambda arrival: arrival.round)


def play(server: Server, scene: Sequence[Arrival]) -> tuple[list[Request], list[int]]:
    """Serve a scene to its end; returns its requests and the batch size of each round."""
    waiting, requests, sizes = list(scene), list[Request](), list[int]()
    emitted: dict[Request, list[int]] = {}
    while waiting or not server.is_idle:
        while waiting and waiting[0].round <= len(sizes):
            arrival = waiting.pop(0)
            requests.append(server.submit(arrival.prompt, arrival.options))
        for request, arrival in zip(requests, scene, strict=False):
            if arrival.leaves == len(sizes) - arrival.round and request.finish is None:
                server.cancel(request)
        for request, new in server.round():
            assert new, "an entry of the stream without tokens"
            emitted.setdefault(request, []).extend(new)
        sizes.append(sum(request.row >= 0 for request in requests))
    assert [emitted.get(request, []) for request in requests] == [request.output for request in requests]
    return requests, sizes


def endless(model: str, scene: Sequence[Arrival], new_tokens: int, device: str = "cpu") -> list[list[int]]:
    """What plain decoding makes of the prompts of a scene, new_tokens each."""
    longest = max(len(arrival.prompt) for arrival in scene)
    worker = plain_worker(model, "fa3", Capacity(24, longest + new_tokens, 32), checking=False, device=device)
    prompts, sampling = [arrival.prompt for arrival in scene], [arrival.options.sampling for arrival in scene]
    return tokens(serve(worker, prompts, new_tokens, sampling=sampling))


def ends(tokens: Sequence[int], arrival: Arrival, eos_token: int) -> list[int]:
    """What a request emits of endless text: up to the end-of-text token, the stop string or its length."""
    text = bytes(tokens).decode("latin-1")
    options, cuts = arrival.options, [arrival.options.max_new_tokens]
    if not options.ignore_eos and eos_token in tokens:
        cuts.append(tokens.index(eos_token) + 1)
    cuts += [text.index(stop) + len(stop) for stop in options.stop if stop in text]
    return list(tokens[: min(cuts)])


def holders(slots: SlotAllocator) -> Counter[int]:
    """The number of rows of the table that point into each page, the reserved one left out."""
    pages = slots.table // slots.geometry.page_size
    counts = Counter(page for row in pages.tolist() for page in set(row))
    del counts[slots.geometry.reserved_page]
    return counts


@contextmanager
def shared_pages_are_read_only(slots: SlotAllocator) -> Iterator[list[int]]:
    """While it lasts, refuses steps that write to a page that several rows hold. Yields how many rows hold a page, the
    most for each request of each step.
    """
    met: list[int] = []
    run = Runner.run

    def check(runner: Runner, step: Step, inputs: object) -> object:
        if step.kind is not StepKind.IDLE:
            pages = {slot // slots.geometry.page_size for slot in step.flat_slots().tolist()}
            held = holders(slots)
            counts = [held[page] for page in pages]
            assert set(counts) == {1}, f"a {step.kind} step writes to pages that {counts} rows hold"
            met.extend(max((held[page] for page in slots.pages(row)), default=0) for row in step.paging.rows.tolist())
        return run(runner, step, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", check)
        yield met


@contextmanager
def failing_steps() -> Iterator[Counter[str]]:
    """While it lasts, every third step of each phase fails once it has run, and a round is tried again until it does
    not. Yields how often each phase has failed.
    """
    ran, failed, run, one_round = Counter[str](), Counter[str](), Runner.run, Server.round

    def failing(runner, step, inputs):
        result, name = run(runner, step, inputs), runner.phase.name
        ran[name] += 1
        if ran[name] % 3 == 0:
            failed[name] += 1
            raise torch.OutOfMemoryError("no memory")
        return result

    def stubborn(server):
        while True:
            with suppress(torch.OutOfMemoryError):
                return one_round(server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", failing)
        patch.setattr(Server, "round", stubborn)
        yield failed
