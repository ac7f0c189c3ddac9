"""What a P-EAGLE worker promises, as a function that raises if it does not hold; for the tests and for the mutants."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from attn_backends.registry import get_backend
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.parallel import ParallelWorker
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import PlainWorker
from attn_backends_reference.models import load_parallel
from spec_metadata import CacheGeometry, Capacity, Sampling
from tests.eagle3_models import tiny_target
from tests.head_formats import Format, write
from tests.head_runs import TEXT, target_of
from tests.peagle_formats import PEAGLES, PEagleOracle
from tests.serving_scenes import PHASES

NUM_DRAFTED, NUM_PROMPT = 3, 11
Drafted = list[tuple[int, int, list[int]]]
"""Committed tokens, accepted ones of the last verify, and the chain that was drafted then."""


def oracle_of(format: Format, tensors: dict[str, Tensor]) -> PEagleOracle:
    """Of a folder's tensors, in float64."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    return PEagleOracle(
        copy.deepcopy(tiny_target(format.num_layers)).double(), format.facts, wide, format.facts["taps"]
    )


def place_of(num_drafted: int = NUM_DRAFTED) -> tuple[Capacity, CacheGeometry]:
    """Of two requests."""
    capacity = Capacity(2, 56, 4, 1, num_drafted, num_drafted + 1, num_extended=2 * num_drafted)
    return capacity, CacheGeometry(1 + capacity.max_bs * capacity.max_pages, 4)


@torch.no_grad()
def check_drafts(name: str, **path: Any) -> None:
    """After every number of accepted tokens a worker drafts what an independent forward over the whole text does, and
    its request gets the tokens of plain decoding at temperature 1. name: a format. path: options of the worker.
    """
    format, target = PEAGLES[name], target_of(PEAGLES[name])
    with TemporaryDirectory() as folder:
        oracle, draft = oracle_of(format, write(format, Path(folder))), load_parallel(folder, target)
    capacity, geometry = place_of()
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    backends, options = PhaseBackends(**dict.fromkeys(PHASES, backend)), WorkerOptions(chunk=5, **path)
    prompt, sampling = TEXT[:NUM_PROMPT].tolist(), [Sampling(1.0, seed=5)]
    (plain,) = serve(PlainWorker(target, backends, capacity, geometry, options), [prompt], 40, sampling=sampling)
    worker, text = ParallelWorker(target, draft, backends, capacity, geometry, options), [*prompt, *plain.tokens]
    drafted = with_some_right(worker, text)
    (found,) = serve(worker, [prompt], 40, sampling=sampling)
    assert found.tokens == plain.tokens
    assert {accepted for _, accepted, _ in drafted} == {1, 2, 3, 4}
    features = oracle.features(text)
    for count, accepted, chain in drafted:
        if count < len(text):
            expected = [text[count], *oracle.drafts(text[: count + 1], features, NUM_DRAFTED)]
            assert chain == expected, f"after {count} tokens, {accepted} of them just accepted"


def with_some_right(worker: ParallelWorker, text: list[int]) -> Drafted:
    """Let a worker's only request verify 0, 1, 2 and 3 right tokens by turns, whatever is drafted. Returns a list that
    gets what was.
    """
    drafted, run = Drafted(), worker._run

    def seen(runner: Any, step: Any, inputs: Any) -> Any:
        value = run(runner, step, inputs)
        if runner.phase.name == "draft_extend":
            num_accepted = int(inputs.num_accepted[0])
            count = int(worker._lens[step.paging.rows[0]]) + num_accepted
            drafted.append((count, num_accepted, value.tokens[0].tolist()))
            right = text[count + 1 : count + 1 + len(drafted) % 4]
            chain = [*drafted[-1][2][:1], *right, *[0] * NUM_DRAFTED][: NUM_DRAFTED + 1]
            value.tokens.copy_(torch.tensor([chain]))
        elif runner.phase.name == "draft_prefill" and int(inputs.positions[-1]) == NUM_PROMPT + NUM_DRAFTED - 2:
            drafted.append((NUM_PROMPT, 1, value.tokens[0].tolist()))
        return value

    worker._run = seen  # type: ignore[method-assign]
    return drafted
