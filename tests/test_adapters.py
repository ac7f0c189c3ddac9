"""Batches of the engines' shapes become the step that their tokens say, and compute what the oracle says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.adapters import sglang, tensorrt_llm, vllm
from attn_backends.adapters.batch import BlockTableBatch
from attn_backends.cache import KeyValues
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import NUM_STEPS
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionOutput
from spec_metadata import CacheGeometry, InvalidStepError, PackedQuery, RequestTable, Step, StepKind
from tests.checks import check_memory, check_outputs
from tests.engine_batches import (
    BATCHES,
    KINDS,
    LENS,
    READERS,
    Mode,
    cache_manager,
    common_metadata,
    data_parallel_padded,
    forward_batch,
    paged_scene,
    read_trtllm,
    read_vllm,
    sglang_scene,
    sglang_steps,
    trtllm_metadata,
)

MIXED_WIDTH = 4
RUNNING_FIRST = Batch(StepKind.PREFILL, (5, 8, 0, 3), widths=(MIXED_WIDTH, MIXED_WIDTH, 6, 2))
PROMPTS_FIRST = Batch(StepKind.PREFILL, (0, 3, 5, 8), widths=(6, 2, MIXED_WIDTH, MIXED_WIDTH))
META = torch.device("meta")


def name_situation(batch: BlockTableBatch, kind: StepKind) -> Step:
    """What a worker says of a batch."""
    if kind is StepKind.DRAFT_DECODE:
        return batch.draft_decode(NUM_STEPS)
    return getattr(batch, kind.value)()


def assert_same_step(actual: Step, scene: Scene) -> None:
    """The adapter's step is the one that the scene builds from its tokens."""
    expected = scene.step()
    assert actual.kind is expected.kind
    assert type(actual.query) is type(expected.query)
    if isinstance(actual.query, PackedQuery) and isinstance(expected.query, PackedQuery):
        assert actual.query.lens_cpu == expected.query.lens_cpu
        assert actual.query.cu_seqlens.tolist() == expected.query.cu_seqlens.tolist()
    assert (actual.bs, actual.width, actual.num_steps) == (expected.bs, expected.width, expected.num_steps)
    assert actual.seq_lens.tolist() == expected.seq_lens.tolist()
    assert actual.flat_slots().tolist() == expected.flat_slots().tolist()
    assert actual.num_real == len(scene.requests)
    assert (actual.tree_mask is None) is (expected.tree_mask is None)
    if actual.tree_mask is not None and expected.tree_mask is not None:
        assert torch.equal(actual.tree_mask, expected.tree_mask)
    assert actual.max_committed is None or actual.max_committed >= max(scene.batch.lens)
    assert actual.seq_lens_cpu in (None, scene.batch.lens)
    for index, request in enumerate(scene.requests):
        slots = actual.paging.slots(torch.arange(request.length).expand(actual.bs, -1))
        assert slots[index].tolist() == [request.slots[position] for position in range(request.length)]


def compute(scene: Scene, parts: list[tuple[Step, slice]]) -> None:
    """Run the steps that together are the scene, each on its rows, against the oracle: outputs, LSE and writes."""
    world, inputs = scene.world, scene.inputs()
    before = scene.reset_memory()
    metas = [(world.backend.init_forward_metadata(step), rows) for step, rows in parts]
    outputs = []
    for forward, given in enumerate(inputs):
        assert isinstance(given.stored, KeyValues)
        results = []
        for meta, rows in metas:
            at = meta.at(forward, given.ancestors)
            stored = KeyValues(given.stored.k[rows], given.stored.v[rows])
            world.backend.store(stored, world.cache, at, world.layer)
            results.append((rows.start, world.backend.forward(given.q[rows], world.cache, at, world.layer)))
        ordered = [result for _, result in sorted(results, key=lambda item: item[0])]
        outputs.append(AttentionOutput(*(torch.cat(tensors) for tensors in zip(*ordered, strict=True))))
    check_memory(scene, before)
    check_outputs(scene, inputs, outputs)


@pytest.mark.parametrize("padded", [False, True], ids=["alone", "data_parallel"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_sglang_step_is_the_tokens_step(kind: StepKind, page_size: int, dtype: torch.dtype, padded: bool) -> None:
    scene = sglang_scene(kind, page_size)
    batch = forward_batch(scene, dtype)
    step = sglang_steps(scene).step(data_parallel_padded(batch) if padded else batch)
    assert_same_step(step, scene)
    assert isinstance(step.paging, RequestTable)
    assert step.max_committed is not None
    assert step.max_committed < 900, "a padded row counts"
    assert step.paging.table is scene.world.table, "a captured graph reads the engine's table in place"
    compute(scene, [(step, slice(0, None))])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", [StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY])
def test_sglang_tree_is_the_tokens_tree(kind: StepKind, page_size: int) -> None:
    scene = sglang_scene(kind, page_size, topk=3)
    step = sglang_steps(scene).step(forward_batch(scene))
    assert step.is_tree
    assert_same_step(step, scene)
    compute(scene, [(step, slice(0, None))])


def test_sglang_mixed_is_a_prefill_whose_running_requests_have_one_token() -> None:
    scene = sglang_scene(StepKind.PREFILL)
    step = sglang_steps(scene).step(forward_batch(scene, forward_mode=Mode.MIXED))
    assert_same_step(step, scene)


def test_sglang_idle_has_no_rows_whatever_it_was_padded_to() -> None:
    scene = sglang_scene(StepKind.DECODE)
    idle = forward_batch(scene, forward_mode=Mode.IDLE)
    relabelled = forward_batch(
        scene, forward_mode=Mode.EXTEND, _original_forward_mode=Mode.IDLE, _original_batch_size=0
    )
    only_padding = data_parallel_padded(forward_batch(scene, batch_size=0))
    for batch in (idle, relabelled, only_padding):
        step = sglang_steps(scene).step(batch)
        assert (step.kind, step.bs) == (StepKind.IDLE, 0)


def test_sglang_decode_relabelled_as_extend_stays_a_decode() -> None:
    scene = sglang_scene(StepKind.DECODE)
    batch = forward_batch(scene, forward_mode=Mode.EXTEND, _original_forward_mode=Mode.DECODE)
    assert_same_step(sglang_steps(scene).step(batch), scene)


def test_sglang_without_a_host_mirror_promises_no_bound() -> None:
    scene = sglang_scene(StepKind.TARGET_VERIFY)
    step = sglang_steps(scene).step(forward_batch(scene, seq_lens_cpu=None))
    assert (step.max_committed, step.seq_lens_cpu) == (None, None)
    mirrored = sglang_steps(scene).step(forward_batch(scene))
    assert (mirrored.max_committed, mirrored.seq_lens_cpu) == (max(LENS), LENS)


@pytest.mark.parametrize("engine", ["sglang", *READERS])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not StepKind.PREFILL])
def test_a_graph_takes_the_step_unpadded(kind: StepKind, engine: str) -> None:
    if engine == "sglang":
        scene = sglang_scene(kind)
        step = sglang_steps(scene).step(data_parallel_padded(forward_batch(scene)))
    else:
        scene = paged_scene(BATCHES[kind])
        step = name_situation(READERS[engine](scene), kind)
    world = scene.world
    meta = world.backend.capture(world.capacity.bucket(kind, 5), world.paging())
    world.backend.replay(meta, step)
    assert meta.step.seq_lens.tolist() == [*LENS, 0, 0]
    assert meta.step.num_real.tolist() == [3]
    assert meta.step.out_cache_loc[: step.num_writes].tolist() == scene.write_order()


def test_geometries_reserve_what_the_engines_reserve() -> None:
    assert sglang.geometry(size=64, page_size=16) == CacheGeometry(5, 16, reserved_page=0, reserved_row=0)
    assert vllm.geometry(num_blocks=10, block_size=16) == CacheGeometry(10, 16, reserved_page=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", READERS)
def test_block_table_step_is_the_tokens_step(engine: str, kind: StepKind, page_size: int, dtype: torch.dtype) -> None:
    scene = paged_scene(BATCHES[kind], page_size)
    batch = READERS[engine](scene, dtype)
    step = name_situation(batch, kind)
    assert_same_step(step, scene)
    compute(scene, [(step, batch.rows)])


def test_vllm_mixed_batch_is_two_steps() -> None:
    scene = paged_scene(RUNNING_FIRST)
    batch = read_vllm(scene)
    assert batch.leading(MIXED_WIDTH) == 2
    running, prompts = batch.split(batch.leading(MIXED_WIDTH))
    assert (running.rows, prompts.rows) == (slice(0, 8), slice(8, 16))
    steps = [(running.target_verify(), running.rows), (prompts.prefill(), prompts.rows)]
    assert [step.seq_lens.tolist() for step, _ in steps] == [[5, 8], [0, 3]]
    compute(scene, steps)


def test_tensorrt_llm_mixed_batch_is_two_steps() -> None:
    scene = paged_scene(PROMPTS_FIRST)
    metadata = trtllm_metadata(scene, num_contexts=2)
    world = scene.world
    batch = tensorrt_llm.read(metadata, cache_manager(scene), world.geometry, world.capacity)
    prompts, running = batch.split(metadata.num_contexts)
    compute(scene, [(running.draft_extend(), running.rows), (prompts.prefill(), prompts.rows)])


def test_a_part_without_requests_is_idle() -> None:
    batch = read_vllm(paged_scene(BATCHES[StepKind.DECODE]))
    everything, nothing = batch.split(batch.bs)
    assert everything.bs == 3
    assert nothing.idle().kind is StepKind.IDLE
    with pytest.raises(InvalidStepError, match="this batch has 3"):
        everything.idle()
    with pytest.raises(InvalidStepError, match="a batch of 3 requests can't be split after 4"):
        batch.split(4)


def test_vllm_row_without_a_slot_writes_to_the_reserved_page() -> None:
    scene = paged_scene(BATCHES[StepKind.DECODE])
    common = common_metadata(scene)
    common.slot_mapping[1] = -1
    step = vllm.read(common, scene.world.geometry).decode()
    assert step.out_cache_loc[1] == scene.world.geometry.reserved_page * scene.world.geometry.page_size


def test_tensorrt_llm_table_is_as_wide_as_the_capacity() -> None:
    scene = paged_scene(BATCHES[StepKind.DECODE])
    table = read_trtllm(scene).paging.table
    assert table.shape == (3, scene.world.capacity.max_pages)
    assert (table[:, -1] == scene.world.geometry.reserved_page).all()


@pytest.mark.parametrize("width", [3, 33, 40])
def test_tensorrt_llm_tree_mask_is_read_bit_by_bit(width: int) -> None:
    mask = (torch.rand(2, width, width) < 0.3) | torch.eye(width, dtype=torch.bool)
    packed = torch.zeros(2, width, -(-width // 32), dtype=torch.int64)
    for request, row, column in mask.nonzero().tolist():
        packed[request, row, column // 32] |= 1 << (column % 32)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    assert torch.equal(tensorrt_llm.unpack_tree_mask(packed), mask)


def test_tree_mask_of_a_block_table_batch_reaches_the_step() -> None:
    batch = read_trtllm(paged_scene(BATCHES[StepKind.TARGET_VERIFY]))
    mask = torch.eye(4, dtype=torch.bool).expand(3, -1, -1)
    assert batch.target_verify(mask).tree_mask is mask


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_reads_nothing_on_the_device(kind: StepKind) -> None:
    scene = sglang_scene(kind, topk=3 if kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY) else 1)
    batch = on_meta(forward_batch(scene), mirrors={"seq_lens_cpu"})
    world = scene.world
    steps = sglang.ForwardBatches(world.table.to(META), world.geometry, world.setup.topk, NUM_STEPS)
    assert steps.step(batch).device == META


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_reads_nothing_on_the_device(kind: StepKind) -> None:
    scene = paged_scene(BATCHES[kind])
    common = on_meta(common_metadata(scene), mirrors={"query_start_loc_cpu"})
    assert name_situation(vllm.read(common, scene.world.geometry), kind).device == META


@pytest.mark.parametrize("kind", KINDS)
def test_tensorrt_llm_reads_nothing_on_the_device(kind: StepKind) -> None:
    scene = paged_scene(BATCHES[kind])
    metadata = on_meta(trtllm_metadata(scene), mirrors={"seq_lens"})
    batch = tensorrt_llm.read(metadata, cache_manager(scene), scene.world.geometry, scene.world.capacity)
    assert name_situation(batch, kind).device == META


def on_meta(batch: SimpleNamespace, mirrors: set[str]) -> SimpleNamespace:
    """The batch with its device tensors on a device that has no values, so that reading one raises."""
    moved = {
        name: value.to(META)
        if isinstance(value, Tensor) and name not in mirrors
        else on_meta(value, set())
        if isinstance(value, SimpleNamespace)
        else value
        for name, value in vars(batch).items()
    }
    return SimpleNamespace(**moved)


@pytest.mark.parametrize(
    ("kind", "fields", "error", "message"),
    [
        (StepKind.PREFILL, {"extend_seq_lens_cpu": None}, InvalidStepError, "extend_seq_lens_cpu is None"),
        (StepKind.PREFILL, {"extend_prefix_lens": None}, InvalidStepError, "extend_prefix_lens is None"),
        (StepKind.DECODE, {"forward_mode": Mode.PREBUILT}, UnsupportedStepError, "forward mode PREBUILT"),
        (StepKind.DECODE, {"encoder_lens": torch.ones(3)}, UnsupportedStepError, "cross-attention \\(encoder_lens\\)"),
        (StepKind.DECODE, {"out_cache_loc_virtual": torch.ones(3)}, UnsupportedStepError, "virtual slots"),
        (StepKind.DECODE, {"seq_lens_cpu": torch.ones(3, device=META)}, InvalidStepError, "seq_lens_cpu is on meta"),
        (StepKind.DECODE, {"out_cache_loc": torch.ones(2).int()}, InvalidStepError, r"must be \[3\] int32 or int64"),
        (StepKind.DECODE, {"out_cache_loc": None}, InvalidStepError, "ForwardBatch.out_cache_loc is None"),
        (
            StepKind.DRAFT_DECODE,
            {"spec_info": SimpleNamespace(num_tokens_per_req=2)},
            InvalidStepError,
            "drafts 2 branches .* made for topk=1",
        ),
        (
            StepKind.DRAFT_EXTEND,
            {"spec_info": SimpleNamespace(num_front_tokens=2)},
            UnsupportedStepError,
            "2 tokens before the committed length",
        ),
    ],
)
def test_sglang_refuses(kind: StepKind, fields: dict[str, Any], error: type[Exception], message: str) -> None:
    scene = sglang_scene(kind)
    with pytest.raises(error, match=message):
        sglang_steps(scene).step(forward_batch(scene, **fields))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"query_start_loc_cpu": None}, InvalidStepError, "query_start_loc_cpu is None"),
        ({"query_start_loc_cpu": torch.zeros(4, device=META)}, InvalidStepError, "query_start_loc_cpu is on meta"),
        ({"query_start_loc_cpu": torch.tensor([0, 1, 2])}, InvalidStepError, "holds 3 row starts for 5 requests"),
        ({"query_start_loc_cpu": torch.tensor([0, 1, 1, 2, 2, 2])}, InvalidStepError, r"\[1, 0, 1\] query rows"),
        ({"slot_mapping": torch.zeros(2).int()}, InvalidStepError, "2 slots for 3 query rows"),
        ({"causal": False}, UnsupportedStepError, "not causal"),
        ({"causal": torch.ones(3)}, UnsupportedStepError, "not causal"),
        ({"dcp_local_seq_lens": torch.ones(3)}, UnsupportedStepError, "decode context parallelism"),
    ],
)
def test_vllm_refuses(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    scene = paged_scene(BATCHES[StepKind.DECODE])
    common = SimpleNamespace(**{**vars(common_metadata(scene)), **fields})
    with pytest.raises(error, match=message):
        vllm.read(common, scene.world.geometry)


def test_vllm_rows_that_see_one_another_are_a_draft_block() -> None:
    scene = paged_scene(BATCHES[StepKind.TARGET_VERIFY])
    common = common_metadata(scene)
    verify = vllm.read(common, scene.world.geometry).target_verify()
    with pytest.raises(UnsupportedStepError, match=r"rows that are causal \(causal\)"):
        vllm.read_block(common, scene.world.geometry)
    common.causal = False
    step = vllm.read_block(common, scene.world.geometry)
    assert (step.kind, step.width, step.max_committed) == (StepKind.DRAFT_BLOCK, verify.width, verify.max_committed)
    assert step.seq_lens.tolist() == list(scene.batch.lens)
    assert step.flat_slots().tolist() == scene.write_order()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"seq_lens": None}, InvalidStepError, "AttentionMetadata.seq_lens is None"),
        ({"request_ids": None}, InvalidStepError, "request_ids is None"),
        ({"kv_lens_cuda": None}, InvalidStepError, "kv_lens_cuda is None"),
        ({"beam_width": 2}, UnsupportedStepError, "beam_width=2"),
        ({"is_cross": True}, UnsupportedStepError, "is_cross"),
        ({"kv_cache_params": SimpleNamespace(use_cache=False)}, UnsupportedStepError, "without a KV cache"),
        ({"sparse_metadata_params": object()}, UnsupportedStepError, "sparse attention"),
    ],
)
def test_tensorrt_llm_refuses(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    scene = paged_scene(BATCHES[StepKind.DECODE])
    metadata = SimpleNamespace(**{**vars(trtllm_metadata(scene)), **fields})
    with pytest.raises(error, match=message):
        tensorrt_llm.read(metadata, cache_manager(scene), scene.world.geometry, scene.world.capacity)


def test_tensorrt_llm_refuses_another_page_size() -> None:
    scene = paged_scene(BATCHES[StepKind.DECODE])
    with pytest.raises(InvalidStepError, match="has 4 tokens per block, the geometry pages of 8"):
        tensorrt_llm.read(trtllm_metadata(scene), cache_manager(scene), CacheGeometry(99, 8), scene.world.capacity)


def test_situations_that_a_batch_is_not_are_refused() -> None:
    mixed = read_vllm(paged_scene(RUNNING_FIRST))
    for name_it in (mixed.decode, mixed.target_verify, mixed.draft_extend, lambda: mixed.draft_decode(3)):
        with pytest.raises(UnsupportedStepError, match=r"one width, the requests have \[4, 4, 6, 2\] query rows"):
            name_it()
    running, _ = mixed.split(2)
    with pytest.raises(UnsupportedStepError, match="1 query row per request, these requests have 4"):
        running.decode()


def test_every_field_that_is_read_or_refused_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")
    protocols = (sglang.ForwardBatch, sglang.VerifyInput, vllm.CommonAttentionMetadata, tensorrt_llm.AttentionMetadata)
    names = [name for protocol in protocols for name in protocol.__annotations__]
    names += [*sglang.REFUSED, *vllm.REFUSED, *tensorrt_llm.REFUSED]
    assert [name for name in names if f"`{name}`" not in text] == []
