"""Static memory: every phase has its own, and phases that read one table in place share what is of its requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from attn_backends.backend import AttentionBackend, Metadata
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.kernels import device_memory
from attn_backends.memory.static_memory import StaticMemory
from spec_metadata import (
    AnyBucket,
    BlockTable,
    BoundInputs,
    Bucket,
    CacheGeometry,
    Capacity,
    Paging,
    RequestTable,
    StepKind,
    TokenBucket,
    pad_step,
)
from spec_metadata.capacity import UNIFORM_KINDS
from tests.checks import check_identical

MB = 2**20
SHARING = [FA3Backend, FlashInferMLABackend, TrtllmMLABackend]
BACKENDS = [*SHARING, ReferenceBackend]


def world_of(backend: type[AttentionBackend] = FA3Backend, **options: object) -> World:
    return World(Setup(backend, CacheFormat.LATENT, 32, **options))


def capture(world: World, kind: StepKind, bs: int = MAX_BS) -> Metadata:
    return world.backend.capture(world.capacity.bucket(kind, bs), world.paging())


def places(metas: Iterable[Metadata], name: str) -> set[int]:
    """Where buffers of a name are."""
    return {meta.buffers[name].data_ptr() for meta in metas}


@pytest.mark.parametrize("backend", SHARING)
def test_phases_on_one_table_share_its_pages_alone(backend: type[AttentionBackend]) -> None:
    world = world_of(backend, checking=False)
    metas = [capture(world, kind) for kind in UNIFORM_KINDS]
    for meta in metas:
        for spec in backend.buffers(meta.bucket.kind):
            assert len(places(metas, spec.name)) == (1 if spec.shared else len(metas)), spec.name
        assert len(places(metas, "write_slots")) == len(places(metas, "seq_lens")) == len(metas)
    shared = world.backend.static_bytes(world.paging())["shared"]
    assert world.backend.memory.num_bytes == sum(shared.values()) > 0


@pytest.mark.parametrize("backend", SHARING)
def test_backends_that_share_it_share_tables_of_one_form(backend: type[AttentionBackend]) -> None:
    world, memory = world_of(backend, checking=False), StaticMemory()
    metas = []
    for _ in range(2):
        world.backend = backend(world.capacity, world.geometry, world.device, kernel="torch", memory=memory)
        metas.append(capture(world, StepKind.TARGET_VERIFY))
    (name,) = (spec.name for spec in backend.buffers(StepKind.TARGET_VERIFY) if spec.shared)
    assert len(places(metas, name)) == 1
    assert memory.num_bytes == metas[0].buffers[name].numel() * 4


def test_another_table_has_memory_of_its_own() -> None:
    world = world_of(checking=False)
    bucket, paging = world.capacity.bucket(StepKind.DECODE, MAX_BS), world.paging()
    other = replace(paging, table=paging.table.clone())
    metas = [world.backend.capture(bucket, each) for each in (paging, other)]
    assert len(places(metas, "page_table")) == len(places(metas, "seqused_k")) == 2


def test_copied_tables_are_of_a_phase_alone() -> None:
    """Nobody knows whether two tables that are copied are of the same requests."""
    world = world_of(block_table=True, checking=False)
    metas = [capture(world, kind) for kind in UNIFORM_KINDS]
    assert len(places(metas, "page_table")) == len(places(metas, "paging")) == len(metas)
    assert world.backend.memory.num_bytes == 0


def test_bound_tables_are_shared_whatever_their_form() -> None:
    world = world_of(block_table=True, checking=False)
    table = BlockTable(torch.zeros(MAX_BS, world.max_pages, dtype=torch.int32), world.geometry)
    lens, num_real = torch.zeros(MAX_BS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    metas = [
        world.backend.capture(world.capacity.bucket(kind, MAX_BS), table, BoundInputs(lens, num_real=num_real))
        for kind in UNIFORM_KINDS
    ]
    assert len(places(metas, "page_table")) == len(places(metas, "paging")) == 1


def test_uniform_phases_lie_in_the_table_of_a_ragged_one_that_was_first() -> None:
    """Its padding has rows of its own. The other way round they are two tables, and each phase is right."""
    world = world_of(checking=False)
    ragged = world.capacity.ragged_bucket(StepKind.TARGET_VERIFY, MAX_BS, 2 * MAX_BS)
    lens, num_real = torch.zeros(MAX_BS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    widths, paging = torch.ones_like(lens), world.paging(torch.zeros(MAX_BS, dtype=torch.int64))

    def captured(memory: StaticMemory, *buckets: AnyBucket) -> list[Metadata]:
        world.backend = FA3Backend(world.capacity, world.geometry, world.device, kernel="torch", memory=memory)
        given = {True: BoundInputs(lens, num_real=num_real, widths=widths), False: BoundInputs(lens, num_real=num_real)}
        return [world.backend.capture(each, paging, given[each is ragged]) for each in buckets]

    uniform = [world.capacity.bucket(kind, MAX_BS) for kind in (StepKind.DRAFT_DECODE, StepKind.DRAFT_EXTEND)]
    memory = StaticMemory()
    assert len(places(captured(memory, ragged, *uniform), "page_table")) == 1
    least = memory.num_bytes
    memory = StaticMemory()
    assert len(places(captured(memory, uniform[0], ragged, uniform[1]), "page_table")) == 2
    assert memory.num_bytes > least


def test_lists_of_another_capacity_lie_elsewhere() -> None:
    """Those of a shorter context would fit, but each request's begin at another place."""
    world, memory, metas = world_of(FlashInferMLABackend, checking=False), StaticMemory(), []
    for shorter in (0, world.geometry.page_size):
        capacity = replace(world.capacity, max_context=world.capacity.max_context - shorter)
        backend = FlashInferMLABackend(capacity, world.geometry, world.device, kernel="torch", memory=memory)
        metas.append(backend.capture(capacity.bucket(StepKind.DECODE, MAX_BS), world.paging()))
    (name,) = (spec.name for spec in FlashInferMLABackend.buffers(StepKind.DECODE) if spec.shared)
    assert len(places(metas, name)) == 2


@pytest.mark.parametrize("block_table", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_captured_stays_right_beside_larger_and_wider_buckets(
    backend: type[AttentionBackend], block_table: bool
) -> None:
    """It keeps its place, and a replay needs nothing of what was there before."""
    world = world_of(backend, block_table=block_table, checking=False)
    small = capture(world, StepKind.TARGET_VERIFY, 2)
    places = {name: tensor.data_ptr() for name, tensor in small.buffers.items()}
    for bucket in (world.capacity.prefill_bucket(4096), Bucket(StepKind.TARGET_VERIFY, MAX_BS, 64)):
        world.backend.capture(bucket, world.paging())
    capture(world, StepKind.TARGET_VERIFY)
    assert small.captured is not None
    small.captured.phase.reset()
    step = Scene(world, Batch(StepKind.TARGET_VERIFY, (5,))).step()
    world.backend.replay(small, step)
    assert places == {name: tensor.data_ptr() for name, tensor in small.buffers.items()}
    eager = world.backend.init_forward_metadata(pad_step(step, small.bucket, world.capacity))
    for name, tensor in eager.buffers.items():
        check_identical(name, small.buffers[name], tensor)


def test_metadata_is_stale_until_its_own_next_replay() -> None:
    world = world_of()
    large, small = capture(world, StepKind.TARGET_VERIFY), capture(world, StepKind.TARGET_VERIFY, 2)
    extend = capture(world, StepKind.DRAFT_EXTEND)
    message = r"metadata of \(target_verify bs=5 .*\) was overwritten by .* \(target_verify bs=2 .*replay it again"
    for use in (large.at, lambda: world.backend.refresh(large)):
        with pytest.raises(CaptureError, match=message):
            use()
    world.backend.replay(large, Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 3))).step())
    large.at()
    extend.at()
    with pytest.raises(CaptureError, match="target_verify bs=5"):
        small.at()


def test_a_refused_step_takes_the_memory_from_nobody() -> None:
    world = world_of()
    verify, extend = (capture(world, kind) for kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND))
    with pytest.raises(Exception, match="captured for"):
        world.backend.replay(verify, Scene(world, Batch(StepKind.DECODE, (5, 3))).step())
    extend.at()


def test_metadata_of_a_forward_is_stale_with_its_step() -> None:
    """It was taken in time, and would write the rows of one batch to the slots of another."""
    world = world_of()
    large, small = capture(world, StepKind.TARGET_VERIFY), capture(world, StepKind.TARGET_VERIFY, 2)
    scenes = [Scene(world, Batch(StepKind.TARGET_VERIFY, lens)) for lens in ((5, 3), (4, 2))]
    scenes[0].reset_memory()
    world.backend.replay(large, scenes[0].step())
    held, given = large.at(), scenes[0].inputs(MAX_BS)[0]
    world.backend.replay(small, scenes[1].step())
    before = world.memory.clone()
    for use in (
        lambda: world.backend.store(given.stored, world.cache, held, world.layer),
        lambda: world.backend.forward(given.q, world.cache, held, world.layer),
    ):
        with pytest.raises(CaptureError, match=r"\(target_verify bs=5 .*\) was overwritten by .* \(target_verify bs=2"):
            use()
    check_identical("memory", world.memory, before)


def test_a_refused_capture_takes_the_memory_from_nobody() -> None:
    world = world_of()
    others = {kind: "torch" for kind in UNIFORM_KINDS if kind is not StepKind.DECODE}
    world.backend = FA3Backend(world.capacity, world.geometry, kernel=others)
    with pytest.raises(UnsupportedStepError, match="no kernel for decode was asked for"):
        capture(world, StepKind.DECODE)
    assert world.backend.memory.num_bytes == 0
    verify = capture(world, StepKind.TARGET_VERIFY)
    with pytest.raises(UnsupportedStepError, match="no kernel for decode was asked for"):
        capture(world, StepKind.DECODE)
    verify.at()


@pytest.mark.parametrize("taken_before", [False, True])
def test_a_step_on_another_device_is_refused_before_the_memory_changes_hands(taken_before: bool) -> None:
    """Also where a step of the same layout was taken already, about which little is asked."""
    world = world_of(block_table=True, checking=False)
    meta, extend = capture(world, StepKind.DECODE), capture(world, StepKind.DRAFT_EXTEND)
    step = Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    if taken_before:
        world.backend.replay(meta, step)
        world.backend.replay(extend, Scene(world, Batch(StepKind.DRAFT_EXTEND, (5, 3))).step())
    elsewhere = {name: getattr(step, name).to("meta") for name in ("seq_lens", "out_cache_loc")}
    bad = replace(step, paging=replace(step.paging, table=step.paging.table.to("meta")), **elsewhere)
    with pytest.raises(UnsupportedStepError, match=r"tensors on meta \(the backend was built for cpu"):
        world.backend.replay(meta, bad)
    extend.at()


def test_a_part_of_the_table_is_refused_after_a_step_on_all_of_it() -> None:
    """It begins at the same address and has the same strides."""
    world = world_of(checking=False)
    meta, step = capture(world, StepKind.DECODE), Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    world.backend.replay(meta, step)
    part = replace(step.paging, table=step.paging.table[:-1])
    with pytest.raises(UnsupportedStepError, match="brings another one"):
        world.backend.replay(meta, replace(step, paging=part))


def test_the_same_table_elsewhere_is_refused() -> None:
    """A graph reads the table where it was captured; an engine may give the very tensor other memory."""
    world = world_of(checking=False)
    meta, step = capture(world, StepKind.DECODE), Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    world.backend.replay(meta, step)
    moved = replace(step, paging=replace(step.paging, table=step.paging.table.clone()))
    with pytest.raises(UnsupportedStepError, match="brings another one"):
        world.backend.replay(meta, moved)
    step.paging.table.data = step.paging.table.clone()
    with pytest.raises(UnsupportedStepError, match="brings another one"):
        world.backend.replay(meta, step)


def test_checking_mode_forgets_the_last_replay() -> None:
    """A planner that leaves something unwritten then leaves padding, and nothing that was right once."""
    world = world_of()
    meta, step = capture(world, StepKind.DECODE), Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    assert meta.captured is not None
    seen, bind = [], meta.captured.bind_inputs
    meta.captured.bind_inputs = lambda like: (
        lambda given: seen.append(int(meta.buffers["seqused_k"].max())) or bind(like)(given)
    )
    for _ in range(2):
        world.backend.replay(meta, step)
        assert meta.buffers["seqused_k"].max() == 6
    assert seen == [0, 0]


def test_guards_are_looked_at_before_the_next_phase() -> None:
    world = world_of()
    verify, extend = (capture(world, kind) for kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND))
    lens = extend.buffers["seqused_k"]
    lens.as_strided((1,), (1,), lens.storage_offset() + lens.numel()).zero_()
    with pytest.raises(CaptureError, match="seqused_k"):
        world.backend.replay(verify, Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 3))).step())
    with pytest.raises(CaptureError, match="seqused_k"):
        capture(world, StepKind.DECODE)


def test_an_idle_step_behind_a_packed_one_is_bound_again() -> None:
    world = world_of(checking=False)
    meta = world.backend.capture(TokenBucket(StepKind.PREFILL, 4, 12), world.paging())
    packed = Scene(world, Batch(StepKind.PREFILL, (5, 3), (2, 1))).step()
    idle = Scene(world, Batch(StepKind.IDLE, ())).step()
    bound, bind = [], meta.captured.bind_inputs
    meta.captured.bind_inputs = lambda like: bound.append(like) or bind(like)
    for step in (idle, packed, idle):
        world.backend.replay(meta, step)
    assert bound == [idle, packed, idle]


def test_a_capacity_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(checking=False)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 100)
    with pytest.raises(CaptureError, match=r"fa3 .* need [\d,]+ bytes and cpu has 100 free .*page_table [\d,]+.*lower"):
        capture(world, StepKind.DECODE)
    assert world.backend.memory.num_bytes == 0
    monkeypatch.undo()
    capture(world, StepKind.DECODE)


def pagings(geometry: CacheGeometry) -> list[Paging]:
    """Tables of both forms: what they hold does not count."""
    empty = torch.zeros(1, 0, dtype=torch.int32)
    return [RequestTable(empty, torch.zeros(0, dtype=torch.int64), geometry), BlockTable(empty, geometry)]


LARGE = [(backend, 64, topk, 4) for backend in (FA3Backend, TrtllmMLABackend) for topk in (1, 4)]
LARGE += [(backend, 1, 1, 140) for backend in (FA3Backend, FlashInferMLABackend)] + [(DSV4Backend, 256, 1, 10.5)]


@pytest.mark.parametrize(("backend", "page_size", "topk", "most"), LARGE)
def test_bytes_at_the_size_of_an_engine(
    backend: type[AttentionBackend], page_size: int, topk: int, most: float
) -> None:
    """128 requests of 131072 tokens, 4 steps: most MB of static buffers, raw inputs included, on a table in place."""
    capacity = Capacity(128, 131072, page_size, topk, 4, 5 if topk == 1 else 8)
    geometry = CacheGeometry(128 * capacity.max_pages + 1, page_size)
    kernels = backend(capacity, geometry, kernel="torch" if page_size != 64 else "auto")
    for paging in pagings(geometry):
        sizes = kernels.static_bytes(paging)
        assert set(sizes) == {"shared", *(kind for kind in UNIFORM_KINDS if kind in kernels.choices)}
        assert sum(sum(of_phase.values()) for of_phase in sizes.values()) <= most * MB
    assert kernels.memory.num_bytes == 0
