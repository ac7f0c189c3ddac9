"""What captured prefill promises, each as a function that raises if it does not hold; for the tests and the mutants.

Prompts go through two workers on the same random models, chunk by chunk: one runs prefill eagerly, the other through
graphs. Caches hold NaN where nobody has written yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import CudaGraph, Graph, RecordedGraph
from attn_backends.registry import get_backend
from attn_backends.runner import PerToken, PhaseRunner, Runner, StepResult
from attn_backends_reference.eagle.options import PhaseBackends, PrefillGraphs, WorkerOptions
from attn_backends_reference.eagle.phases import Model, by_name
from attn_backends_reference.eagle.prefill_phases import (
    DRAFT_PREFILL,
    PREFILL,
    Prefilled,
    PrefillInputs,
    prefill_phase,
)
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.worker import EagleWorker, SpeculativeWorker
from attn_backends_reference.models.decoder import DraftModel
from attn_backends_reference.pieces import Forward, PackedPhase, PiecewiseRunner, whole
from spec_metadata import CacheGeometry, Capacity, Sampling, Step, mixed_step, pad_step, query_starts, token_positions
from tests import reference_models as rm
from tests.mtp_scenes import Place, capacity_of, mtp_worker, oracle_of, poisoned, random_tokens

BUCKETS = (8, 32)
LENS = (19, 1, 33, 8)
PLACE = Place("gqa", "fa3", 4)


def graph_of(place: Place) -> Callable[[], Graph]:
    """What captures at a place."""
    return CudaGraph if place.device == "cuda" else RecordedGraph


def eagle_worker(place: Place, **options: Any) -> EagleWorker:
    """EAGLE with a tree of two branches on tiny random models."""
    capacity = Capacity(len(LENS), 48, place.page_size, topk=2, num_steps=2, num_draft_tokens=4)
    target = rm.served_target(place.model, oracle_of(place.model, place.device).target)
    draft: DraftModel = rm.served_draft(rm.tiny_draft(place.model).to(place.device), target)
    for model in (target, draft):
        model.allocate_caches = poisoned(model)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    backend = get_backend(place.backend)(capacity, geometry, place.device, kernel="torch", checking=place.checking)
    backends = PhaseBackends(backend, backend, backend, backend, backend)
    return EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(**options))


def modules_worker(place: Place, **options: Any) -> SpeculativeWorker:
    """Multi-layer MTP with three modules."""
    return mtp_worker(place, capacity_of(3, len(LENS), 48, place.page_size), **options)


WORKERS: dict[str, Callable[..., SpeculativeWorker]] = {"eagle": eagle_worker, "mtp": modules_worker}
MORE_ROWS = {"mtp": 2 * len(LENS)}
"""Rows of all requests that a draft's prefill may have beside the target's."""


@dataclass(frozen=True)
class Ran:
    """A step of prefill: its phase, its numbers of requests and tokens, and what it gave."""

    phase: str
    bs: int
    num_tokens: int
    result: StepResult


@contextmanager
def watched():
    """Yields the steps of prefill that run while it lasts."""
    seen, run = list[Ran](), Runner.run

    def noted(runner, step, inputs):
        result = run(runner, step, inputs)
        if runner.phase.name in (PREFILL, DRAFT_PREFILL):
            seen.append(Ran(runner.phase.name, step.bs, step.num_tokens, result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", noted)
        yield seen


def prefill(worker: SpeculativeWorker, lens: Sequence[int], chunk: int, late: int = 1) -> list[Ran]:
    """Run prompts of these lengths, `chunk` tokens of each a step, the first of them joining `late` steps later."""
    prompts = [random_tokens(length, seed=length) for length in lens]
    rows = [worker.slots.admit() for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        worker.slots.reserve(row, len(prompt) + worker.draft_room)
        worker.admit(row, Sampling())
    with watched() as seen:
        for turn in range(-(-max(lens) // chunk) + late):
            starts = [(turn - late * (place == 0)) * chunk for place in range(len(lens))]
            both = zip(rows, prompts, starts, strict=True)
            chunks = [Chunk(r, p, s, min(s + chunk, len(p))) for r, p, s in both if 0 <= s < len(p)]
            if chunks:
                worker.prefill(chunks)
    return seen


def memory(worker: SpeculativeWorker) -> list[Tensor]:
    """Everything that prefill leaves behind."""
    caches = [*worker.target_caches, *worker.draft_caches]
    return [worker._lens, *(pages for cache in caches for pages in cache.pages)]


def check_close(what: str, found: Tensor, expected: Tensor) -> None:
    """The same within float32's rounding, integers exactly."""
    assert found.shape == expected.shape, f"{what}: {list(found.shape)}, not {list(expected.shape)}"
    good = torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert good, f"{what} differs by {(found.float() - expected.float()).abs().nan_to_num().max():.3g}"


def check_results(found: Sequence[Ran], expected: Sequence[Ran], check: Callable[[str, Tensor, Tensor], None]) -> None:
    """Steps gave the same, field by field."""
    for one, other in zip(found, expected, strict=True):
        for field in fields(other.result.value):
            what = f"{one.phase} of {one.num_tokens} tokens: {field.name}"
            check(what, getattr(one.result.value, field.name), getattr(other.result.value, field.name))


def check_paths(
    worker: str = "eagle",
    place: Place = PLACE,
    chunk: int = 7,
    lens: Sequence[int] = LENS,
    graphs: PrefillGraphs = "piecewise",
) -> list[Ran]:
    """Results and caches are those of eager prefill, whatever the chunks; padded rows are stored nowhere, or in the
    reserved page; steps above the largest bucket run eagerly and say so. Drafts run through graphs where the target
    did.
    """
    make, graph = WORKERS[worker], graph_of(place)
    eager, captured = make(place), make(place, prefill_buckets=BUCKETS, prefill_graphs=graphs, make_graph=graph)
    expected, found = prefill(eager, lens, chunk), prefill(captured, lens, chunk)
    check_results(found, expected, check_close)
    for cache in (*captured.target_caches, *captured.draft_caches):
        for pages in cache.pages:
            reserved = pages[captured.slots.geometry.reserved_page]
            assert graphs == "full" or not reserved.any(), "padded rows are stored"
            assert reserved.isfinite().all()
            reserved.zero_()
    for ours, theirs in zip(memory(captured), memory(eager), strict=True):
        check_close("a cache", ours, theirs)
    for size in {ran.result.bucket.num_tokens for ran in found if ran.phase == PREFILL and ran.result.bucket}:
        features = captured._prefill._captured[size].outputs.features
        assert features.isfinite().all(), "padded rows hold what is left of other steps"
    for ran in found:
        sizes = BUCKETS if ran.phase == PREFILL else (*BUCKETS, BUCKETS[-1] + MORE_ROWS.get(worker, 0))
        smallest = min((size for size in sizes if size >= ran.num_tokens), default=None)
        size = ran.result.bucket and ran.result.bucket.num_tokens
        assert size == smallest, f"{ran.num_tokens} tokens ran in {ran.result.bucket}"
    for target, draft in zip(found[::2], found[1::2], strict=True):
        assert draft.result.ran_graph >= target.result.ran_graph, f"{target.num_tokens} and {draft.num_tokens} tokens"
    for counts, took in ((captured.num_eager_steps, False), (captured.num_graph_steps, True)):
        for phase in (PREFILL, DRAFT_PREFILL):
            number = sum(ran.result.ran_graph is took for ran in found if ran.phase == phase)
            assert counts.get(phase, 0) == number, f"{counts} counts {phase} wrong"
    return found


def check_full(place: Place = PLACE) -> None:
    """`check_paths` of one graph of all."""
    check_paths(place=place, graphs="full")


def check_full_exact(worker: str = "eagle", place: Place = PLACE, chunk: int = 7) -> None:
    """A replay of a full graph equals the eager step on the same padded layout bit for bit, padded rows included.

    Those write to the reserved page, so it must hold them all: where two write to one slot, a GPU keeps either.
    """
    place = replace(place, page_size=max(place.page_size, *BUCKETS))
    options = {"prefill_buckets": BUCKETS, "prefill_graphs": "full", "make_graph": graph_of(place)}
    captured, run, compared = WORKERS[worker](place, **options), PhaseRunner.run, list[str]()

    def both(runner, step, inputs):
        before = [tensor.clone() for tensor in memory(captured)]
        result = run(runner, step, inputs)
        if result.bucket is None or runner.phase.name not in (PREFILL, DRAFT_PREFILL):
            return result
        after, graph = [tensor.clone() for tensor in memory(captured)], runner._captured[result.bucket.num_tokens]
        replayed = {field.name: getattr(graph.outputs, field.name).clone() for field in fields(graph.outputs)}
        for tensor, old in zip(memory(captured), before, strict=True):
            tensor.copy_(old)
        padded = runner.backend.init_forward_metadata(pad_step(step, result.bucket, runner.backend.capacity))
        eager = runner.phase.region(padded, graph.inputs)
        for name, value in replayed.items():
            check_identical(f"{runner.phase.name}: {name}", value, getattr(eager, name))
        for mine, theirs in zip(memory(captured), after, strict=True):
            check_identical("a cache", mine.nan_to_num(7), theirs.nan_to_num(7))
        compared.append(runner.phase.name)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseRunner, "run", both)
        prefill(captured, LENS, chunk)
    assert {PREFILL, DRAFT_PREFILL} <= set(compared)


def check_exact(worker: str = "eagle", place: Place = PLACE) -> None:
    """A step that fills its bucket, in tokens and requests, gives what it gives eagerly, bit for bit."""
    make, (size, _) = WORKERS[worker], BUCKETS
    lens = [size // len(LENS)] * len(LENS)
    expected = prefill(make(place), lens, size, late=0)
    found = prefill(make(place, prefill_buckets=(size,), make_graph=graph_of(place)), lens, size, late=0)
    assert all(ran.result.ran_graph and ran.num_tokens == size for ran in found)
    check_results(found, expected, check_identical)


def check_identical(what: str, found: Tensor, expected: Tensor) -> None:
    """Bit for bit."""
    assert torch.equal(found, expected), f"{what} is not the same to the bit"


@dataclass(frozen=True, eq=False)
class ImageInputs(PrefillInputs):
    """A user's own inputs. embeds: [num_tokens, H], added to the tokens' own. is_image: [num_tokens] bool."""

    embeds: PerToken
    is_image: PerToken


@dataclass(frozen=True, eq=False)
class ImageOutputs(Prefilled):
    """A user's own outputs. embeds: [num_tokens, H], what the draft shall be given, too."""

    embeds: PerToken


def check_further_fields(place: Place = PLACE) -> None:
    """A user's fields reach the graph, and come back of the step's size, without a word to the runner."""
    worker = eagle_worker(place)
    model = Model(worker.target, worker.target_caches, worker.backends.prefill)
    known, width, device = (
        prefill_phase(model, worker.capacity, worker._sampling),
        worker.target.hidden_size,
        worker.device,
    )

    def region(forward: Forward, given: ImageInputs) -> ImageOutputs:
        embeds = torch.where(given.is_image.unsqueeze(1), given.embeds, worker.target.embedding(given.tokens))
        made = known.region(forward, given)
        return ImageOutputs(made.tokens, made.features + embeds, embeds)

    def safe_inputs(num_tokens: int) -> ImageInputs:
        embeds = torch.zeros(num_tokens, width, device=device)
        return ImageInputs(**by_name(known.safe_inputs(num_tokens)), embeds=embeds, is_image=embeds[:, 0] > 0)

    phase = PackedPhase("images", region, safe_inputs, ImageOutputs, known.bucket)
    eager, pieces = (PiecewiseRunner(phase, model.backend, sizes, graph_of(place)) for sizes in ((), BUCKETS))
    full = PhaseRunner(whole(phase), model.backend, worker._paging(), BUCKETS, graph_of(place))
    row = worker.slots.admit()
    worker.slots.reserve(row, 40)
    for length in (6, 30, 3, 33):
        prompt, embeds = random_tokens(length, seed=length), torch.stack(rm.random_tokens([width] * length)) / rm.VOCAB
        step, padding = worker._prefill_step([Chunk(row, prompt, 0, length)]), by_name(known.safe_inputs(length))
        given = {name: tensor[:1] for name, tensor in padding.items()} | {
            "tokens": torch.tensor(prompt, device=device),
            "positions": torch.arange(length, device=device),
            "last": torch.tensor([length - 1], device=device),
            "embeds": embeds.to(device),
            "is_image": (embeds[:, 0] < 0.5).to(device),
        }
        with torch.no_grad():
            expected = eager.run(step, ImageInputs(**given))
            for runner in (pieces, full):
                found = runner.run(step, ImageInputs(**given))
                assert found.ran_graph == (length <= BUCKETS[-1])
                check_results([Ran("images", 1, length, found)], [Ran("images", 1, length, expected)], check_close)


def check_mixed(place: Place = PLACE) -> None:
    """A chunk, two decodes and a verify in one step give what they give in steps of their own: eagerly, between pieces
    and in a whole graph.
    """
    worker = eagle_worker(place)
    model = Model(worker.target, worker.target_caches, worker.backends.prefill)
    phase = prefill_phase(model, worker.capacity, worker._sampling)
    eager, pieces = (PiecewiseRunner(phase, model.backend, sizes, graph_of(place)) for sizes in ((), BUCKETS))
    full = PhaseRunner(whole(phase), model.backend, worker._paging(), BUCKETS, graph_of(place))
    lens, widths = (0, 9, 5, 12), (6, 1, 1, 3)
    rows, texts = [worker.slots.admit() for _ in lens], [random_tokens(16, seed=length) for length in lens]

    def run(runner: Runner, step: Step, tokens: Sequence[int]) -> StepResult:
        """tokens: of the step's rows."""
        given = {name: each[: step.bs] for name, each in by_name(phase.safe_inputs(len(tokens))).items()}
        given |= {"tokens": torch.tensor(tokens, device=worker.device), "positions": token_positions(step)}
        return runner.run(step, PrefillInputs(**given | {"last": query_starts(step)[1:].long() - 1}))

    with torch.no_grad():
        for row, text, length in zip(rows, texts, lens, strict=True):
            worker.slots.reserve(row, 40)
            if length:
                run(eager, worker._prefill_step([Chunk(row, text, 0, length)]), text[:length])
        at = [
            (torch.tensor(lens[own], dtype=torch.int32), worker.slots.paging(worker._index(rows[own])))
            for own in (slice(1, 3), slice(3, 4))
        ]
        chunk = worker._prefill_step([Chunk(rows[0], texts[0], 0, widths[0])])
        alone = [chunk, Step.decode(*at[0]), Step.target_verify(widths[3], *at[1])]
        tokens = [text[n : n + width] for text, n, width in zip(texts, lens, widths, strict=True)]
        of_parts = [tokens[0], [*tokens[1], *tokens[2]], tokens[3]]
        halves = [run(eager, *each).value for each in zip(alone, of_parts, strict=True)]
        whole_step = mixed_step(alone)
        for runner in (eager, pieces, full):
            found = run(runner, whole_step, [token for each in of_parts for token in each])
            assert found.ran_graph == (runner is not eager)
            for field in fields(Prefilled):
                expected = torch.cat([getattr(half, field.name) for half in halves])
                check_close(f"{field.name} of a mixed step", getattr(found.value, field.name), expected)
