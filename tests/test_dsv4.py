"""The compressed backend against transformers' full forward, through every kind of step, graphs, rollback and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends import dsv4
from attn_backends.errors import PlanError, UnsupportedStepError
from attn_backends.kernels import torch_compressed
from attn_backends.planning import planners
from spec_metadata import dense_part, write_slots
from spec_metadata.plans import compressed
from tests.dsv4_model import REAL, SMALL, Sizes, tiny_model
from tests.dsv4_scenes import Engine, Request, chains, check_outputs

ONE_BLOCK_PAGES = replace(SMALL, page_size=8)
MODELS = {sizes: tiny_model(sizes) for sizes in (SMALL, REAL)} | {ONE_BLOCK_PAGES: tiny_model(ONE_BLOCK_PAGES)}


def engine_of(sizes: Sizes, *lens: int, **options: Any) -> tuple[Engine, list[Request]]:
    """An engine with a request for each length, nothing of it committed."""
    engine = Engine(MODELS[sizes], sizes, max_context=max(lens), **options)
    return engine, [engine.add(chain) for chain in chains(*lens)]


def check(sizes: Sizes, requests: list[Request]) -> None:
    """Everything that the requests' right rows gave, against the oracle."""
    for request in requests:
        check_outputs(MODELS[sizes], request)


def accepts(num_rounds: int, num_requests: int, most: int, seed: int = 0) -> list[list[int]]:
    """Random accept lengths of each round and request, 1 to `most`."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1, most + 1, (num_rounds, num_requests), generator=rng).tolist()


@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
def test_prefill_in_chunks_that_end_at_and_beside_every_edge(block_table: bool) -> None:
    engine, requests = engine_of(SMALL, 48, 48, block_table=block_table)
    ends = [
        (1, 3),
        (3, 4),
        (4, 7),
        (7, 8),
        (8, 15),
        (9, 16),
        (15, 17),
        (16, 31),
        (17, 32),
        (31, 33),
        (32, 47),
        (33, 48),
    ]
    for end in ends:
        engine.prefill(requests, [last - request.committed for last, request in zip(end, requests, strict=True)])
    check(SMALL, requests)
    for length in range(1, 25):
        engine, requests = engine_of(SMALL, 34, block_table=block_table)
        engine.prefill(requests, (length,))
        engine.prefill(requests, (9,))
        check(SMALL, requests)


@pytest.mark.parametrize("edge", [127, 128, 129, 255, 256, 257, 259])
def test_prefill_in_chunks_at_real_ratios(edge: int) -> None:
    engine, requests = engine_of(REAL, edge + 132, 40)
    engine.prefill(requests, (edge, 5))
    engine.prefill(requests, (3, 1))
    engine.prefill(requests, (127, 34))
    engine.decode(requests[:1])
    check(REAL, requests)


def test_decode_alone() -> None:
    engine, requests = engine_of(SMALL, 70, 45)
    engine.prefill(requests, (25, 1))
    for _ in range(44):
        engine.decode(requests)
    check(SMALL, requests)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("width", [2, 4, 6, 11])
@pytest.mark.parametrize("sizes", [SMALL, ONE_BLOCK_PAGES], ids=["small", "pages_of_one_block"])
def test_verify_with_random_rejections(sizes: Sizes, width: int, block_table: bool) -> None:
    engine, requests = engine_of(
        sizes, 90, 90, 90, num_draft_tokens=width, num_steps=width - 1, block_table=block_table
    )
    engine.prefill(requests, (5, 1, 17))
    for accepted in accepts(2 * 60 // (width + 1), 3, width, seed=width):
        if max(request.committed for request in requests) + width <= 90:
            engine.verify(requests, width, accepted)
    assert min(request.committed for request in requests) > 25
    check(sizes, requests)


def test_verify_at_real_ratios_over_three_blocks() -> None:
    engine, requests = engine_of(REAL, 530, 530)
    for first in (120, 248, 376, 504):
        engine.prefill(requests, [first - 6 * number - request.committed for number, request in enumerate(requests)])
        for accepted in accepts(9, 2, 4, seed=first):
            engine.verify(requests, 4, accepted)
    assert min(request.committed for request in requests) > 512
    check(REAL, requests)


@pytest.mark.parametrize("sizes", [SMALL, REAL], ids=["small", "real"])
def test_draft_loops_and_extends(sizes: Sizes) -> None:
    context = 90 if sizes is SMALL else 300
    engine, requests = engine_of(sizes, context, context)
    engine.prefill(requests, (5, 2) if sizes is SMALL else (121, 250))
    for accepted in accepts(20 if sizes is SMALL else 12, 2, 4):
        engine.draft(requests, 3, [min(a - 1, 2) for a in accepted])
        engine.extend(requests, 4, accepted)
    check(sizes, requests)


def test_pages_that_are_shared_whole() -> None:
    first, second = chains(60, 60)
    second[:32] = first[:32]
    engine = Engine(MODELS[SMALL], SMALL, max_context=60)
    owner = engine.add(first)
    engine.prefill([owner], (37,))
    for accepted in accepts(3, 1, 4):
        engine.verify([owner], 4, accepted)
    engine.backend.check_prefix(32)
    sharer = engine.add(second, owner, 32)
    engine.prefill([sharer], (3,))
    for accepted in accepts(4, 2, 4):
        engine.verify([owner, sharer], 4, accepted)
    check(SMALL, [owner, sharer])


def test_garbage_in_unwritten_memory_changes_no_row() -> None:
    outputs = []
    for poison in (float("nan"), 1e4, -3.0):
        engine, requests = engine_of(SMALL, 60, 60, poison=poison)
        engine.prefill(requests, (17, 3))
        for accepted in accepts(7, 2, 4):
            engine.draft(requests, 3, [0, 2])
            engine.extend(requests, 4, accepted)
        outputs.append([logits for request in requests for _, logits in request.outputs])
    for garbage in outputs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outputs[0], garbage, strict=True))


def crawl(sizes: Sizes, width: int, forwards: int, rings: dict[int, int], length: int = 40) -> None:
    """One token commits a cycle, all others are wrong: every alignment of a rejection to blocks and pages."""
    engine, requests = engine_of(
        sizes,
        length + max(width, forwards),
        num_draft_tokens=width,
        num_steps=max(forwards, width - 1) + 1,
        rings=rings,
    )
    engine.prefill(requests, (1,))
    while requests[0].committed < length:
        if forwards:
            engine.draft(requests, forwards + 1, [0])
            engine.extend(requests, width, [1])
        else:
            engine.verify(requests, width, [1])
    check(sizes, requests)


RING_CASES = [(3, 0, {4: 9, 8: 9}), (4, 1, {4: 10, 8: 10}), (6, 0, {4: 12, 8: 12}), (2, 4, {4: 11, 8: 11})]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("width", "forwards", "rings"), RING_CASES)
def test_the_smallest_ring_keeps_what_a_rollback_needs(
    width: int, forwards: int, rings: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {r: compressed.min_ring(8, width, forwards) for r in rings} == rings
    crawl(SMALL, width, forwards, rings)
    for ratio in rings:
        with pytest.raises(UnsupportedStepError, match=rf"the {rings[ratio] - 1} state rows of ratio {ratio} allow"):
            crawl(SMALL, width, forwards, rings | {ratio: rings[ratio] - 1})
    monkeypatch.setattr(dsv4, "_ring_reasons", lambda *_: [])
    for ratio in rings:
        with pytest.raises(AssertionError, match="position"):
            crawl(SMALL, width, forwards, rings | {ratio: rings[ratio] - 1})


def rounds(sizes: Sizes = SMALL) -> None:
    """Chunks, draft loops, extends and verifies, against the oracle."""
    engine, requests = engine_of(sizes, 64, 64)
    engine.prefill(requests, (5, 11))
    engine.prefill(requests, (3, 9))
    for accepted in accepts(9, 2, 4):
        engine.draft(requests, 3, [a % 3 for a in accepted])
        engine.verify(requests, 4, accepted)
    check(sizes, requests)


def _same_slice(step: Any, forward: int = 0) -> Tensor:
    return write_slots(step, 0)


def _not_advanced(step: Any, forward: int = 0) -> Any:
    return dense_part(step, 0)


def _states_first(pools: Any, given: Any, compressor: Any, made: Any, *rest: Any) -> None:
    _WRITE_STATES(pools.states.data, made.state_writes, given.values, given.gates, 2)
    _STORE_ENTRIES(pools, given, compressor, made, *rest)


def _latest_rows_only(states: Tensor, slots: Tensor, *rest: Any) -> None:
    kept = slots.clone()
    if len(slots) == 8:
        kept[[0, 4]] = -1
    _WRITE_STATES(states, kept, *rest)


def _entry_plan(change: Callable[..., None]) -> Callable[..., Any]:
    def changed(*args: Any) -> None:
        _ENTRIES(*args)
        change(*args[:2])

    return changed


def _swapped_halves(x: Tensor) -> Tensor:
    (_, before), (own, _) = (half.chunk(2, dim=2) for half in x.chunk(2, dim=1))
    return torch.cat((before, own), dim=1)


_STORE_ENTRIES, _WRITE_STATES, _ENTRIES = dsv4._store_entries, dsv4.write_states, compressed._write_entries
_POOL, _ATTEND = torch_compressed.pool, torch_compressed.sparse_attention

MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "slots of a draft not sliced": (planners, "write_slots", _same_slice),
    "lengths of a draft not advanced": (compressed, "dense_part", _not_advanced),
    "states written before entries are made": (dsv4, "_store_entries", _states_first),
    "a state row not kept": (dsv4, "write_states", _latest_rows_only),
    "a block visible one row late": (
        compressed,
        "_write_entries",
        _entry_plan(lambda plan, _: plan.num_visible.sub_(1).clamp_(min=0)),
    ),
    "an open block visible": (compressed, "_write_entries", _entry_plan(lambda plan, _: plan.num_visible.add_(1))),
    "an entry rotated to its last token": (
        compressed,
        "_write_entries",
        _entry_plan(lambda plan, compression: plan.first_positions.add_(compression.ratio - 1)),
    ),
    "halves of the channels swapped": (torch_compressed, "_halves", _swapped_halves),
    "position bias one token off": (
        torch_compressed,
        "pool",
        lambda values, gates, bias, overlap: _POOL(values, gates, bias.roll(1, 0), overlap),
    ),
    "no sink": (torch_compressed, "sparse_attention", lambda *args: _ATTEND(*args[:-1], None)),
    "the oldest token of the window lost": (
        torch_compressed,
        "sparse_attention",
        lambda q, keys, visible, *rest: _ATTEND(q, keys, visible & (torch.arange(visible.shape[1]) != 7), *rest),
    ),
}


def test_rounds() -> None:
    rounds()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, PlanError), match=r"position|outside"):
        rounds()
