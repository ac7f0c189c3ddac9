"""An engine's own buffers as a graph's inputs: what is read from them is what a replay would have copied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends import CaptureError, RecordedGraph, UnsupportedStepError, get_backend
from attn_backends.planning.metadata import WRITE_SLOTS
from spec_metadata import (
    BlockTable,
    Extent,
    InvalidStepError,
    RequestTable,
    Step,
    allocate,
    copy_step,
    write_slots,
)
from spec_metadata.bound_inputs import check_bound
from tests.bound_batches import CPU, conventions, engine, spoil, statics
from tests.plan_batches import KINDS, PACKED_KINDS, Case
from tests.planner_laws import FORMS, RINGS, check_along, written_along
from tests.triton_interpreter import interpreted

UNIFORM = [kind for kind in KINDS if kind not in PACKED_KINDS]
TABLES = [RequestTable, BlockTable]


def check_same(found: Step, expected: Step) -> None:
    for name in ("num_real", "seq_lens", "out_cache_loc", "tree_mask"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is theirs) or torch.equal(ours, theirs), f"{name}:\n{ours}\n{theirs}"
    ours, theirs = found.paging.static_input(), expected.paging.static_input()
    if isinstance(found.paging, BlockTable):  # what no token lies in is nobody's
        num_pages = -(-(expected.seq_lens + expected.width * expected.num_steps) // expected.paging.geometry.page_size)
        mask = torch.arange(ours.shape[1]) < num_pages.unsqueeze(1)
        ours, theirs = ours * mask, theirs * mask
    assert torch.equal(ours, theirs), f"{ours}\n{theirs}"


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", UNIFORM)
def test_bound_inputs_are_what_a_replay_copies(kind: str, table: type) -> None:
    for seed, num_more in ((0, 0), (1, 2), (2, 3)):
        case = Case(kind, 4, seed, form=table)
        for counted, with_slots in conventions(case):
            given, (expected, static, _) = (
                engine(case, num_more, counted=counted, with_slots=with_slots),
                statics(case, num_more),
            )
            check_bound(given.inputs, case.bucket(num_more), given.paging, case.capacity)
            copy_step(expected, case.step)
            given.bind(static, case).read()
            check_same(static, expected)
            given.bind(static, case).check()


LAUNCHES = {
    "ragged": ("decode", "verify tree"),
    "block_table": ("draft chain", "extend"),
    "csr": ("draft tree", "verify chain"),
    "small": ("decode", "draft chain"),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in LAUNCHES.items() for kind in kinds])
def test_one_launch_reads_and_plans_as_the_definitions_do(name: str, kind: str, table: type) -> None:
    interpreted("triton_plan", "_plan_pages")
    interpreted("triton_plan_compressed", "_plan_compressed")
    page_size, form = (RINGS[name][0], RINGS[name][1].form) if name in RINGS else (4, FORMS[name])
    for seed, num_more, spoilt in ((0, 2, False), (1, 0, True)):
        case = Case(kind, page_size, seed, form=table)
        for counted, with_slots in conventions(case):
            given = engine(case, num_more, counted=counted, with_slots=with_slots)
            if spoilt:
                spoil(given)
            expected, static, buffers = statics(case, num_more)
            for tensor in buffers.values():
                tensor.fill_(1)
            extent = Extent.of_bucket(case.bucket(num_more), case.capacity, case.geometry.num_pages)
            wanted, fused = (allocate((WRITE_SLOTS, *form.specs), extent, CPU) for _ in range(2))
            given.bind(expected, case).read()
            for forward in range(expected.num_forwards):
                wanted[WRITE_SLOTS.name][forward].copy_(write_slots(expected, forward))
            form.write(expected, wanted)
            plan = form.bind(static, fused, given.bind(static, case))
            made = written_along(plan, fused)
            plan()
            check_along(made, wanted)
            check_same(static, expected)
            for buffer, mask in form.specified(expected, wanted).items():
                assert torch.equal(fused[buffer] * mask, wanted[buffer] * mask), buffer
            assert torch.equal(fused[WRITE_SLOTS.name], wanted[WRITE_SLOTS.name])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", ["decode", "verify chain"])
def test_values_are_brought_within_the_capacity_and_the_pool(kind: str, table: type) -> None:
    case = Case(kind, 4, 0, form=table)
    given, (_, static, _) = engine(case, 1, counted=True, with_slots=True), statics(case, 1)
    spoil(given)
    given.inputs.num_real.fill_(99)
    given.bind(static, case).read()
    assert int(static.num_real) == static.bs
    assert int(static.seq_lens.max()) + static.width <= case.capacity.max_kv_len
    assert 0 <= int(static.out_cache_loc.min()) <= int(static.out_cache_loc.max()) < case.geometry.num_slots
    most = case.paging.table.shape[0] if table is RequestTable else case.geometry.num_pages
    assert 0 <= int(static.paging.static_input().min()) <= int(static.paging.static_input().max()) < most
    with pytest.raises(InvalidStepError, match=f"request 0 has {2**30} committed tokens and adds {static.width}"):
        given.bind(static, case).check()


def test_slots_outside_the_pool_are_told_in_checking_mode() -> None:
    case = Case("decode", 4, 0)
    given, (_, static, _) = engine(case, 0, counted=True, with_slots=True), statics(case, 0)
    given.bind(static, case).read()
    given.inputs.out_cache_loc[0] = -1
    with pytest.raises(InvalidStepError, match=r"out_cache_loc of a real request holds \[-1\], outside \[0, "):
        given.bind(static, case).check()
    given.paging.rows[0] = -3
    with pytest.raises(InvalidStepError, match=r"rows \[-3, .*must lie in the table's"):
        given.bind(static, case).check()


def test_buffers_that_do_not_fit_a_bucket_are_refused() -> None:
    case = Case("verify chain", 4, 0, form=BlockTable)
    bucket, good = case.bucket(0), engine(case, 0, counted=True, with_slots=True)
    wrong = {
        "inputs.seq_lens must be": {"seq_lens": good.inputs.seq_lens[1:]},
        "inputs.out_cache_loc must be": {"out_cache_loc": good.inputs.out_cache_loc[1:]},
        "inputs.num_real must be": {"num_real": torch.zeros(2, dtype=torch.int32)},
        "don't tell which requests are real": {"num_real": None},
        "a verify over a tree has one, no other": {"tree_mask": torch.ones(1, 1, 1, dtype=torch.bool)},
    }
    for words, change in wrong.items():
        with pytest.raises(InvalidStepError, match=words):
            check_bound(replace(good.inputs, **change), bucket, good.paging, case.capacity)
    with pytest.raises(InvalidStepError, match="the paging of bound inputs has"):
        check_bound(good.inputs, bucket, replace(good.paging, table=good.paging.table[1:]), case.capacity)
    draft = Case("draft chain", 4, 0)
    inputs = replace(engine(draft, 0, counted=True, with_slots=False).inputs, lens_include_rows=True)
    with pytest.raises(InvalidStepError, match="are committed tokens"):
        check_bound(inputs, replace(draft.bucket(0), num_steps=3), draft.paging, draft.capacity)
    packed = Case("prefill", 4, 0)
    with pytest.raises(InvalidStepError, match="has packed rows, whose inputs are copied"):
        check_bound(good.inputs, packed.bucket(0), packed.paging, packed.capacity)


def test_bound_metadata_takes_no_step_and_refreshes_from_the_buffers() -> None:
    case = Case("decode", 4, 0)
    backend = get_backend("fa3")(case.capacity, case.geometry, kernel="torch", checking=True)
    given = engine(case, 0, counted=True, with_slots=False)
    meta = backend.capture(case.bucket(0), given.paging, given.inputs)
    assert meta.step.seq_lens.tolist() == case.lens, "planned from the buffers at once"
    with pytest.raises(CaptureError, match="reads the engine's buffers: write those"):
        backend.replay(meta, case.step)
    other = backend.capture(case.bucket(0), case.paging)
    with pytest.raises(CaptureError, match="was overwritten"):
        meta.at()
    given.inputs.seq_lens.fill_(1)
    backend.refresh(meta)
    assert meta.at().owner is backend
    assert meta.step.seq_lens.tolist() == [1] * case.bs
    with pytest.raises(CaptureError, match="was overwritten"):
        other.at()
    given.inputs.seq_lens[0] = -1
    with pytest.raises(InvalidStepError, match="request 0 has -1 committed tokens"):
        backend.refresh(meta)


def test_a_replay_of_a_graph_that_refreshes_reads_the_buffers_anew() -> None:
    case = Case("verify chain", 32, 1, form=BlockTable)
    backend = get_backend("trtllm_mla")(replace(case.capacity, max_bs=case.bs + 1), case.geometry, kernel="torch")
    given = engine(case, 1, counted=False, with_slots=False)
    meta, graph = backend.capture(case.bucket(1), given.paging, given.inputs), RecordedGraph()
    graph.capture(lambda: backend.refresh(meta))
    given.inputs.seq_lens.fill_(0)
    given.inputs.seq_lens[0] = case.step.width + 2
    graph.replay()
    assert meta.step.num_real.tolist() == [1]
    assert meta.buffers["cache_seqlens"][0].tolist() == [case.step.width + 2] + [case.step.width] * case.bs


def test_a_kernel_that_plans_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("decode", 4, 0)
    backend = get_backend("fa3")(case.capacity, case.geometry, kernel="torch")
    kernel = backend.kernel_of(case.step.kind)
    able = {kind: replace(each, needs_host_lens=True) for kind, each in kernel.capabilities.items()}
    hosted = replace(kernel, capabilities=able)
    monkeypatch.setattr(backend, "kernel_of", lambda kind: hosted)
    given = engine(case, 0, counted=True, with_slots=True)
    with pytest.raises(
        UnsupportedStepError, match="plans lengths on the host, which buffers of the device do not tell"
    ):
        backend.capture(case.bucket(0), given.paging, given.inputs)
