"""What multimodal prompts promise, each as a function that raises if it does not hold; for the tests and the mutants.

Some tokens of a text are hidden: the prompt has placeholders in their places and comes with their embeddings, from the
target's own table. Nothing may tell such a prompt from the text itself: every result of every step is the same to the
bit, every token, every page that is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.registry import get_backend
from attn_backends.runner import Runner, StepResult
from attn_backends_reference.eagle.mtp_phases import Window
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.prefill_phases import DRAFT_PREFILL
from attn_backends_reference.eagle.requests import Request, RequestOptions
from attn_backends_reference.eagle.serving import Server
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker, TargetWorker
from spec_metadata import CacheGeometry, Capacity, Step
from tests import eagle3_scenes
from tests import reference_models as rm
from tests.mtp_scenes import Place, capacity_of, mtp_worker, oracle_of, poisoned, random_tokens
from tests.serving_scenes import PHASES, check_nothing_kept

PLACEHOLDER = rm.VOCAB - 1
"""Of the tiny models; no text has it."""
PREFILLS: dict[str, dict[str, Any]] = {
    "eager": {},
    "piecewise": {"prefill_buckets": (8, 32)},
    "full": {"prefill_buckets": (8, 32), "prefill_graphs": "full"},
}
PLACE = Place("gqa", "fa3", 4, (1, 4))
MAX_BS, MAX_CONTEXT = 4, 48


def eagle_worker(place: Place, shape: tuple[int, int, int], **options: Any) -> EagleWorker:
    """EAGLE on tiny random models. shape: topk, num_steps and num_draft_tokens."""
    capacity = Capacity(MAX_BS, MAX_CONTEXT, place.page_size, *shape)
    target = rm.served_target(place.model, oracle_of(place.model, place.device).target)
    draft = rm.served_draft(rm.tiny_draft(place.model).to(place.device), target)
    for model in (target, draft):
        model.allocate_caches = poisoned(model)
    return EagleWorker(
        target, draft, *backends_of(place, capacity), WorkerOptions(place.buckets, host_lag=place.host_lag, **options)
    )


def plain_worker(place: Place, **options: Any) -> PlainWorker:
    """Plain decoding of a tiny random target."""
    capacity = Capacity(MAX_BS, MAX_CONTEXT, place.page_size)
    target = rm.served_target(place.model, oracle_of(place.model, place.device).target)
    return PlainWorker(
        target, *backends_of(place, capacity), WorkerOptions(place.buckets, host_lag=place.host_lag, **options)
    )


def eagle3_worker(place: Place, **options: Any) -> EagleWorker:
    """EAGLE-3 on a tiny random target."""
    there = eagle3_scenes.Place(place.backend, place.page_size, place.buckets, place.host_lag, place.device)
    return eagle3_scenes.workers(there, Capacity(MAX_BS, MAX_CONTEXT, place.page_size, 2, 3, 6), **options)[0]


def modules_worker(place: Place, **options: Any) -> TargetWorker:
    """Multi-layer MTP with four modules, so that windows reach three tokens back."""
    return mtp_worker(place, capacity_of(4, MAX_BS, MAX_CONTEXT, place.page_size), **options)


WORKERS: dict[str, Callable[..., TargetWorker]] = {
    "plain": plain_worker,
    "chain": lambda place, **options: eagle_worker(place, (1, 3, 4), **options),
    "tree": lambda place, **options: eagle_worker(place, (2, 2, 4), **options),
    "eagle3": eagle3_worker,
    "mtp": modules_worker,
}


def backends_of(place: Place, capacity: Capacity) -> tuple[PhaseBackends, Capacity, CacheGeometry]:
    """What a worker is built of beside its models and options."""
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    backend = get_backend(place.backend)(capacity, geometry, place.device, kernel="torch", checking=place.checking)
    return PhaseBackends(**dict.fromkeys(PHASES, backend)), capacity, geometry


@dataclass(frozen=True)
class Text:
    """A text of a scene. hidden: positions whose tokens prompts may have embeddings for. joins: round of submission."""

    tokens: list[int]
    hidden: frozenset[int]
    joins: int
    max_new_tokens: int = 6

    def changed(self, position: int, **changes: Any) -> Text:
        """Another token at a position, so that both prompts have the same ids if it is hidden."""
        tokens = list(self.tokens)
        tokens[position] = (tokens[position] + 1) % PLACEHOLDER
        return replace(self, tokens=tokens, **changes)


def text(length: int, hidden: Sequence[int], joins: int, max_new_tokens: int = 6, seed: int = 0) -> Text:
    """A random text without placeholders."""
    tokens = [token % PLACEHOLDER for token in random_tokens(length, seed)]
    return Text(tokens, frozenset(hidden), joins, max_new_tokens)


def scene() -> list[Text]:
    """Texts that begin alike, or only look alike; hidden at edges of pages and chunks, at both ends, or wholly.

    The short text at the end gets the row of another that had embeddings at its positions.
    """
    base = text(26, (2, 3, 4, 5, 7, *range(11, 17), 20), 0, 12)
    like = replace(base, tokens=[*base.tokens[:22], *random_tokens(3, 9)], joins=2)
    others = [base.changed(place, joins=4 + place // 8, max_new_tokens=5) for place in (3, 12, 20)]
    ends = [text(9, (0, 5, 6, 7, 8), 1, 9, seed=1), text(1, (0,), 6, 3, seed=2), text(2, (), 7, seed=3)]
    alone = [text(4, (1, 2, 3), 30, 2, seed=4), text(1, (), 35, seed=5)]
    return sorted([base, like, *others, *ends, *alone], key=lambda given: given.joins)


def prompt_of(worker: TargetWorker, given: Text, placeholder: int = PLACEHOLDER) -> tuple[list[int], Tensor | None]:
    """A text with its tokens hidden: the prompt, and the embeddings that it comes with."""
    places = sorted(given.hidden)
    prompt = [placeholder if place in given.hidden else token for place, token in enumerate(given.tokens)]
    tokens = torch.tensor([given.tokens[place] for place in places], dtype=torch.int64, device=worker.device)
    return prompt, worker.target.embedding(tokens) if places else None


@dataclass(frozen=True, eq=False)
class Ran:
    """A step: its phase, and what of it must not depend on how prompts are given."""

    phase: str
    values: dict[str, Tensor]

    @classmethod
    def of(cls, phase: str, inputs: Any, result: StepResult) -> Ran:
        """Of a verify, drafts too. Windows hold ids of prompts, and so do roots of chunks that end none."""
        skipped = {"tokens", "kept_embeddings", "is_kept"} if isinstance(result.value, Window) else set[str]()
        skipped |= {"root"} if phase == DRAFT_PREFILL else set()
        names = {field.name for field in fields(result.value)} - skipped
        drafts = {"drafts": inputs.tokens.clone()} if phase == "verify" else {}
        return cls(phase, {name: getattr(result.value, name) for name in sorted(names)} | drafts)


@contextmanager
def watched() -> Iterator[list[Ran]]:
    """Yields the steps that run while it lasts."""
    seen, run = list[Ran](), Runner.run

    def noted(runner: Runner, step: Step, inputs: Any) -> StepResult:
        result = run(runner, step, inputs)
        seen.append(Ran.of(runner.phase.name, inputs, result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", noted)
        yield seen


@torch.no_grad()
def play(worker: TargetWorker, texts: Sequence[Text]) -> tuple[list[Request], list[Ran]]:
    """Serve texts, hidden if the worker takes embeddings; returns requests and steps."""
    server, requests, waiting, turn = Server(worker), list[Request](), list(texts), 0
    with watched() as seen:
        while waiting or not server.is_idle:
            while waiting and waiting[0].joins <= turn:
                given = waiting.pop(0)
                prompt, embeddings = (given.tokens, None) if worker.embedding_form is None else prompt_of(worker, given)
                requests.append(server.submit(prompt, RequestOptions(given.max_new_tokens), embeddings))
            server.round()
            turn += 1
    check_nothing_kept(worker)
    return requests, seen


def make(worker: str, place: Place, prefill: str, **options: Any) -> TargetWorker:
    """A worker that prefills so."""
    graph = CudaGraph if place.device == "cuda" else RecordedGraph
    return WORKERS[worker](place, **{"make_graph": graph}, **PREFILLS[prefill], **options)


def check_hidden(
    worker: str = "mtp", prefill: str = "piecewise", chunk: int = 5, place: Place = PLACE, lag: int = 0
) -> list[Request]:
    """Every step of prompts with hidden tokens gives what it gives of the texts, and they share the same pages."""
    place = replace(place, host_lag=lag)
    expected, steps = play(make(worker, place, prefill, chunk=chunk), scene())
    found, ran = play(make(worker, place, prefill, chunk=chunk, placeholder_token=PLACEHOLDER), scene())
    for one, other in zip(found, expected, strict=True):
        shared = one.statistics.num_shared_tokens, other.statistics.num_shared_tokens
        assert shared[0] == shared[1], f"request {one.number} shares {shared[0]} tokens, its text {shared[1]}"
    for number, (mine, theirs) in enumerate(zip(ran, steps, strict=True)):
        assert mine.phase == theirs.phase
        for name, value in theirs.values.items():
            same = torch.equal(mine.values[name].nan_to_num(), value.nan_to_num())
            assert same, f"step {number}, {mine.phase}: {name} is not what the text gives"
    for one, other in zip(found, expected, strict=True):
        assert one.output == other.output, f"request {one.number} emits something else"
        assert one.embeddings is None, f"request {one.number} holds its embeddings"
    return found


def check_graphs(place: Place = PLACE) -> None:
    """As `check_hidden`, target and draft through graphs, in pieces and whole."""
    for prefill in ("piecewise", "full"):
        check_hidden("chain", prefill, 5, place)


def check_modules(place: Place = PLACE) -> None:
    """As `check_hidden`, with modules that reach further."""
    check_hidden("mtp", "eager", 5, place)


def check_sharing(place: Place = PLACE) -> None:
    """Prompts of the same ids share pages exactly as far as their embeddings are the same, and emit their own texts."""
    requests = check_hidden("chain", "eager", 26, place)
    assert any(request.statistics.num_shared_tokens for request in requests)
