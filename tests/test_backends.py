"""Every backend, step kind and path against a float64 oracle that works from tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.conformance.worlds import Setup, World, capacity_of
from attn_backends.planning import planners
from spec_metadata import BlockTable, RequestTable, Step, StepKind, copy_step
from tests.backend_worlds import BACKENDS, GRAPH_KINDS, KV, LATENT, MID, assert_refused, ready
from tests.checks import check_eager, check_outputs, check_replay

SETUPS = [
    Setup(backend, format, page_size, topk, block_table=bool(index % 2) ^ (topk > 1))
    for backend, format, page_sizes in BACKENDS
    for index, page_size in enumerate(page_sizes)
    for topk in (1, 3)
]


def around_pages(setup: Setup) -> tuple[int, ...]:
    """Committed lengths around a page edge, none at all among them where a step allows it, and a full context."""
    context = capacity_of(setup.page_size, setup.topk).max_context
    edge = setup.page_size * max(1, 8 // setup.page_size)
    return (edge, max(edge - 1, 1), edge + 1, context)


REPLAYS = ["growing", "shrinking", "padded", "idle"]


def replay_batches(setup: Setup, kind: StepKind, name: str) -> tuple[Batch, Batch, int]:
    """The batch of a capture, the one of a replay, and the bucket's batch size."""
    edge, less, more, context = around_pages(setup)
    idle = Batch(StepKind.IDLE, ())
    return {
        "growing": (Batch(kind, (1, less)), Batch(kind, (more, context, edge)), 3),
        "shrinking": (Batch(kind, (context, more, edge)), Batch(kind, (less, 1)), 3),
        "padded": (Batch(kind, (edge, 2)), Batch(kind, (more, less)), MAX_BS),
        "idle": (Batch(kind, (edge, context)), idle, 2),
    }[name]


def kinds_of(setup: Setup) -> list[StepKind]:
    """Kinds whose step differs in a world that drafts trees from the one in a world of chains."""
    return GRAPH_KINDS if setup.topk == 1 else [StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND]


UNIFORM = [pytest.param(setup, kind, id=f"{setup}-{kind}") for setup in SETUPS for kind in kinds_of(setup)]
PACKED = [pytest.param(setup, id=str(setup)) for setup in SETUPS if setup.topk == 1]


@pytest.mark.parametrize("poison", [math.nan, 1e3], ids=["nan", "finite"])
@pytest.mark.parametrize(("setup", "kind"), UNIFORM)
def test_eager(setup: Setup, kind: StepKind, poison: float) -> None:
    check_eager(World(setup), Batch(kind, around_pages(setup)), poison)


@pytest.mark.parametrize(("setup", "kind"), UNIFORM)
def test_eager_in_buffers_of_the_longest_request(setup: Setup, kind: StepKind) -> None:
    check_eager(World(setup), Batch(kind, (0 if kind is StepKind.TARGET_VERIFY else 1, 5, 3), bounded=True))


@pytest.mark.parametrize("bounded", [False, True], ids=["capacity", "bounded"])
@pytest.mark.parametrize("setup", PACKED)
def test_prefill_with_and_without_prefix(setup: Setup, bounded: bool) -> None:
    edge, less, more, context = around_pages(setup)
    check_eager(World(setup), Batch(StepKind.PREFILL, (0, 0), (edge, 1), bounded))
    check_eager(World(setup), Batch(StepKind.PREFILL, (less, 0, more, context), (3, context, 1, 2), bounded))


@pytest.mark.parametrize("setup", PACKED)
def test_packed_draft_extend(setup: Setup) -> None:
    batch = Batch(StepKind.DRAFT_EXTEND, around_pages(setup), (2, 4, 1, 3))
    if setup.backend is TrtllmMLABackend:
        assert_refused(World(setup), batch, "packed query lengths")
    else:
        check_eager(World(setup), batch)


@pytest.mark.parametrize(("setup", "kind"), UNIFORM)
@pytest.mark.parametrize("dtype", [torch.float32])
def test_eager_in_single_precision(setup: Setup, kind: StepKind, dtype: torch.dtype) -> None:
    check_eager(World(replace(setup, dtype=dtype)), Batch(kind, around_pages(setup)))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_idle(setup: Setup) -> None:
    check_eager(World(setup), Batch(StepKind.IDLE, ()))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_an_idle_step_takes_a_table_of_any_width(setup: Setup) -> None:
    world = World(setup)
    no_rows = torch.empty(0, dtype=torch.int64)
    tables = [BlockTable(torch.empty(0, columns, dtype=torch.int32), world.geometry) for columns in (0, 1, 1000)]
    tables += [RequestTable(torch.zeros(3, width, dtype=torch.int32), no_rows, world.geometry) for width in (1, 5000)]
    for paging in tables:
        meta = world.backend.init_forward_metadata(Step.idle(paging))
        assert meta.at().write_slots.shape == (0,)


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.topk > 1], ids=str)
def test_a_tree_of_no_requests_attends_to_nothing(setup: Setup) -> None:
    world = World(setup)
    paging, none = world.paging(), torch.empty(0, dtype=torch.int32)
    width, nodes = world.capacity.topk, world.capacity.num_draft_tokens
    steps = {
        Step.draft_decode(width, 3, none, paging): (width, torch.empty(0, width, 1, dtype=torch.int64)),
        Step.target_verify(nodes, none, paging, tree_mask=torch.empty(0, nodes, nodes, dtype=torch.bool)): (
            nodes,
            None,
        ),
    }
    for step, (rows, ancestors) in steps.items():
        tree = world.backend.init_forward_metadata(step).at(0, ancestors).tree
        assert tree is not None
        assert tree.mask.shape == (0, rows, tree.slots.shape[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_types_of_an_idle_step_are_those_of_every_other(dtype: torch.dtype) -> None:
    world = World(Setup(FA3Backend, KV, 16, dtype=dtype))
    found = []
    for batch in (Batch(StepKind.DECODE, (5,)), Batch(StepKind.IDLE, ())):
        scene = Scene(world, batch)
        scene.reset_memory()
        meta = world.backend.init_forward_metadata(scene.step())
        given = scene.inputs()[0]
        world.backend.store(given.stored, world.cache, meta.at(), world.layer)
        out, lse = world.backend.forward(given.q, world.cache, meta.at(), world.layer)
        found.append((out.dtype, lse.dtype, out.shape[1:], lse.shape[1:]))
    assert found[0] == found[1]


IN_TURNS = [  # two replays of each setup and kind; `test_replay_whole_cross` has all
    pytest.param(setup, kind, name, id=f"{setup}-{kind}-{name}")
    for number, setup in enumerate(SETUPS)
    for turn, kind in enumerate(kinds_of(setup), number // 2)
    for name in REPLAYS[turn % 2 :: 2]
]


@pytest.mark.parametrize(("setup", "kind", "name"), IN_TURNS)
def test_replay(setup: Setup, kind: StepKind, name: str) -> None:
    check_replay(World(setup), *replay_batches(setup, kind, name))


@pytest.mark.parametrize("name", ["growing", "padded"])
@pytest.mark.parametrize(("setup", "kind"), UNIFORM)
def test_replay_with_refresh_as_the_first_node(setup: Setup, kind: StepKind, name: str) -> None:
    world = World(replace(setup, checking=False))
    check_replay(world, *replay_batches(setup, kind, name), record_refresh=True)


@pytest.mark.full
@pytest.mark.parametrize("poison", [math.nan, 1e3], ids=["nan", "finite"])
@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize(("setup", "kind"), UNIFORM)
def test_replay_whole_cross(
    setup: Setup, kind: StepKind, name: str, dtype: torch.dtype, block_table: bool, poison: float
) -> None:
    world = World(replace(setup, dtype=dtype, block_table=block_table))
    check_replay(world, *replay_batches(setup, kind, name), poison)


@pytest.mark.parametrize("kind", GRAPH_KINDS)
@pytest.mark.parametrize("backend", [FlashInferMLABackend, TrtllmMLABackend, FA3Backend, ReferenceBackend])
@pytest.mark.parametrize("field", ["seq_lens", "paging", "out_cache_loc"])
def test_replay_with_one_frozen_input_fails(
    field: str, backend: type[AttentionBackend], kind: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(backend, LATENT, 32)
    batches = replay_batches(setup, kind, "growing")
    freeze_second_copy(monkeypatch, field)
    with pytest.raises(AssertionError):
        check_replay(World(replace(setup, checking=False)), *batches)


@pytest.mark.parametrize("field", ["seq_lens", "paging", "out_cache_loc", "tree_mask"])
@pytest.mark.parametrize("setup", [s for s in SETUPS if s.topk > 1 and s.page_size in (16, 32)], ids=str)
def test_replay_of_a_tree_with_one_frozen_input_fails(
    field: str, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = replay_batches(setup, StepKind.TARGET_VERIFY, "growing")
    freeze_second_copy(monkeypatch, field)
    with pytest.raises(AssertionError):
        check_replay(World(replace(setup, checking=False)), *batches)


@pytest.mark.parametrize(("setup", "kind"), [p for p in UNIFORM if p.values[0].page_size in (16, 32)])
def test_replay_with_frozen_number_of_real_rows_fails(
    setup: Setup, kind: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = replay_batches(setup, kind, "growing")
    freeze_second_copy(monkeypatch, "num_real")
    with pytest.raises(AssertionError):
        check_replay(World(replace(setup, checking=False)), *batches)


def freeze_second_copy(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Let the first replay (the capture's) through, and keep one static input of it in all later ones."""
    calls = []

    def copy_but_one(static: Step, step: Step) -> None:
        value = static.paging.static_input() if field == "paging" else getattr(static, field)
        kept = value.clone()
        copy_step(static, step)
        if calls:
            value.copy_(kept)
        calls.append(step)

    monkeypatch.setattr(planners, "copy_step", copy_but_one)


@pytest.mark.parametrize("setup", MID, ids=str)
def test_autocast_changes_nothing(setup: Setup) -> None:
    world, meta, given = ready(replace(setup, dtype=torch.float32))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            world.backend.store(given.stored, world.cache, meta, world.layer)
            found.append(world.backend.forward(given.q, world.cache, meta, world.layer))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("setup", MID, ids=str)
def test_table_entries_past_a_requests_tokens_may_hold_anything(setup: Setup, block_table: bool) -> None:
    world = World(replace(setup, block_table=block_table))
    scene = Scene(world, Batch(StepKind.TARGET_VERIFY, (30, 3)))
    for row, request in zip(scene.table_rows, scene.requests, strict=True):
        num_tokens = request.length + scene.width
        world.table[row, num_tokens:] = 10**6
        scene.pages[row, -(-num_tokens // setup.page_size) :] = 10**6
    scene.reset_memory()
    meta, given = world.backend.init_forward_metadata(scene.step()), scene.inputs()
    world.backend.store(given[0].stored, world.cache, meta.at(), world.layer)
    check_outputs(scene, given, [world.backend.forward(given[0].q, world.cache, meta.at(), world.layer)])
