"""What backends refuse, with nothing written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat, KeyValues, Latents, PagedKV
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.conformance.worlds import Setup, World, view_of
from attn_backends.errors import BackendUnavailableError, CaptureError, UnsupportedStepError
from attn_backends.planning.metadata import Metadata
from spec_metadata import BlockTable, RequestTable, Step, StepKind, UniformQuery
from tests.backend_worlds import GRAPH_KINDS, KV, LATENT, MID, assert_refused, nothing_written, ready


def captured(world: World, kind: StepKind, bs: int = 2) -> Metadata:
    """Captured metadata that describes a batch."""
    meta = world.backend.capture(world.capacity.bucket(kind, bs), world.paging())
    world.backend.replay(meta, Scene(world, Batch(kind, (5, 3))).step())
    return meta


@pytest.mark.parametrize("setup", MID, ids=str)
def test_captured_graph_refuses_packed_draft_extend(setup: Setup) -> None:
    world = World(setup)
    meta = captured(world, StepKind.DRAFT_EXTEND)
    step = Scene(world, Batch(StepKind.DRAFT_EXTEND, (5, 3), (4, 4))).step()
    for call in (world.backend.replay, world.backend.copy_inputs):
        with (
            nothing_written(world, meta),
            pytest.raises(UnsupportedStepError, match=r"packed query \(lengths \(4, 4\)"),
        ):
            call(meta, step)


@pytest.mark.parametrize("setup", MID, ids=str)
def test_captured_graph_refuses_what_it_was_not_captured_for(setup: Setup) -> None:
    world = World(setup)
    meta = captured(world, StepKind.TARGET_VERIFY)
    step = Scene(world, Batch(StepKind.TARGET_VERIFY, (5, 3))).step()
    other_table = RequestTable(world.table.clone(), torch.tensor([0, 2]), world.geometry)
    pages = BlockTable(torch.zeros(2, world.capacity.max_pages, dtype=torch.int32), world.geometry)
    mask = torch.eye(4, dtype=torch.bool).expand(2, -1, -1)
    slots = step.out_cache_loc
    misfits = {
        "width=4.*width=3": Step.target_verify(3, step.seq_lens, step.paging, slots[:6]),
        "target_verify.*draft_extend": Step.draft_extend(UniformQuery(4), step.seq_lens, step.paging, slots),
        "tree": Step.target_verify(4, step.seq_lens, step.paging, slots, tree_mask=mask),
        "brings another one": Step.target_verify(4, step.seq_lens, other_table, slots),
        "has a BlockTable": Step.target_verify(4, step.seq_lens, pages, slots),
        "for 2 requests, the step has 3": Scene(world, Batch(StepKind.TARGET_VERIFY, (1, 2, 3))).step(),
    }
    for reason, misfit in misfits.items():
        with nothing_written(world, meta), pytest.raises(UnsupportedStepError, match=reason) as error:
            world.backend.replay(meta, misfit)
        assert "run the step eagerly" in str(error.value)


def test_captured_draft_refuses_another_depth() -> None:
    world = World(Setup(FA3Backend, KV, 4))
    meta = captured(world, StepKind.DRAFT_DECODE)
    step = Step.draft_decode(1, 2, torch.tensor([3, 4]), world.paging(torch.tensor([0, 2])))
    with nothing_written(world, meta), pytest.raises(UnsupportedStepError, match=r"num_steps=3.*num_steps=2"):
        world.backend.replay(meta, step)


def test_what_is_no_metadata_is_neither_replayed_nor_refreshed() -> None:
    world = World(Setup(FA3Backend, KV, 4))
    meta = captured(world, StepKind.DECODE)
    step = Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    wrong: tuple[Any, ...] = (None, step, meta.at())
    for each in wrong:
        for call in (partial(world.backend.replay, each, step), partial(world.backend.refresh, each)):
            with (
                nothing_written(world, meta),
                pytest.raises(UnsupportedStepError, match=f"a {type(each).__name__} where a step's metadata belongs"),
            ):
                call()


@pytest.mark.parametrize("checking", [False, True])
def test_a_replay_does_not_take_the_static_step_that_it_overwrites(checking: bool) -> None:
    world = World(Setup(FA3Backend, KV, 4, checking=checking))
    meta = captured(world, StepKind.DECODE)
    for call in (world.backend.replay, world.backend.copy_inputs):
        with nothing_written(world, meta), pytest.raises(CaptureError, match="pass a step of tensors of your own"):
            call(meta, meta.step)


def test_replay_takes_captured_metadata_only() -> None:
    world = World(Setup(FA3Backend, KV, 4))
    step = Scene(world, Batch(StepKind.DECODE, (5, 3))).step()
    meta = world.backend.init_forward_metadata(step)
    with nothing_written(world, meta), pytest.raises(CaptureError, match="eager"):
        world.backend.replay(meta, step)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", [StepKind.PREFILL, *GRAPH_KINDS])
def test_page_size_that_a_backend_lacks(page_size: int, kind: StepKind) -> None:
    world = World(Setup(TrtllmMLABackend, LATENT, page_size))
    widths = (2, 1) if kind is StepKind.PREFILL else ()
    assert_refused(world, Batch(kind, (5, 3), widths), f"page size {page_size} .it takes 32, 64")
    if kind is not StepKind.PREFILL:
        with pytest.raises(UnsupportedStepError, match=f"page size {page_size}"):
            world.backend.capture(world.capacity.bucket(kind, 2), world.paging())


@pytest.mark.parametrize("setup", MID, ids=str)
def test_more_requests_than_the_capacity(setup: Setup) -> None:
    world = World(setup)
    lens = torch.ones(MAX_BS + 1, dtype=torch.int64)
    rows = torch.tensor([0, 2, 3, 4, 5, 6])
    with nothing_written(world), pytest.raises(UnsupportedStepError, match=f"max_bs={MAX_BS}"):
        world.backend.init_forward_metadata(Step.decode(lens, world.paging(rows), torch.arange(MAX_BS + 1)))
    with pytest.raises(CaptureError, match=f"max_bs={MAX_BS}"):
        world.backend.capture(world.capacity.bucket(StepKind.DECODE, MAX_BS + 1), world.paging())


def test_geometry_that_is_not_the_backends() -> None:
    world, other = World(Setup(FA3Backend, KV, 16)), World(Setup(FA3Backend, KV, 4))
    step = Scene(other, Batch(StepKind.DECODE, (5, 3))).step()
    with nothing_written(world), pytest.raises(UnsupportedStepError, match="a table over CacheGeometry"):
        world.backend.init_forward_metadata(step)
    with pytest.raises(UnsupportedStepError, match="page size 16, the cache 4"):
        FA3Backend(world.capacity, other.geometry)


def test_unknown_kernel() -> None:
    world = World(Setup(FA3Backend, KV, 16))
    with pytest.raises(BackendUnavailableError, match=r"'flash_attn_4'.*torch"):
        FA3Backend(world.capacity, world.geometry, kernel="flash_attn_4")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [({"window": 4}, "sliding window of 4"), ({"sinks": torch.zeros(3)}, "attention sinks")],
    ids=["window", "sinks"],
)
@pytest.mark.parametrize("setup", [each for each in MID if each.backend.formats == {LATENT}], ids=str)
def test_layer_extras_that_a_kernel_lacks(setup: Setup, extra: dict[str, Any], reason: str) -> None:
    check_refused(setup, extra, reason)


@pytest.mark.parametrize("extra", [{"k_scale": 0.5}, {"v_scale": 2.0}], ids=["k_scale", "v_scale"])
@pytest.mark.parametrize("setup", [setup for setup in MID if setup.format is LATENT], ids=str)
def test_latents_have_one_scale(setup: Setup, extra: dict[str, float]) -> None:
    check_refused(setup, extra, "which are key and value at once")


def check_refused(setup: Setup, extra: dict[str, Any], reason: str) -> None:
    """A layer with an extra is refused, and nothing written."""
    world, meta, given = ready(setup)
    layer = replace(world.layer, **extra)
    with nothing_written(world), pytest.raises(UnsupportedStepError, match=reason):
        world.backend.store(given.stored, world.cache, meta, layer)
    with nothing_written(world), pytest.raises(UnsupportedStepError, match=reason):
        world.backend.forward(given.q, world.cache, meta, layer)


@pytest.mark.parametrize("setup", MID, ids=str)
def test_query_of_another_shape_or_type(setup: Setup) -> None:
    world, meta, given = ready(setup)
    for q in (given.q[:1], given.q[:, :1], given.q[..., :1], given.q.flatten(1)):
        with pytest.raises(UnsupportedStepError, match="q is"):
            world.backend.forward(q, world.cache, meta, world.layer)
    with pytest.raises(UnsupportedStepError, match=r"torch\.int32"):
        world.backend.forward(given.q.int(), world.cache, meta, world.layer)


@pytest.mark.parametrize("setup", MID, ids=str)
def test_cache_of_another_geometry_or_format(setup: Setup) -> None:
    world, meta, given = ready(setup)
    memory = world.memory
    caches = {
        "holds 9 pages": view_of(memory[:9], setup.format),
        "of 16 tokens": view_of(memory.unflatten(1, (2, 16)).flatten(0, 1), setup.format),
    }
    if setup.backend in (FlashInferMLABackend, TrtllmMLABackend):
        caches["a cache of kv"] = PagedKV(memory[:, :, 0], memory[:, :, 1])
    for reason, cache in caches.items():
        with nothing_written(world), pytest.raises(UnsupportedStepError, match=reason):
            world.backend.store(given.stored, cache, meta, world.layer)
        with pytest.raises(UnsupportedStepError, match=reason):
            world.backend.forward(given.q, cache, meta, world.layer)


@pytest.mark.parametrize("setup", MID, ids=str)
def test_store_refuses_inputs_that_do_not_fit(setup: Setup) -> None:
    """Fewer rows or heads than the cache takes would be broadcast, silently."""
    world, meta, given = ready(setup)
    kv = setup.format is CacheFormat.KV
    tensors = given.tensors()[1:]
    kind = KeyValues if kv else Latents
    wrong = [kind(*(t[:1] for t in tensors)), kind(*(t[..., :1] for t in tensors))]
    if kv:
        k, v = tensors
        wrong += [KeyValues(k[:, :1], v[:, :1]), KeyValues(k, v[..., :5]), Latents(k[:, 0])]
    else:
        wrong.append(KeyValues(tensors[0].unsqueeze(1), tensors[0].unsqueeze(1)))
    for inputs in wrong:
        with nothing_written(world), pytest.raises(UnsupportedStepError):
            world.backend.store(inputs, world.cache, meta, world.layer)


@pytest.mark.parametrize("setup", MID, ids=str)
def test_layer_that_is_not_the_caches(setup: Setup) -> None:
    world, meta, given = ready(setup)
    heads = world.layer.num_heads
    layer = replace(world.layer, num_kv_heads=heads)
    with pytest.raises(UnsupportedStepError):
        world.backend.forward(given.q, world.cache, meta, layer)
    layer = replace(world.layer, v_head_dim=world.layer.v_head_dim - 1)
    with pytest.raises(UnsupportedStepError):
        world.backend.forward(given.q, world.cache, meta, layer)
