"""Declared buffers: sizes, prefix views at stable addresses, guard words, ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import CaptureError, PlanError
from spec_metadata import (
    Arena,
    Bucket,
    Buffers,
    BufferSpec,
    Capacity,
    Extent,
    InvalidStepError,
    Producer,
    Step,
    StepKind,
    allocate,
)
from spec_metadata.buffers import BS, MAX_PAGES, NUM_FORWARDS, ONE, WIDTH, allocation_size, out_of_range
from tests.launches import CountsLaunches

CPU = torch.device("cpu")
CAPACITY = Capacity(max_bs=6, max_context=37, page_size=4, topk=2, num_steps=3, num_draft_tokens=7)
SPECS = (
    BufferSpec("indptr", torch.int32, (NUM_FORWARDS, BS + 1), "starts", high=MAX_PAGES),
    BufferSpec("pages", torch.int64, (BS, MAX_PAGES), "pages", pad=3),
    BufferSpec("flags", torch.bool, (BS * WIDTH,), "flags", pad=1),
    BufferSpec("bytes", torch.uint8, (ONE,), "bytes"),
)


def extent_of(bs: int) -> Extent:
    """The extent of a draft of `bs` requests."""
    return Extent.of_bucket(CAPACITY.bucket(StepKind.DRAFT_DECODE, bs), CAPACITY)


def test_sizes_are_printable_expressions() -> None:
    extent = extent_of(4)
    assert [spec.sizes(extent) for spec in SPECS] == [(2, 5), (4, 11), (8,), (1,)]
    assert str(BS * WIDTH + 1) == "bs * width + 1"
    assert str(SPECS[0]) == "indptr [num_forwards, bs + 1] int32, device: starts"
    fed = replace(SPECS[1], producer=Producer.HOST, over_read="the whole row")
    assert str(fed) == "pages [bs, max_pages] int64, host: pages; over-read: the whole row"


@pytest.mark.parametrize("kind", [k for k in StepKind if k not in (StepKind.PREFILL, StepKind.IDLE)])
@pytest.mark.parametrize("bs", [1, 4, 6])
def test_extent_of_a_bucket(kind: StepKind, bs: int) -> None:
    """Seed 002: every factor counts, and the context never stands alone."""
    extent = Extent.of_bucket(CAPACITY.bucket(kind, bs), CAPACITY)
    width = {"decode": 1, "draft_decode": 2, "draft_block": 7, "target_verify": 7, "draft_extend": 4}[kind]
    drafts = kind is StepKind.DRAFT_DECODE
    assert (extent.bs, extent.width, extent.num_tokens) == (bs, width, bs * width)
    assert extent.num_forwards == (2 if drafts else 1)
    assert extent.num_writes == bs * (2 * 3 if drafts else width)
    assert extent.max_pages == 11
    assert extent.max_kv_len == 44


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_draft_extend_that_runs_positions_again(num_steps: int) -> None:
    """Its window begins at position 0 in a short request, and room past the committed tokens is for that, too."""
    shape = (1, num_steps, num_steps + 1)
    capacity, eagle = Capacity(6, 37, 4, *shape, num_rerun=num_steps - 1), Capacity(6, 37, 4, *shape)
    assert eagle.bucket(StepKind.DRAFT_EXTEND, 2).width == num_steps + 1
    bucket = capacity.bucket(StepKind.DRAFT_EXTEND, 2)
    assert bucket.width == capacity.extend_width == 2 * num_steps
    assert Extent.of_bucket(bucket, capacity).num_tokens == 4 * num_steps
    reached = [max(n + num_steps + 1, max(n - capacity.num_rerun, 0) + bucket.width) - n for n in range(1, 38)]
    assert capacity.draft_room == max(reached)
    others = (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)
    assert [capacity.bucket(kind, 2) for kind in others] == [eagle.bucket(kind, 2) for kind in others]


@pytest.mark.parametrize("checking", [False, True])
def test_views_keep_addresses_and_strides(checking: bool) -> None:
    arena = Arena(SPECS, extent_of(6), CPU, checking=checking)
    full = arena.view(extent_of(6))
    assert arena.num_bytes == 2 * 7 * 4 + 6 * 11 * 8 + 12 + 1
    for bs in (1, 4, 6):
        view = arena.view(extent_of(bs))
        assert set(view) == {"indptr", "pages", "flags", "bytes"}
        assert len(view) == 4
        for spec in SPECS:
            tensor = view[spec.name]
            assert tensor.shape == spec.sizes(extent_of(bs))
            assert tensor.dtype is spec.dtype
            assert tensor.data_ptr() == full[spec.name].data_ptr()
            assert tensor.stride() == full[spec.name].stride()
            assert bool((tensor == spec.pad).all())
    arena.view(extent_of(1))["pages"].fill_(9)
    assert full["pages"][0].tolist() == [9] * 11
    assert full["pages"][1].tolist() == [3] * 11


def test_fresh_buffers_are_written_at_once() -> None:
    """Those of one padding byte in one launch; every pad stands, and nothing beside is written."""
    pads = (0, 0, -1, -1, 3, 0)
    specs = [BufferSpec(f"b{place}", torch.int32, (BS, MAX_PAGES), "", pad=pad) for place, pad in enumerate(pads)]
    memory = torch.full((allocation_size(specs, extent_of(3)) + 8,), 7, dtype=torch.uint8)
    with CountsLaunches() as launches:
        arena = Arena(specs, extent_of(3), CPU, memory=memory)
    assert launches.num == 3
    assert [set(each.flatten().tolist()) for each in arena.view(extent_of(3)).values()] == [{pad} for pad in pads]
    assert memory[-8:].tolist() == 8 * [7]
    with CountsLaunches() as launches:
        Arena((*FA3Backend.buffers(StepKind.DECODE), *TrtllmMLABackend.buffers(StepKind.DECODE)), extent_of(3), CPU)
    assert launches.num == 1


def test_view_above_the_declared_size_is_refused() -> None:
    arena = Arena(SPECS, extent_of(3), CPU)
    with pytest.raises(InvalidStepError, match=r"indptr \[num_forwards, bs \+ 1\] needs \(2, 5\).*\(2, 4\)"):
        arena.view(extent_of(4))


def test_two_buffers_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidStepError, match="share a name"):
        Arena((*SPECS, SPECS[0]), extent_of(2), CPU)


@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_guard_words_see_a_write_next_to_a_buffer(name: str, before: bool) -> None:
    arena = Arena(SPECS, extent_of(3), CPU, checking=True)
    buffer = arena.view(extent_of(3))[name]
    buffer.fill_(0)
    assert arena.check_guards() == []
    offset = buffer.storage_offset() + (-1 if before else buffer.numel())
    buffer.as_strided((1,), (1,), offset).zero_()
    assert arena.check_guards() == [name]


def test_a_backend_reports_broken_guard_words() -> None:
    world = World(Setup(FA3Backend, CacheFormat.KV, 4))
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 5), world.paging())
    world.backend.phases.check()
    last = meta.buffers["page_table"]
    last.as_strided((1,), (1,), last.storage_offset() + last.numel()).zero_()
    with pytest.raises(CaptureError, match="page_table"):
        world.backend.phases.check()


@pytest.mark.parametrize(("value", "problem"), [(10, False), (11, True), (-1, True), (0, False)])
def test_range_check(value: int, problem: bool) -> None:
    buffers = allocate(SPECS, extent_of(3), CPU)
    assert out_of_range(SPECS, buffers) == []
    buffers["indptr"][1, 2] = value
    problems = out_of_range(SPECS, buffers)
    assert bool(problems) == problem
    assert not problem or (f"{value}" in problems[0] and "indptr" in problems[0] and "[0, 11)" in problems[0])


def test_range_check_of_no_elements() -> None:
    empty = Buffers({spec.name: torch.empty(0) for spec in SPECS}, extent_of(1))
    assert out_of_range(SPECS, empty) == []


def test_a_buffer_is_written_into_and_never_replaced() -> None:
    buffers = allocate(SPECS, extent_of(1), CPU)
    name = SPECS[0].name
    with pytest.raises(TypeError, match=rf"write into the buffer, which a graph reads: buffers\['{name}'\].copy_"):
        buffers[name] = buffers[name].clone()


BACKENDS = [FA3Backend, FlashInferMLABackend, ReferenceBackend, TrtllmMLABackend]
RANGED = [(b, spec.name) for b in BACKENDS for spec in b.buffers(StepKind.TARGET_VERIFY) if spec.high is not None]


@pytest.mark.parametrize("value", [-1, 2**30])
@pytest.mark.parametrize(("backend", "name"), RANGED)
def test_a_plan_outside_its_declaration_is_caught(
    backend: type[AttentionBackend], name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking mode looks at every buffer with a declared range."""
    world = World(Setup(backend, CacheFormat.LATENT, 32))
    step = Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 3))).step()
    write = world.backend.write

    def spoiled(step: Step, buffers: Buffers) -> None:
        write(step, buffers)
        buffers[name].view(-1)[-1:].fill_(value)

    world.backend.init_forward_metadata(step)
    monkeypatch.setattr(world.backend, "write", spoiled)
    with pytest.raises(PlanError, match=f"planned outside its declaration: {name} holds"):
        world.backend.init_forward_metadata(step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_buckets_of_a_backend_share_one_allocation(backend: type[AttentionBackend]) -> None:
    world = World(Setup(backend, CacheFormat.LATENT, 32))
    metas = [
        world.backend.capture(world.capacity.bucket(StepKind.TARGET_VERIFY, bs), world.paging()) for bs in (5, 2, 3)
    ]
    for name, tensor in metas[0].buffers.items():
        for meta in metas[1:]:
            assert meta.buffers[name].data_ptr() == tensor.data_ptr(), name
            assert meta.buffers[name].stride() == tensor.stride(), name


def test_bucket_names_itself() -> None:
    assert str(CAPACITY.bucket(StepKind.DRAFT_DECODE, 3)) == "draft_decode tree bs=3 width=2 num_steps=3"
    assert str(Bucket(StepKind.DECODE, 2, 1)) == "decode bs=2 width=1"
