"""Every plan against plain Python definitions, on random batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_backends.conformance.scenes import strided
from attn_backends.graphs import RecordedGraph
from spec_metadata import (
    BlockTable,
    BufferSpec,
    CacheGeometry,
    Capacity,
    Extent,
    InvalidStepError,
    PackedQuery,
    Paging,
    RequestTable,
    Step,
    StepKind,
    UniformQuery,
    allocate,
    pad_step,
)
from spec_metadata.plans import block_table, csr, ragged, slots

CPU = torch.device("cpu")
RESERVED = 3
PAGE_SIZES = [1, 4, 16, 64]
KINDS = ["prefill", "decode", "draft chain", "draft tree", "verify chain", "verify tree", "extend", "packed extend"]
PACKED_KINDS = ("prefill", "packed extend")
WIDTHS = {"decode": 1, "draft chain": 1, "draft tree": 3, "verify chain": 6, "verify tree": 6, "extend": 4}
NUM_STEPS = 3


class Case:
    """A random batch of a kind, in either form of table, and what its rows see by definition."""

    def __init__(self, kind: str, page_size: int, seed: int, *, form: type = RequestTable, pad: int = 0) -> None:
        rng = random.Random(f"{kind} {page_size} {seed}")
        self.kind, self.page_size, self.pad = kind, page_size, pad
        topk = 3 if "tree" in kind else 1
        num_nodes = 4 if topk == 1 and "verify" not in kind else 6
        self.capacity = Capacity(8, 3 * page_size + 11, page_size, max(topk, 2), NUM_STEPS, num_nodes)
        self.bs = rng.choice([2, 3, 5])
        edges = [0, 1, page_size - 1, page_size, page_size + 1, self.capacity.max_context]
        self.lens = [rng.choice(edges) for _ in range(self.bs)]
        packed = kind in PACKED_KINDS
        self.widths = [rng.randint(1, 5) for _ in range(self.bs)] if packed else [WIDTHS[kind]] * self.bs
        self.pages = [rng.sample(range(4, 400), self.capacity.max_pages + 2) for _ in range(self.bs)]
        self.geometry = CacheGeometry(400, page_size, RESERVED, reserved_row=0)
        self.dtype = rng.choice([torch.int32, torch.int64])
        self.paging = self._paging(form, rng)
        self.step = self._step()
        if pad:
            self.step = pad_step(self.step, self.step.bucket(self.bs + pad), self.capacity)

    def _paging(self, form: type, rng: random.Random) -> Paging:
        if form is BlockTable:
            return BlockTable(strided(torch.tensor(self.pages, dtype=self.dtype)), self.geometry)
        rows = rng.sample(range(1, 9), self.bs)
        table = torch.zeros(9, len(self.pages[0]) * self.page_size, dtype=self.dtype)
        reserved = [RESERVED] * len(self.pages[0])
        for row, pages in zip([0, *rows], [reserved, *self.pages], strict=True):
            table[row] = torch.tensor([page * self.page_size + i for page in pages for i in range(self.page_size)])
        return RequestTable(strided(table), strided(torch.tensor(rows, dtype=self.dtype)), self.geometry)

    def _step(self) -> Step:
        lens = strided(torch.tensor(self.lens, dtype=self.dtype))
        query = PackedQuery.of(self.widths)
        width = self.widths[0]
        mask = torch.eye(width, dtype=torch.bool).expand(self.bs, -1, -1)
        return {
            "prefill": lambda: Step.prefill(query, lens, self.paging),
            "decode": lambda: Step.decode(lens, self.paging),
            "draft chain": lambda: Step.draft_decode(1, NUM_STEPS, lens, self.paging),
            "draft tree": lambda: Step.draft_decode(3, NUM_STEPS, lens, self.paging),
            "verify chain": lambda: Step.target_verify(width, lens, self.paging),
            "verify tree": lambda: Step.target_verify(width, lens, self.paging, tree_mask=mask),
            "extend": lambda: Step.draft_extend(UniformQuery(width), lens, self.paging),
            "packed extend": lambda: Step.draft_extend(query, lens, self.paging),
        }[self.kind]()

    @property
    def causal(self) -> bool:
        return "tree" not in self.kind

    def kv_lens(self, forward: int) -> list[int]:
        """Keys that the last row of each request sees in the dense part; padding sees its own width."""
        new = [forward + 1] * self.bs if self.kind == "draft chain" else self.widths
        real = [length + (n if self.causal else 0) for length, n in zip(self.lens, new, strict=True)]
        return real + [self.widths[0]] * self.pad

    def visible_pages(self, forward: int) -> list[list[int]]:
        """Pages of the visible keys of each request."""
        counts = [-(-length // self.page_size) for length in self.kv_lens(forward)]
        owned = self.pages + [[RESERVED] * len(self.pages[0])] * self.pad
        return [pages[:count] for pages, count in zip(owned, counts, strict=True)]

    def starts(self) -> list[int]:
        """First query row of each request, and the end."""
        widths = self.widths + [self.widths[0]] * self.pad
        return [sum(widths[:i]) for i in range(len(widths) + 1)]

    def plan(self, specs: tuple[BufferSpec, ...], make: Callable[..., Any], forward: int) -> Any:
        """A plan in fresh buffers that held garbage before."""
        buffers = allocate(specs, self.step.extent(self.capacity), CPU)
        for tensor in buffers.values():
            tensor.fill_(12345)
        return make(self.step, forward, buffers)


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


def each(kind: str, page_size: int, form: type, pad: int) -> list[tuple[Case, int]]:
    """Some random cases, with each of their forwards."""
    made = [Case(kind, page_size, seed, form=form, pad=pad) for seed in range(3)]
    return [(case, forward) for case in made for forward in range(case.step.num_forwards)]


@cases(KINDS)
def test_csr(kind: str, page_size: int, form: type, pad: int) -> None:
    for case, forward in each(kind, page_size, form, pad):
        plan = case.plan(csr.BUFFERS, csr.plan_csr, forward)
        pages = case.visible_pages(forward)
        flat = [page for row in pages for page in row]
        assert plan.qo_indptr.tolist() == case.starts()
        assert plan.kv_len.tolist() == case.kv_lens(forward)
        assert plan.kv_indptr.tolist() == [sum(map(len, pages[:i])) for i in range(len(pages) + 1)]
        assert plan.kv_indices[: len(flat)].tolist() == flat
        assert set(plan.kv_indices[len(flat) :].tolist()) <= {RESERVED}
        assert (plan.causal, plan.page_size) == (case.causal, page_size)
        assert plan.max_query >= max(case.widths)
        assert plan.max_kv_len >= max(case.kv_lens(forward))


@cases([kind for kind in KINDS if kind not in PACKED_KINDS])
def test_block_table(kind: str, page_size: int, form: type, pad: int) -> None:
    for case, forward in each(kind, page_size, form, pad):
        plan = case.plan(block_table.BUFFERS, block_table.plan_block_table, forward)
        columns = plan.block_table.shape[1]
        assert columns * page_size % 128 == 0  # TensorRT-LLM reads groups of 128 tokens
        rows = [row + [RESERVED] * (columns - len(row)) for row in case.visible_pages(forward)]
        assert plan.block_table.tolist() == rows
        assert plan.cache_seqlens.tolist() == case.kv_lens(forward)
        assert (plan.causal, plan.page_size, plan.width) == (case.causal, page_size, case.widths[0])
        assert max(case.kv_lens(forward)) <= plan.max_kv_len <= columns * page_size


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_block_table_refuses_a_packed_query(kind: str) -> None:
    case = Case(kind, 4, 0)
    with pytest.raises(InvalidStepError, match="one query stride"):
        case.plan(block_table.BUFFERS, block_table.plan_block_table, 0)


@cases(KINDS)
def test_ragged(kind: str, page_size: int, form: type, pad: int) -> None:
    for case, forward in each(kind, page_size, form, pad):
        plan = case.plan(ragged.BUFFERS, ragged.plan_ragged, forward)
        columns = plan.page_table.shape[1]
        assert plan.cu_seqlens_q.tolist() == case.starts()
        assert plan.seqused_k.tolist() == case.kv_lens(forward)
        rows = [row + [RESERVED] * (columns - len(row)) for row in case.visible_pages(forward)]
        assert plan.page_table.tolist() == rows
        assert (plan.causal, plan.page_size) == (case.causal, page_size)
        assert plan.max_seqlen_q >= max(case.widths)
        assert plan.max_seqlen_k >= max(case.kv_lens(forward))


@cases(KINDS)
def test_slots(kind: str, page_size: int, form: type, pad: int) -> None:
    for case, forward in each(kind, page_size, form, pad):
        plan = case.plan(slots.BUFFERS, slots.plan_slots, forward)
        starts, kv_lens = case.starts(), case.kv_lens(forward)
        rows = [(r, row - starts[r]) for r in range(len(starts) - 1) for row in range(starts[r], starts[r + 1])]
        widths = case.widths + [case.widths[0]] * pad
        assert plan.request.tolist() == [r for r, _ in rows]
        assert plan.num_visible.tolist() == [kv_lens[r] - (widths[r] - 1 - j if case.causal else 0) for r, j in rows]
        for r, length in enumerate(kv_lens):
            pages = case.pages[r] if r < case.bs else [RESERVED] * len(case.pages[0])
            expected = [pages[p // page_size] * page_size + p % page_size for p in range(length)]
            assert plan.slots[r, :length].tolist() == expected


PLANS = {
    "csr": (csr.BUFFERS, csr.plan_csr),
    "block_table": (block_table.BUFFERS, block_table.plan_block_table),
    "ragged": (ragged.BUFFERS, ragged.plan_ragged),
    "slots": (slots.BUFFERS, slots.plan_slots),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PACKED_KINDS])
@pytest.mark.parametrize("name", PLANS)
def test_plans_are_device_code_that_leaves_the_step_alone(name: str, kind: str) -> None:
    """Each plan is capturable; its replay on other lengths equals a fresh plan, and no input changes."""
    specs, make = PLANS[name]
    case = Case(kind, 4, 0, pad=1)
    step, extent = case.step, case.step.extent(case.capacity)
    buffers, fresh = (allocate(specs, extent, CPU) for _ in range(2))
    graph = RecordedGraph()
    graph.capture(lambda: [make(step, forward, buffers) for forward in range(step.num_forwards)])
    step.seq_lens[: case.bs].copy_(torch.tensor([(n * 7 + 3) % case.capacity.max_context for n in case.lens]))
    inputs = [step.seq_lens, step.out_cache_loc, step.num_real, step.paging.static_input()]
    before = [tensor.clone() for tensor in inputs]
    graph.replay()
    for forward in range(step.num_forwards):
        make(step, forward, fresh)
    for spec in specs:
        assert torch.equal(buffers[spec.name], fresh[spec.name]), spec.name
    assert all(torch.equal(one, two) for one, two in zip(before, inputs, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_idle_plans(name: str) -> None:
    specs, make = PLANS[name]
    case = Case("decode", 4, 0)
    step = Step.idle(case.paging.on_static(case.paging.static_input()[:0]))
    buffers = allocate(specs, step.extent(case.capacity), CPU)
    make(step, 0, buffers)
    starts = [spec.name for spec in specs if spec.name in ("qo_indptr", "kv_indptr", "cu_seqlens_q")]
    assert all(buffers[start].tolist() == [[0]] for start in starts)


@pytest.mark.parametrize("name", PLANS)
def test_bounded_plans_are_small(name: str) -> None:
    """A step that promises its longest length gets buffers for that, in pages, and draft room."""
    specs, make = PLANS[name]
    geometry = CacheGeometry(400, 4, RESERVED)
    capacity = Capacity(4, 1000, 4, num_steps=3, num_draft_tokens=4)
    table = torch.arange(1100).repeat(3, 1)
    step = Step.target_verify(
        4, torch.tensor([7, 2]), RequestTable(table, torch.tensor([1, 2]), geometry), max_committed=7
    )
    extent = step.extent(capacity)
    assert extent.max_pages == 3
    assert extent.max_kv_len == 12
    make(step, 0, allocate(specs, extent, CPU))
    assert Extent.of_bucket(capacity.bucket(StepKind.TARGET_VERIFY, 2), capacity).max_pages == 251
