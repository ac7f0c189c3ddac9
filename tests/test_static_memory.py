"""Static memory: one allocation for all phases, as large as the largest, with one tenant at a time."""

from __future__ import annotations

import pytest
import torch

from attn_backends import static_memory
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.base import AttentionBackend, Metadata
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.situations import UNIFORM_KINDS
from attn_backends.conformance.worlds import MAX_BS, Setup, World
from attn_backends.errors import CaptureError
from attn_backends.static_memory import StaticMemory
from spec_metadata import BlockTable, CacheGeometry, Capacity, Paging, RequestTable, StepKind

MB = 2**20
BACKENDS = [FA3Backend, FlashInferMLABackend, ReferenceBackend, TrtllmMLABackend]


def world_of(backend: type[AttentionBackend] = FA3Backend, **options: object) -> World:
    return World(Setup(backend, CacheFormat.LATENT, 32, **options))


def capture(world: World, kind: StepKind, bs: int = MAX_BS) -> Metadata:
    return world.backend.capture(world.capacity.bucket(kind, bs), world.paging())


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("block_table", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_phases_lie_in_the_memory_of_the_largest(
    backend: type[AttentionBackend], block_table: bool, topk: int
) -> None:
    world = world_of(backend, topk=topk, block_table=block_table, checking=False)
    memory = world.backend.memory
    metas = [capture(world, UNIFORM_KINDS[0])]
    (allocated,) = memory._blocks
    metas += [capture(world, kind) for kind in UNIFORM_KINDS[1:]]
    sizes = world.backend.static_bytes(world.paging())
    largest = max(sum(of_phase.values()) for of_phase in sizes.values())
    assert largest <= memory.num_bytes == allocated.numel() <= largest + 256 * len(metas[0].buffers)
    for meta in metas:
        for name, tensor in meta.buffers.items():
            start = tensor.data_ptr() - allocated.data_ptr()
            assert 0 <= start <= allocated.numel() - tensor.numel() * tensor.element_size(), name
            assert tensor.numel() * tensor.element_size() == sizes[meta.bucket.kind][name], name


def test_backends_that_share_it_need_one_allocation() -> None:
    small, large = world_of(FA3Backend, checking=False), world_of(ReferenceBackend, checking=False)
    memory = StaticMemory()
    for world in (small, large):
        place = (world.capacity, world.geometry, world.device)
        world.backend = world.setup.backend(*place, kernel="torch", memory=memory)
    for world in (small, large):
        for kind in UNIFORM_KINDS:
            capture(world, kind)
    sizes = large.backend.static_bytes(large.paging())
    assert len(memory._blocks) == 1
    assert memory.num_bytes >= max(sum(of_phase.values()) for of_phase in sizes.values())


def test_metadata_is_stale_until_its_own_next_replay() -> None:
    world = world_of()
    verify, extend = (capture(world, kind) for kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND))
    message = r"metadata of \(target_verify bs=5 .*\) was overwritten by .* \(draft_extend bs=5 .*replay it again"
    for use in (verify.at, lambda: world.backend.refresh(verify)):
        with pytest.raises(CaptureError, match=message):
            use()
    world.backend.replay(verify, Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 3))).step())
    verify.at()
    with pytest.raises(CaptureError, match="draft_extend bs=5"):
        extend.at()


def test_a_refused_step_takes_the_memory_from_nobody() -> None:
    world = world_of()
    verify, extend = (capture(world, kind) for kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND))
    with pytest.raises(Exception, match="captured for"):
        world.backend.replay(verify, Scene(world, Batch(StepKind.DECODE, (5, 3))).step())
    extend.at()


def test_guards_are_looked_at_before_the_next_phase() -> None:
    world = world_of()
    verify, extend = (capture(world, kind) for kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND))
    lens = extend.buffers["seqused_k"]
    lens.as_strided((1,), (1,), lens.storage_offset() + lens.numel()).zero_()
    with pytest.raises(CaptureError, match="seqused_k"):
        world.backend.replay(verify, Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 3))).step())


def test_a_capacity_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(checking=False)
    monkeypatch.setattr(static_memory, "free_bytes", lambda device: 100)
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
LARGE += [(backend, 1, 1, 140) for backend in (FA3Backend, FlashInferMLABackend)] + [(DSV4Backend, 256, 1, 4)]


@pytest.mark.parametrize(("backend", "page_size", "topk", "most"), LARGE)
def test_bytes_at_the_size_of_an_engine(backend: type[AttentionBackend], page_size: int, topk: int, most: int) -> None:
    """128 requests of 131072 tokens, 4 steps: most MB of static buffers, raw inputs included."""
    capacity = Capacity(128, 131072, page_size, topk, 4, 5 if topk == 1 else 8)
    geometry = CacheGeometry(128 * capacity.max_pages + 1, page_size)
    kernels = backend(capacity, geometry, kernel="torch" if page_size != 64 else "auto")
    for paging in pagings(geometry):
        sizes = kernels.static_bytes(paging)
        assert set(sizes) == set(UNIFORM_KINDS)
        assert max(sum(of_phase.values()) for of_phase in sizes.values()) <= most * MB
    assert kernels.memory.num_bytes == 0
