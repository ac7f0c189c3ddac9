"""Every plan against plain Python definitions, on random batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import RecordedGraph
from spec_metadata import (
    BlockTable,
    Buffers,
    BufferSpec,
    CacheGeometry,
    Capacity,
    Extent,
    InvalidStepError,
    RequestTable,
    Step,
    StepKind,
    allocate,
    dense_part,
)
from spec_metadata.plans import block_table, csr, ragged, slots
from spec_metadata.visibility import host_lens, query_starts
from tests.plan_batches import KINDS, PACKED_KINDS, RESERVED, Case
from tests.planner_laws import FORMS, GARBAGE

pytestmark = pytest.mark.smoke

CPU = torch.device("cpu")
PAGE_SIZES = [1, 4, 16, 64]
PLANS: dict[str, tuple[tuple[BufferSpec, ...], Callable[..., Any], Callable[..., None]]] = {
    "csr": (csr.BUFFERS, csr.view_csr, csr.write_csr),
    "block_table": (block_table.BUFFERS, block_table.view_block_table, block_table.write_block_table),
    "ragged": (ragged.BUFFERS, ragged.view_ragged, ragged.write_ragged),
    "slots": (slots.BUFFERS, slots.view_slot_lists, slots.write_slot_lists),
}


def cases(kinds: list[str]) -> Any:
    """Parametrise over kinds, page sizes, forms of table, and padding where a step can be padded."""
    found = [
        pytest.param(kind, page_size, form, pad, id=f"{kind}-page{page_size}-{form.__name__}-pad{pad}")
        for kind in kinds
        for page_size in PAGE_SIZES
        for form in (RequestTable, BlockTable)
        for pad in ((0,) if kind in PACKED_KINDS else (0, 2))
    ]
    return pytest.mark.parametrize(("kind", "page_size", "form", "pad"), found)


def each(kind: str, page_size: int, form: type, pad: int, name: str) -> list[tuple[Case, int, Any]]:
    """Some random cases, with each of their forwards and its plan, written into buffers that held garbage."""
    specs, view, write = PLANS[name]
    found = []
    for seed in range(4):
        case = Case(kind, page_size, seed, form=form, pad=pad)
        buffers = garbage(specs, case)
        write(case.step, buffers)
        plans = view(case.step, buffers)
        assert len(plans) == case.step.num_forwards
        found += [(case, forward, plan) for forward, plan in enumerate(plans)]
    return found


def garbage(specs: tuple[BufferSpec, ...], case: Case) -> Buffers:
    """Buffers for a case in which nothing is right."""
    buffers = allocate(specs, case.step.extent(case.capacity), CPU)
    for tensor in buffers.values():
        tensor.fill_(GARBAGE)
    return buffers


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_on_the_host(kind: str, pad: int) -> None:
    """They are those of the device, of every forward, and of what all forwards see alike."""
    for case in (Case(kind, 4, seed, pad=0 if kind in PACKED_KINDS else pad) for seed in range(8)):
        step = replace(case.step, seq_lens_cpu=tuple(case.lens))
        for forward in (None, *range(step.num_forwards)):
            dense, lens = dense_part(step, forward), host_lens(step, step.bs, forward)
            assert lens.kv_lens == tuple(dense.kv_lens.tolist()) == tuple(case.kv_lens(forward))
            assert lens.query_lens == tuple(query_starts(step).diff().tolist())
            assert lens.causal == dense.causal == case.causal


def check_rows(table: Tensor, pages: list[list[int]]) -> None:
    """Each row begins with a request's pages; what is behind them is left, because another phase may see it."""
    assert table.tolist() == [row + [GARBAGE] * (table.shape[1] - len(row)) for row in pages]


@cases(KINDS)
def test_csr(kind: str, page_size: int, form: type, pad: int) -> None:
    last: tuple[Case, Any] | None = None
    for case, forward, plan in each(kind, page_size, form, pad, "csr"):
        pages = case.visible_pages(None)
        assert plan.qo_indptr.tolist() == case.starts()
        assert plan.kv_len.tolist() == case.kv_lens(None)
        assert plan.kv_indptr.tolist() == [plan.max_kv_len // page_size * i for i in range(len(pages) + 1)]
        check_rows(plan.kv_indices.view(len(pages), -1), pages)
        assert (plan.causal, plan.page_size) == (case.causal, page_size)
        assert plan.max_query >= max(case.widths)
        assert plan.max_kv_len >= max(case.kv_lens(forward))
        assert forward == 0 or last == (case, plan), "the forwards of a draft have one plan"
        last = (case, plan)


@cases([kind for kind in KINDS if kind not in PACKED_KINDS])
def test_block_table(kind: str, page_size: int, form: type, pad: int) -> None:
    for case, forward, plan in each(kind, page_size, form, pad, "block_table"):
        columns = plan.block_table.shape[1]
        assert columns * page_size % 128 == 0  # TensorRT-LLM reads groups of 128 tokens
        check_rows(plan.block_table, case.visible_pages(case.step.num_forwards - 1))
        assert plan.cache_seqlens.tolist() == case.kv_lens(forward)
        assert (plan.causal, plan.page_size, plan.width) == (case.causal, page_size, case.widths[0])
        assert max(case.kv_lens(forward)) <= plan.max_kv_len <= columns * page_size


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_block_table_refuses_a_packed_query(kind: str) -> None:
    case = Case(kind, 4, 0)
    with pytest.raises(InvalidStepError, match="one query stride"):
        block_table.view_block_table(case.step, garbage(block_table.BUFFERS, case))


@cases(KINDS)
def test_ragged(kind: str, page_size: int, form: type, pad: int) -> None:
    for case, forward, plan in each(kind, page_size, form, pad, "ragged"):
        assert plan.cu_seqlens_q.tolist() == case.starts()
        assert plan.seqused_k.tolist() == case.kv_lens(forward)
        check_rows(plan.page_table, case.visible_pages(case.step.num_forwards - 1))
        assert (plan.causal, plan.page_size) == (case.causal, page_size)
        assert plan.max_seqlen_q >= max(case.widths)
        assert plan.max_seqlen_k >= max(case.kv_lens(forward))


@cases(KINDS)
def test_slots(kind: str, page_size: int, form: type, pad: int) -> None:
    for case, forward, plan in each(kind, page_size, form, pad, "slots"):
        starts, kv_lens = case.starts(), case.kv_lens(forward)
        rows = [(r, row - starts[r]) for r in range(len(starts) - 1) for row in range(starts[r], starts[r + 1])]
        widths = case.widths + [case.widths[0]] * pad
        assert plan.request.tolist() == [r for r, _ in rows]
        assert plan.num_visible.tolist() == [kv_lens[r] - (widths[r] - 1 - j if case.causal else 0) for r, j in rows]
        for r, length in enumerate(case.kv_lens(case.step.num_forwards - 1)):
            pages = case.pages[r] if r < case.bs else [RESERVED] * len(case.pages[0])
            expected = [pages[p // page_size] * page_size + p % page_size for p in range(length)]
            assert plan.slots[r, :length].tolist() == expected
            assert set((plan.slots[r, length:] // page_size).tolist()) <= {RESERVED}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PACKED_KINDS])
@pytest.mark.parametrize("name", PLANS)
def test_plans_are_device_code_that_leaves_the_step_alone(name: str, kind: str) -> None:
    """Each plan is capturable; its replay on other lengths equals a fresh plan, and no input changes."""
    specs, view, write = PLANS[name]
    specified = FORMS[name].specified if name in FORMS else lambda step, buffers: {}
    case = Case(kind, 4, 0, pad=1)
    step, extent = case.step, case.step.extent(case.capacity)
    buffers, fresh = (allocate(specs, extent, CPU) for _ in range(2))
    graph = RecordedGraph()
    graph.capture(lambda: write(step, buffers))
    assert len(view(step, buffers)) == step.num_forwards
    step.seq_lens[: case.bs].copy_(torch.tensor([(n * 7 + 3) % case.capacity.max_context for n in case.lens]))
    inputs = [step.seq_lens, step.out_cache_loc, step.num_real, step.paging.static_input()]
    before = [tensor.clone() for tensor in inputs]
    graph.replay()
    write(step, fresh)
    for spec in specs:
        is_written = specified(step, fresh).get(spec.name, torch.tensor(True))
        assert torch.equal(buffers[spec.name] * is_written, fresh[spec.name] * is_written), spec.name
    assert all(torch.equal(one, two) for one, two in zip(before, inputs, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_idle_plans(name: str) -> None:
    specs, view, write = PLANS[name]
    case = Case("decode", 4, 0)
    step = Step.idle(case.paging.on_static(case.paging.static_input()[:0]))
    buffers = allocate(specs, step.extent(case.capacity), CPU)
    write(step, buffers)
    assert len(view(step, buffers)) == 1
    starts = [spec.name for spec in specs if spec.name in ("qo_indptr", "kv_indptr", "cu_seqlens_q")]
    assert all(buffers[start].tolist() == [0] for start in starts)


@pytest.mark.parametrize("name", PLANS)
def test_bounded_plans_are_small(name: str) -> None:
    """A step that promises its longest length gets buffers for that, in pages, and draft room."""
    specs, _, write = PLANS[name]
    geometry = CacheGeometry(400, 4, RESERVED)
    capacity = Capacity(4, 1000, 4, num_steps=3, num_draft_tokens=4)
    table = torch.arange(1100).repeat(3, 1)
    step = Step.target_verify(
        4, torch.tensor([7, 2]), RequestTable(table, torch.tensor([1, 2]), geometry), max_committed=7
    )
    extent = step.extent(capacity)
    assert extent.max_pages == 3
    assert extent.max_kv_len == 12
    write(step, allocate(specs, extent, CPU))
    assert Extent.of_bucket(capacity.bucket(StepKind.TARGET_VERIFY, 2), capacity).max_pages == 251
