"""Bad values are refused with their reasons, from host mirrors or in checking mode, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import AttnBackendsError
from spec_metadata import (
    BlockTable,
    CacheGeometry,
    InvalidStepError,
    PackedQuery,
    RequestTable,
    Step,
    StepKind,
    pad_step,
)
from spec_metadata.admission import check_table_room, check_values, check_write_slots
from tests.checks import check_identical

GEOMETRY = CacheGeometry(20, 4, reserved_page=2)
GOOD = ([[40, 41], [60]], [[44, 45, 46], [52]])


def test_good_write_slots() -> None:
    check_write_slots(*GOOD, GEOMETRY)
    check_write_slots([], [], GEOMETRY)
    check_write_slots([[40], [41]], [[44, 45], [44, 45, 46]], GEOMETRY)  # a shared prefix


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([[40, 80], [60]], r"request 0 writes slot 80, outside \[0, 80\)"),
        ([[40, 41], [-1]], r"request 1 writes slot -1, outside"),
        ([[40, 8], [60]], "request 0 writes slot 8 of the reserved page"),
        ([[40, 41], [11]], "request 1 writes slot 11 of the reserved page"),
        ([[40, 41], [40]], "slot 40 is written twice, by requests 0 and 1"),
        ([[40, 40], [60]], "slot 40 is written twice, by requests 0 and 0"),
        ([[40, 52], [60]], "request 0 writes slot 52, which holds a committed token of request 1"),
        ([[40, 41], [52]], "request 1 writes slot 52, which holds a committed token of request 1"),
    ],
)
def test_bad_write_slots(writes: list[list[int]], message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        check_write_slots(writes, GOOD[1], GEOMETRY)


@pytest.fixture
def world() -> World:
    return World(Setup(FA3Backend, CacheFormat.KV, 4))


@pytest.fixture
def scene(world: World) -> Scene:
    """A verify of two requests, at 5 and 9 committed tokens."""
    scene = Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 9)))
    scene.reset_memory()
    return scene


def spoil(step: Step, index: int, slot: int) -> Step:
    """The step with one write slot replaced."""
    slots = step.out_cache_loc.clone()
    slots[index] = slot
    return replace(step, out_cache_loc=slots)


def lens(step: Step, *values: int) -> Step:
    return replace(step, seq_lens=torch.tensor(values))


BAD_VALUES: dict[str, Callable[[Scene, Step], Step]] = {
    r"writes slot 100000, outside": lambda scene, step: spoil(step, 2, 100000),
    r"writes slot -3, outside": lambda scene, step: spoil(step, 2, -3),
    "of the reserved page": lambda scene, step: spoil(step, 6, 2 * 4 + 1),
    "is written twice, by requests 0 and 1": lambda scene, step: spoil(step, 6, int(step.out_cache_loc[1])),
    "committed token of request 0": lambda scene, step: spoil(step, 6, scene.requests[0].slots[3]),
    "committed token of request 1": lambda scene, step: spoil(step, 6, scene.requests[1].slots[8]),
    "request 0 has -1 committed tokens": lambda scene, step: lens(step, -1, 9),
    "request 1 has 1000 committed tokens and adds 4": lambda scene, step: lens(step, 5, 1000),
    "max_committed": lambda scene, step: replace(step, max_committed=1),
    "1000000": lambda scene, step: visible_out_of_range(scene, step),
}


def visible_out_of_range(scene: Scene, step: Step) -> Step:
    """A committed token of request 1 is said to lie outside the cache."""
    scene.world.table[scene.table_rows[1], 2] = 10**6
    return step


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("message", BAD_VALUES)
def test_checking_mode_refuses_bad_values(world: World, scene: Scene, message: str, captured: bool) -> None:
    meta = world.backend.capture(world.capacity.bucket(StepKind.TARGET_VERIFY, 3), world.paging())
    world.backend.replay(meta, scene.step())
    bad = BAD_VALUES[message](scene, scene.step())
    tensors = [world.memory, *meta.buffers.values()]
    before = [tensor.clone() for tensor in tensors]
    admit = partial(world.backend.replay, meta) if captured else world.backend.init_forward_metadata
    with pytest.raises(InvalidStepError, match=message):
        admit(bad)
    for tensor, old in zip(tensors, before, strict=True):
        check_identical("memory", tensor, old)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("positions", [(1, 2), (4, 8), (7, 6)], ids=str)
def test_checking_mode_refuses_rows_of_no_whole_pages(
    world: World, scene: Scene, positions: tuple[int, int], captured: bool
) -> None:
    """Kernels find a page by the slot of its first position: they would read others than the table says, silently."""
    meta = world.backend.capture(world.capacity.bucket(StepKind.TARGET_VERIFY, 3), world.paging())
    row = world.table[scene.table_rows[1]]
    row[list(positions)] = row[list(reversed(positions))]
    admit = partial(world.backend.replay, meta) if captured else world.backend.init_forward_metadata
    with pytest.raises(
        InvalidStepError, match=r"position \d of request 1 at slot .* a row holds whole pages of 4 slots"
    ):
        admit(scene.step())


def test_values_of_padding_are_not_checked(world: World, scene: Scene) -> None:
    """Padded rows write the reserved page, each slot many times."""
    check_values(pad_step(scene.step(), scene.step().bucket(5), world.capacity), world.capacity)
    check_values(Scene(world, Batch(StepKind.IDLE, ())).step(), world.capacity)


@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("kind", [k for k in StepKind if k is not StepKind.IDLE])
def test_good_values_of_every_kind(kind: StepKind, block_table: bool) -> None:
    for topk in (1, 3):
        world = World(Setup(FA3Backend, CacheFormat.KV, 4, topk, block_table=block_table))
        widths = (2, 5) if kind is StepKind.PREFILL else ()
        check_values(Scene(world, Batch(kind, (world.capacity.max_context, 3), widths)).step(), world.capacity)


def short_row(world: World, tokens: int, block_table: bool) -> RequestTable | BlockTable:
    """A table of two requests whose rows hold so many tokens."""
    if block_table:
        return BlockTable(torch.ones(2, tokens // 4, dtype=torch.int32), world.geometry)
    return RequestTable(torch.ones(3, tokens, dtype=torch.int32), torch.tensor([0, 2]), world.geometry)


@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("kind", ["draft_decode", "target_verify"])
@pytest.mark.parametrize("topk", [1, 3])
def test_table_without_draft_room(kind: str, topk: int, block_table: bool) -> None:
    """The context alone is not enough: what is drafted must fit as well."""
    world = World(Setup(FA3Backend, CacheFormat.KV, 4, topk, checking=False))
    most = world.capacity.max_kv_len
    for tokens, enough in ((most, True), (most + 4, True), (most - 4, False), (4, False)):
        paging = short_row(world, tokens, block_table)
        slots = torch.arange(2 * world.capacity.draft_room)
        start = torch.tensor([3, 4])
        if kind == "draft_decode":
            step = Step.draft_decode(topk, 3, start, paging, slots[: 2 * topk * 3])
        else:
            step = Step.target_verify(world.capacity.num_draft_tokens, start, paging, slots)
        if enough:
            check_table_room(step, world.capacity)
            continue
        with pytest.raises(InvalidStepError, match=f"a table row holds {tokens} tokens; {most} are needed"):
            world.backend.init_forward_metadata(step)
        bucket = world.capacity.bucket(step.kind, 2)
        with pytest.raises((InvalidStepError, AttnBackendsError), match="row"):
            world.backend.capture(bucket, paging)


def test_bounded_step_needs_a_bounded_row(world: World) -> None:
    """max_committed = 0 is a bound, too, and the message says so."""
    paging = short_row(world, 8, block_table=False)
    slots = torch.arange(40, 48)
    for bound, enough in ((0, True), (4, True), (5, False), (None, False)):
        step = Step.target_verify(4, torch.tensor([0, 0]), paging, slots, max_committed=bound)
        if enough:
            check_table_room(step, world.capacity)
        else:
            with pytest.raises(InvalidStepError, match="a table row holds 8 tokens"):
                check_table_room(step, world.capacity)
    step = Step.target_verify(4, torch.tensor([0, 0]), short_row(world, 3, False), slots, max_committed=0)
    with pytest.raises(InvalidStepError, match=r"up to 0 committed tokens \(max_committed\)"):
        check_table_room(step, world.capacity)


@pytest.mark.parametrize("checking", [False, True])
def test_step_wider_than_the_capacity(checking: bool) -> None:
    """Host bounds are always checked: more rows than context and draft room hold would be cut off silently."""
    world = World(Setup(FA3Backend, CacheFormat.KV, 4, checking=checking))
    num_slots = world.geometry.num_slots
    table = RequestTable(torch.arange(num_slots).repeat(2, 1), torch.tensor([0]), world.geometry)
    too_many = world.capacity.max_kv_len + 1
    slots = torch.arange(num_slots - too_many, num_slots)
    prompt = Step.prefill(PackedQuery.of([too_many]), torch.tensor([0]), table, slots)
    with pytest.raises((InvalidStepError, AttnBackendsError)):
        world.backend.init_forward_metadata(prompt)
    fits = world.backend.init_forward_metadata(Step.target_verify(8, torch.tensor([0]), table, max_committed=0))
    assert fits.at().write_slots.tolist() == [*range(8)], "a uniform step may be wider"
    verify = Step.target_verify(12, torch.tensor([world.capacity.max_context]), table, slots[:12])
    with pytest.raises((InvalidStepError, AttnBackendsError)):
        world.backend.init_forward_metadata(verify)


def test_lengths_above_the_capacity_in_checking_mode(world: World) -> None:
    """A wide table may hold a request that the declared buffers don't."""
    num_slots = world.geometry.num_slots
    table = RequestTable(torch.arange(num_slots).repeat(3, 1), torch.tensor([0]), world.geometry)
    too_long = torch.tensor([world.capacity.max_kv_len + 2])
    step = Step.decode(too_long, table, torch.tensor([num_slots - 1]))
    with pytest.raises((InvalidStepError, AttnBackendsError)):
        world.backend.init_forward_metadata(step)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replay"])
def test_exact_lengths_above_the_capacity_are_refused_without_checking_mode(captured: bool) -> None:
    """What the host knows is always checked."""
    world = World(Setup(FA3Backend, CacheFormat.KV, 4, checking=False))
    table = RequestTable(torch.arange(world.geometry.num_slots).repeat(2, 1), torch.tensor([1]), world.geometry)
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 1), table)
    too_long = world.capacity.max_kv_len
    step = Step.decode(torch.tensor([too_long]), table, torch.tensor([9]), seq_lens_cpu=[too_long])
    with pytest.raises(
        InvalidStepError, match=f"{too_long} committed tokens and adds 1.*the capacity holds {too_long}"
    ):
        world.backend.replay(meta, step) if captured else world.backend.init_forward_metadata(step)


@pytest.mark.parametrize("cu_seqlens", [[0, 2, 9], [0, 1, 3], [1, 3, 4], [0, 2, 3, 4]], ids=str)
def test_packed_query_whose_tensor_disagrees_with_its_lengths(world: World, cu_seqlens: list[int]) -> None:
    scene = Scene(world, Batch(StepKind.PREFILL, (5, 9), (2, 1)))
    query = PackedQuery(torch.tensor(cu_seqlens, dtype=torch.int32), (2, 1))
    with pytest.raises(InvalidStepError):
        world.backend.init_forward_metadata(replace(scene.step(), query=query))


def test_exact_lengths_of_packed_rows_are_checked_request_by_request(world: World) -> None:
    """The longest request may be the one that adds most."""
    most = world.capacity.max_kv_len
    table = RequestTable(torch.arange(world.geometry.num_slots).repeat(3, 1), torch.tensor([1, 2]), world.geometry)
    starts = (most - 3, 0)
    for widths, fits in (((3, 5), True), ((4, 1), False)):
        slots = torch.arange(8, 8 + sum(widths))
        step = Step.prefill(PackedQuery.of(widths), torch.tensor(starts), table, slots, seq_lens_cpu=starts)
        if fits:
            check_table_room(step, world.capacity)
        else:
            with pytest.raises(InvalidStepError, match=f"the capacity holds {most}"):
                check_table_room(step, world.capacity)
