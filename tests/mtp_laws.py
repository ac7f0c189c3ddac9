"""What multi-layer MTP promises, each as a function that raises if it does not hold; for the tests and the mutants."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from attn_backends.errors import UnsupportedStepError
from attn_backends.registry import get_backend
from attn_backends_reference.eagle.options import PhaseBackends
from attn_backends_reference.eagle.requests import FinishReason, Request, RequestOptions
from attn_backends_reference.eagle.serving import Server, serve
from attn_backends_reference.eagle.worker import PlainWorker
from spec_metadata import CacheGeometry, Capacity, InvalidStepError, Sampling
from tests import reference_models as rm
from tests.mtp_oracle import NEAR, Oracle
from tests.mtp_scenes import (
    Place,
    Watched,
    accept_any_length,
    capacity_of,
    mtp_worker,
    oracle_of,
    random_arrivals,
    random_tokens,
    steady,
    watch,
)
from tests.serving_scenes import PHASES, Arrival, check_nothing_kept, failing_steps, play, tokens

SHARED = Place("mla", "flashinfer_mla", 4)


@cache
def plain(
    model: str, device: str, given: tuple[tuple[tuple[int, ...], Sampling], ...], num_tokens: int
) -> list[list[int]]:
    """What plain decoding makes of prompts that sample so, num_tokens each."""
    prompts, sampling = [list(prompt) for prompt, _ in given], [record for _, record in given]
    target = rm.served_target(model, oracle_of(model, device).target)
    capacity = Capacity(8, max(map(len, prompts)) + num_tokens, 16)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    backends = PhaseBackends(**dict.fromkeys(PHASES, get_backend("fa3")(capacity, geometry, device, kernel="torch")))
    return tokens(serve(PlainWorker(target, backends, capacity, geometry), prompts, num_tokens, sampling=sampling))


def check_scene(
    place: Place,
    num_steps: int,
    scene: Sequence[Arrival],
    max_bs: int,
    max_context: int = 0,
    num_rerun: int | None = None,
    **options: object,
) -> tuple[list[Request], list[Watched]]:
    """Every draft of every cycle is what a full recompute gives, and every request emits what plain decoding does,
    whatever lengths its cycles accept. max_context: by default no request reaches it. num_rerun: by default num_steps
    - 1. options: of the worker.
    """
    num_new = max(arrival.options.max_new_tokens for arrival in scene)
    max_context = max_context or max(len(arrival.prompt) for arrival in scene) + num_new
    capacity = capacity_of(num_steps, max_bs, max_context, place.page_size)
    capacity = capacity if num_rerun is None else replace(capacity, num_rerun=num_rerun)
    worker = mtp_worker(place, capacity, **options)
    given = tuple((tuple(arrival.prompt), arrival.options.sampling) for arrival in scene)
    texts = plain(place.model, place.device, given, num_new + 2 * num_steps + 2)
    with watch(worker, accept_any_length([arrival.prompt for arrival in scene], texts)) as seen:
        try:
            requests, _ = play(Server(worker), scene)
        except InvalidStepError as refusal:
            raise AssertionError(f"a step was made that is not admitted: {refusal}") from refusal
    check_nothing_kept(worker)
    check_requests(oracle_of(place.model, place.device), requests, seen, texts)
    return requests, seen


def check_requests(
    oracle: Oracle, requests: Sequence[Request], seen: Sequence[Watched], texts: Sequence[Sequence[int]]
) -> None:
    """See `check_scene`. texts: what plain decoding makes of each request, without an end."""
    watched_of = {id(watched.prompt): watched for watched in seen}
    for request, text in zip(requests, texts, strict=True):
        if request.finish is not FinishReason.CANCELLED:
            assert len(request.output) == request.limit
        assert request.output == list(text[: len(request.output)]), f"request {request.number} emits something else"
        watched = watched_of.get(id(request.prompt), Watched(request.prompt))
        cycled = watched.text[len(request.prompt) + 1 :]
        assert cycled[: len(request.output) - 1] == request.output[1:], "cycles accept what the request does not emit"
        check_drafts(oracle, watched)
        if request.options.sampling == Sampling():
            check_tokens(oracle, watched)


def check_drafts(oracle: Oracle, request: Watched) -> None:
    """Every draft of every cycle is what the modules score best over the whole text."""
    if not request.cycles:
        return
    lens, drafts = [cycle.committed for cycle in request.cycles], [cycle.drafts for cycle in request.cycles]
    scores = oracle.draft_scores(request.text, lens, drafts)
    behind = behind_the_best(scores, torch.tensor(drafts))
    for cycle, best, rows in zip(request.cycles, scores.argmax(dim=2).tolist(), behind.tolist(), strict=True):
        wrong = [depth for depth, row in enumerate(rows, 1) if not row <= NEAR]
        assert not wrong, (
            f"after {cycle.committed} tokens, {len(request.prompt)} of them a prompt, drafts {cycle.drafts} are wrong "
            f"at depths {wrong}: recomputed from position 0, the best after those before each are {best}"
        )


def check_tokens(oracle: Oracle, request: Watched) -> None:
    """Every token after the prompt is the target's best."""
    if request.text:
        scores = oracle.token_scores(request.text)[len(request.prompt) - 1 :]
        emitted = torch.tensor(request.text[len(request.prompt) :])
        wrong = [i for i, row in enumerate(behind_the_best(scores, emitted).tolist()) if not row <= NEAR]
        assert not wrong, f"tokens {wrong} of {emitted.tolist()} after {request.prompt} are not the target's best"


def behind_the_best(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[...]: by how much the best token scores better than the chosen. scores: [..., vocab]. chosen: [...] int64."""
    return scores.amax(dim=-1) - scores.gather(-1, chosen.to(scores.device).unsqueeze(-1)).squeeze(-1)


def accepted_lengths(seen: Sequence[Watched]) -> Counter[int]:
    """How often cycles accepted each length."""
    return Counter(len(cycle.accepted) for request in seen for cycle in request.cycles)


def check_random() -> None:
    """Requests of every kind join and leave; a request's row was another's before."""
    for place, num_steps in ((Place("mla", "flashinfer_mla", 4), 3), (Place("gqa", "fa3", 1, host_lag=1), 4)):
        requests, seen = check_scene(place, num_steps, random_arrivals(20, 10, 40, 16, seed=1), 5, chunk=7)
        assert set(accepted_lengths(seen)) == set(range(1, num_steps + 2))
        assert sum(request.statistics.num_shared_tokens for request in requests) > 0


def check_short_prompts() -> None:
    """Prompts of fewer tokens than there are modules, and a few more: windows begin at position 0."""
    for num_steps in (2, 4):
        lens = range(1, num_steps + 3)
        check_scene(Place("mla", "flashinfer_mla", 4), num_steps, steady(lens, [10] * len(lens)), max_bs=len(lens))


def check_chunks(num_steps: int = 4) -> None:
    """A prompt is drafted for as well in chunks as in one, wherever their edges fall."""
    lens = range(1, 2 * num_steps + 6)
    for chunk in {1, 2, num_steps - 1, num_steps, num_steps + 1, 2 * num_steps + 1}:
        scene = steady(lens, [2 * num_steps] * len(lens))
        check_scene(Place("gqa", "fa3", 4), num_steps, scene, max_bs=5, chunk=chunk)


def check_batches(
    model: str = "mla", backend: str = "trtllm_mla", page_size: int = 32, draft_graphs: str = "one", device: str = "cpu"
) -> None:
    """5, then 40, then 6 requests, where the largest graph holds 8: what is kept survives each change of path."""
    joins, new_tokens = [0] * 5 + [2] * 35, [30] * 5 + [26] + [4 + i % 6 for i in range(34)]
    scene = steady([3 + 5 * i % 11 for i in range(40)], new_tokens, joins)
    place = Place(model, backend, page_size, (1, 2, 4, 8), draft_graphs, device=device)
    _, seen = check_scene(place, 3, scene, max_bs=40)
    ran = {(cycle.bs, cycle.bucket) for request in seen for cycle in request.cycles}
    assert {(5, 8), (6, 8), (40, 0)} <= ran, f"batches and their graphs: {sorted(ran)}"


def check_room(host_lag: int = 0) -> None:
    """A request ends on the last token of its context; no step writes past what a request holds, and the window of a
    text shorter than what is run again reaches furthest.
    """
    place = Place("mla", "flashinfer_mla", 1, host_lag=host_lag)
    scene = steady([48 - i for i in (1, 2, 3, 4, 5, 6, 9, 20, 47)], [47] * 9)
    requests, _ = check_scene(place, 3, scene, max_bs=4, max_context=48)
    check_scene(Place("mla", "flashinfer_mla", 1), 4, steady([1, 2, 3], [2, 2, 2]), max_bs=3)
    assert [len(request.prompt) + len(request.output) for request in requests] == [48] * 9


# Each with another path, lag and chunk; requests draft and emit the same in all of them.
PATHS = [
    (Place("mla", "flashinfer_mla", 4), 64),
    (Place("mla", "trtllm_mla", 32, (1, 2, 4)), 3),
    (Place("mla", "fa3", 1, (1, 2, 4), "per_module"), 64),
    (Place("mla", "flashinfer_mla", 16, (1, 2, 4), "per_module", host_lag=1), 5),
    (Place("mla", "trtllm_mla", 64, (5,), host_lag=1), 2),
]


def check_paths(device: str = "cpu") -> None:
    """A request takes as many cycles, and accepts as much at each depth, on every path."""
    scene, found = steady([1, 2, 3, 4, 9, 16, 30], [20, 12, 20, 3, 20, 17, 14]), []
    for place, chunk in PATHS:
        requests, _ = check_scene(replace(place, device=device), 3, scene, max_bs=5, chunk=chunk)
        found.append([(r.output, r.statistics.num_cycles, r.statistics.accepted_by_depth) for r in requests])
    assert all(path == found[0] for path in found)


def check_sharing(place: Place = SHARED, num_steps: int = 3) -> None:
    """A prompt shares the pages whose drafted entries its own tokens would give: those that it agrees on with another
    for num_steps tokens past their end. What it drafts then is what it would draft alone.
    """
    size = place.page_size
    whole = random_tokens(3 * size + num_steps + 1, seed=9)
    scene = [Arrival(0, whole, RequestOptions(12))]
    for behind in range(num_steps + 1):  # agrees on `behind` tokens past the second page
        fork = 2 * size + behind
        prompt = [*whole[:fork], (whole[fork] + 1) % rm.VOCAB, *random_tokens(num_steps + behind, seed=behind)]
        scene.append(Arrival(2, prompt, RequestOptions(8)))
    requests, _ = check_scene(place, num_steps, scene, max_bs=num_steps + 2, chunk=2 * size)
    found = [request.statistics.num_shared_tokens for request in requests[1:]]
    assert found == [size] * num_steps + [2 * size], f"shared with {found} tokens"


def check_failures() -> None:
    """A step that fails, in whichever of its phases, and is tried again, drafts what it would have drafted."""
    scene = random_arrivals(12, 6, 24, 16, seed=4)
    for place in (SHARED, replace(SHARED, buckets=(1, 2), draft_graphs="per_module", host_lag=1)):
        with failing_steps() as failed:
            check_scene(place, 3, scene, max_bs=4, chunk=3)
        further = {"draft_extend_1", "draft_extend_2"} if place.buckets else set[str]()
        phases = {"prefill", "draft_prefill", "verify", "draft_extend"} | further
        assert failed.keys() >= phases, f"{failed} failed"


def check_refusals() -> None:
    """What is not multi-layer MTP, or does not fit, is refused with the values and what to do, before anything runs."""
    place = Place("mla", "flashinfer_mla", 4)
    for changes, num_modules, message in REFUSED:
        capacity, reason = replace(capacity_of(3, 2, 48, 4), **changes), ""
        try:
            mtp_worker(place, capacity, num_modules)
        except UnsupportedStepError as refusal:
            reason = str(refusal)
        assert re.search(message, reason), f"{changes}, {num_modules} modules: {reason or 'was taken'}"


REFUSED: list[tuple[dict[str, int], int, str]] = [
    ({"num_rerun": 1}, 3, r"num_rerun=1 \(the last 2 positions .* run again\).*num_rerun=2"),
    ({"max_context": 124}, 3, r"max_context=124 and 5 drafted tokens, 129 positions \(the target has 128\)"),
    ({"topk": 2}, 3, r"topk=2 \(a module proposes one token: topk=1\)"),
    ({"num_draft_tokens": 3}, 3, r"num_draft_tokens=3 \(a chain of 3 has 4\)"),
    ({}, 2, r"num_steps=3 \(each step takes a module, and there are 2\).*EagleWorker with one module"),
]
