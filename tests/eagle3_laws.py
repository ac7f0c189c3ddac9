"""What EAGLE-3 promises, each as a function that raises if it does not hold; for the tests and the mutants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from attn_backends_reference.eagle.requests import Request
from attn_backends_reference.eagle.serving import Server, serve
from spec_metadata import Capacity, Sampling
from tests.eagle3_models import tiny_oracle
from tests.eagle3_oracle import Oracle
from tests.eagle3_scenes import Place, Watched, accept_any_length, watch, workers
from tests.mtp_scenes import random_arrivals, steady
from tests.serving_scenes import Arrival, check_nothing_kept, failing_steps, play, tokens

CHAIN, TREE = (1, 3, 4), (3, 3, 10)
NEAR = 1e-4
"""Scores this close are a tie, which two orders of float32 sums may break either way."""


@cache
def plain(given: tuple[tuple[tuple[int, ...], Sampling], ...], num_tokens: int) -> list[list[int]]:
    """What plain decoding makes of prompts that sample so, num_tokens each."""
    prompts, sampling = [list(prompt) for prompt, _ in given], [record for _, record in given]
    _, worker = workers(Place(page_size=16), Capacity(8, max(map(len, prompts)) + num_tokens, 16))
    return tokens(serve(worker, prompts, num_tokens, sampling=sampling))


def check_scene(
    place: Place, shape: tuple[int, int, int], scene: Sequence[Arrival], max_bs: int, **options: object
) -> tuple[list[Request], list[Watched]]:
    """Every tree of every cycle is what a full recompute drafts, and every request emits what plain decoding does,
    whatever lengths its cycles accept. shape: topk, num_steps and num_draft_tokens. options: of the worker.
    """
    num_new = max(arrival.options.max_new_tokens for arrival in scene)
    max_context = max(len(arrival.prompt) for arrival in scene) + num_new
    worker, _ = workers(place, Capacity(max_bs, max_context, place.page_size, *shape), **options)
    given = tuple((tuple(arrival.prompt), arrival.options.sampling) for arrival in scene)
    texts = plain(given, num_new + 2 * shape[1] + 2)
    with watch(worker, accept_any_length([arrival.prompt for arrival in scene], texts)) as seen:
        requests, _ = play(Server(worker), scene)
    check_nothing_kept(worker)
    for request, text in zip(requests, texts, strict=True):
        assert request.output == list(text[: len(request.output)]), f"request {request.number} emits something else"
    size, sinks = options.get("draft_window"), options.get("draft_sink_tokens", 0)
    oracle = replace(tiny_oracle(), window=size and (size, sinks, place.page_size))
    for watched in seen:
        check_drafts(oracle, watched, shape)
    return requests, seen


@torch.no_grad()
def check_drafts(oracle: Oracle, request: Watched, shape: tuple[int, int, int]) -> None:
    """The trees of a request hold the best paths of a full recompute, and score there as those do."""
    if not request.cycles:
        return
    topk, num_steps, num_nodes = shape
    features = oracle.features(request.text)
    for cycle in request.cycles:
        known = request.text[: cycle.committed + 1]
        possible = {tuple(path): score for score, path in oracle.tree(known, features, topk, num_steps)}
        best = sorted(possible.values(), reverse=True)[: num_nodes - 1]
        found = sorted((possible.get(tuple(path), float("-inf")) for path in cycle.paths), reverse=True)
        near = torch.tensor(found).sub(torch.tensor(best)).abs() <= NEAR
        assert bool(near.all()), (
            f"after {cycle.committed} tokens, {len(request.prompt)} of them a prompt, the paths {cycle.paths} were "
            f"drafted; recomputed from position 0 they score {found}, the best {best}"
        )


def accepted_lengths(seen: Sequence[Watched]) -> Counter[int]:
    """How often cycles accepted each length."""
    return Counter(len(cycle.accepted) for request in seen for cycle in request.cycles)


def check_chain(device: str = "cpu") -> None:
    """Chains of one token a step; requests of every kind join and leave."""
    _, seen = check_scene(Place(device=device), CHAIN, random_arrivals(8, 6, 20, 12, seed=1), 3, chunk=7)
    assert set(accepted_lengths(seen)) == {1, 2, 3, 4}, "every length is accepted"


def check_tree(device: str = "cpu") -> None:
    """Trees, whose best nodes are found by log-probabilities over the draft's own vocabulary."""
    _, seen = check_scene(Place(device=device), TREE, steady([1, 3, 9, 14], [12] * 4), 4, chunk=5)
    assert len(accepted_lengths(seen)) > 2, "several lengths are accepted"


def check_window(device: str = "cpu") -> None:
    """Drafts that read the first tokens and the last ones, of texts shorter and longer than both together."""
    options = {"draft_window": 5, "draft_sink_tokens": 2, "chunk": 7}
    check_scene(Place(page_size=1, device=device), CHAIN, random_arrivals(8, 6, 20, 12, seed=1), 3, **options)
    place, scene = Place(page_size=4, buckets=(1, 3), device=device), steady([3, 17, 24, 9], [14, 12, 8, 10])
    _, seen = check_scene(place, TREE, scene, 4, **options)
    assert {(1, 1), (3, 3), (4, 0)} <= {(cycle.bs, cycle.bucket) for request in seen for cycle in request.cycles}


def check_failures() -> None:
    """A step that fails, in whichever of its phases, and is tried again, drafts what it would have drafted."""
    with failing_steps() as failed:
        check_scene(Place(buckets=(1, 2)), TREE, random_arrivals(8, 6, 20, 12, seed=1), 3, chunk=5)
    assert failed.keys() >= {"prefill", "draft_prefill", "draft", "verify", "draft_extend"}, f"{failed} failed"


def check_graphs(device: str = "cpu") -> None:
    """Batches in, between and above the graphs' sizes, and prefills in and above theirs."""
    scene = steady([3, 8, 2, 11, 5], [12, 14, 6, 10, 8], [0, 0, 1, 2, 2])
    _, seen = check_scene(Place(buckets=(1, 3), device=device), TREE, scene, 4, prefill_buckets=(4, 12))
    ran = {(cycle.bs, cycle.bucket) for request in seen for cycle in request.cycles}
    assert {(2, 3), (4, 0)} <= ran, f"batches and their graphs: {sorted(ran)}"
