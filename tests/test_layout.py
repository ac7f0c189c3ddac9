"""Steps: what they refuse, where they write, what their rows see."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.conformance.inputs import strided
from spec_metadata import (
    BlockTable,
    CacheGeometry,
    Capacity,
    DraftTree,
    InvalidStepError,
    PackedQuery,
    Paging,
    RequestTable,
    Step,
    StepKind,
    UniformQuery,
    dense_part,
    token_positions,
    tree_part,
    write_slots,
)

GEOMETRY = CacheGeometry(60, 4, reserved_page=5, reserved_row=1)
PAGES = [[random.Random(row).randrange(6, 60) for _ in range(8)] for row in range(5)]
ROWS, LENS = [3, 0, 4], [7, 0, 12]
TYPES = [torch.int32, torch.int64]


def slot(request: int, position: int) -> int:
    """Where a token of a request lives."""
    return PAGES[ROWS[request]][position // 4] * 4 + position % 4


def paging_of(form: type, dtype: torch.dtype = torch.int32) -> Paging:
    """The three requests, in strided tensors."""
    if form is BlockTable:
        return BlockTable(strided(torch.tensor([PAGES[row] for row in ROWS], dtype=dtype)), GEOMETRY)
    table = torch.tensor([[page * 4 + i for page in row for i in range(4)] for row in PAGES], dtype=dtype)
    return RequestTable(strided(table), strided(torch.tensor(ROWS, dtype=dtype)), GEOMETRY)


def lens_of(dtype: torch.dtype = torch.int32) -> Tensor:
    return strided(torch.tensor(LENS, dtype=dtype))


PAGING, SEQ_LENS = paging_of(RequestTable), lens_of()
PACKED = PackedQuery.of([2, 5, 1])
MAKERS: dict[str, Callable[[Tensor, Paging], Step]] = {
    "prefill": lambda lens, paging: Step.prefill(PACKED, lens, paging),
    "decode": Step.decode,
    "draft chain": lambda lens, paging: Step.draft_decode(1, 3, lens, paging),
    "draft tree": lambda lens, paging: Step.draft_decode(2, 3, lens, paging),
    "draft block": lambda lens, paging: Step.draft_block(4, lens, paging),
    "verify": lambda lens, paging: Step.target_verify(4, lens, paging),
    "extend": lambda lens, paging: Step.draft_extend(UniformQuery(3), lens, paging),
    "packed extend": lambda lens, paging: Step.draft_extend(PACKED, lens, paging),
}
NEW_TOKENS = {"decode": 1, "draft chain": 3, "draft tree": 6, "draft block": 4, "verify": 4, "extend": 3}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", [RequestTable, BlockTable])
@pytest.mark.parametrize("name", MAKERS)
def test_default_write_slots_follow_the_committed_tokens(name: str, form: type, dtype: torch.dtype) -> None:
    step = MAKERS[name](lens_of(dtype), paging_of(form, dtype))
    counts = [NEW_TOKENS[name]] * 3 if name in NEW_TOKENS else [2, 5, 1]
    expected = [slot(r, LENS[r] + j) for r in range(3) for j in range(counts[r])]
    assert step.flat_slots().tolist() == expected
    assert step.num_writes == len(expected)
    assert step.bs == 3
    assert step.num_real == 3


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (3, 2), (4, 4)])
def test_a_forward_writes_its_own_slots_densely(topk: int, num_steps: int, dtype: torch.dtype) -> None:
    flat = torch.randperm(3 * topk * num_steps).to(dtype)
    step = Step.draft_decode(topk, num_steps, SEQ_LENS, PAGING, strided(flat))
    for i in range(step.num_forwards):
        slots = write_slots(step, i)
        expected = [int(flat[(r * topk + k) * num_steps + i]) for r in range(3) for k in range(topk)]
        assert slots.tolist() == expected
        assert slots.dtype is torch.int64
        assert slots.is_contiguous()
    slots = write_slots(Step.target_verify(4, SEQ_LENS, PAGING, strided(flat[:12]) if len(flat) >= 12 else None))
    assert slots.is_contiguous()
    assert slots.dtype is torch.int64


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ask", [write_slots, token_positions, tree_part])
def test_a_forward_that_is_not_planned_is_refused(name: str, ask: Callable[[Step, int], object]) -> None:
    step = MAKERS[name](SEQ_LENS, PAGING)
    for forward in (-1, step.num_forwards):
        with pytest.raises(InvalidStepError, match=f"forward {forward} of a {step.kind} step that plans"):
            ask(step, forward)


def test_positions_of_a_verify_over_a_tree_are_its_depths() -> None:
    """Two siblings stand at one position."""
    parents = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 1, 1]])
    tree = DraftTree.from_parents(torch.zeros_like(parents), parents, 3)
    step = Step.target_verify(4, SEQ_LENS, PAGING, tree_mask=tree.mask)
    depths = [[0, 1, 1, 2], [0, 1, 2, 3], [0, 1, 2, 2]]
    positions = [length + depth for length, row in zip(LENS, depths, strict=True) for depth in row]
    assert token_positions(step).tolist() == positions
    assert token_positions(step).dtype is torch.int64


@pytest.mark.parametrize("name", MAKERS)
def test_positions_are_committed_length_plus_depth(name: str) -> None:
    step = MAKERS[name](SEQ_LENS, PAGING)
    widths = {"decode": 1, "draft chain": 1, "draft tree": 2, "draft block": 4, "verify": 4, "extend": 3}
    counts = [widths[name]] * 3 if name in widths else [2, 5, 1]
    for i in range(step.num_forwards):
        drafts = step.kind is StepKind.DRAFT_DECODE
        expected = [LENS[r] + (i if drafts else j) for r in range(3) for j in range(counts[r])]
        assert token_positions(step, i).tolist() == expected


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_rows_see(dtype: torch.dtype) -> None:
    lens, paging = lens_of(dtype), paging_of(RequestTable, dtype)
    seen = {name: make(lens, paging) for name, make in MAKERS.items()}
    expected = {
        "prefill": ([9, 5, 13], True),
        "decode": ([8, 1, 13], True),
        "draft chain": ([8, 1, 13], True),
        "draft tree": (LENS, False),
        "draft block": ([11, 4, 16], False),
        "verify": ([11, 4, 16], True),
        "extend": ([10, 3, 15], True),
        "packed extend": ([9, 5, 13], True),
    }
    for name, (kv_lens, causal) in expected.items():
        dense = dense_part(seen[name], 0)
        assert (dense.kv_lens.tolist(), dense.causal) == (kv_lens, causal), name
        assert dense.kv_lens.dtype is torch.int32
    for i in range(2):
        assert dense_part(seen["draft chain"], i).kv_lens.tolist() == [length + i + 1 for length in LENS]
        assert dense_part(seen["draft tree"], i).kv_lens.tolist() == LENS
    mask = torch.eye(4, dtype=torch.bool).expand(3, -1, -1)
    tree = dense_part(Step.target_verify(4, lens, paging, tree_mask=mask), 0)
    assert (tree.kv_lens.tolist(), tree.causal) == (LENS, False)


def test_tree_part_of_a_verify_is_its_mask_over_its_slots() -> None:
    mask = torch.rand(3, 4, 4) < 0.5
    step = Step.target_verify(4, SEQ_LENS, PAGING, tree_mask=mask)
    part = tree_part(step, 0)
    assert part is not None
    assert torch.equal(part.mask, mask)
    assert part.slots.tolist() == [[slot(r, LENS[r] + j) for j in range(4)] for r in range(3)]
    assert tree_part(Step.target_verify(4, SEQ_LENS, PAGING), 0) is None


def test_tree_part_of_a_draft_follows_the_ancestors() -> None:
    topk, num_steps = 3, 4
    step = Step.draft_decode(topk, num_steps, SEQ_LENS, PAGING)
    ancestors = torch.randint(topk, (3, topk, 3))
    for i in range(3):
        part = tree_part(step, i, ancestors[..., : i + 1])
        assert part is not None
        for r in range(3):
            assert part.slots[r].tolist() == [slot(r, LENS[r] + n) for n in range(topk * num_steps)]
            for k in range(topk):
                on_path = {int(branch) * num_steps + depth for depth, branch in enumerate(ancestors[r, k, : i + 1])}
                assert set(part.mask[r, k].nonzero().flatten().tolist()) == on_path
    first = ancestors[..., :1]
    anything: Any = first.tolist()
    for wrong in (None, ancestors[..., :2], first[:2], first[:, :2], anything, first.float(), first.bool()):
        with pytest.raises(InvalidStepError, match=r"ancestors, .* must be \[3, 3, 1\] int32 or int64"):
            tree_part(step, 0, wrong)
    with pytest.raises(InvalidStepError, match="ancestors is on meta and seq_lens on cpu"):
        tree_part(step, 0, first.to("meta"))


def test_idle_step_holds_nothing() -> None:
    for paging in (PAGING.on_static(torch.empty(0, dtype=torch.int64)), BlockTable(torch.empty(0, 8).int(), GEOMETRY)):
        step = Step.idle(paging)
        assert (step.bs, step.num_tokens, step.num_writes, step.num_forwards) == (0, 0, 0, 1)
        assert step.num_real == 0
        assert step.flat_slots().shape == (0,)


def test_packed_query() -> None:
    assert PACKED.cu_seqlens.tolist() == [0, 2, 7, 8]
    assert PACKED.cu_seqlens.dtype is torch.int32
    assert (PACKED.num_tokens, PACKED.width) == (8, 5)
    empty = PackedQuery.of([])
    assert (empty.num_tokens, empty.width, empty.cu_seqlens.tolist()) == (0, 0, [0])


SLOTS = torch.arange(12)
BLOCKS = paging_of(BlockTable)
BAD: dict[str, Callable[[], object]] = {
    "at least 1, got 3 and 0": lambda: Step.draft_decode(0, 3, SEQ_LENS, PAGING),
    "at least 1, got 3 and -1": lambda: Step.draft_decode(-1, 3, SEQ_LENS, PAGING),
    "at least 1, got 0 and 2": lambda: Step.draft_decode(2, 0, SEQ_LENS, PAGING),
    "at least 1, got -2 and 2": lambda: Step.draft_decode(2, -2, SEQ_LENS, PAGING),
    "at least 1, got 1 and 0": lambda: Step.target_verify(0, SEQ_LENS, PAGING),
    r"seq_lens must be \[bs\].*float32": lambda: Step.decode(SEQ_LENS.float(), PAGING, SLOTS[:3]),
    r"seq_lens must be \[bs\].*\[1, 3\]": lambda: Step.decode(
        SEQ_LENS[None], PAGING, SLOTS[:3], seq_lens_cpu=tuple(LENS)
    ),
    r"seq_lens must be \[bs\].*\[3, 1\]": lambda: Step.decode(SEQ_LENS.unsqueeze(1), PAGING, SLOTS[:3]),
    r"seq_lens must be \[bs\] int32 or int64, got \[1, 3\]": lambda: Step.target_verify(4, SEQ_LENS[None], BLOCKS),
    "seq_lens holds 4 requests but the paging 3": lambda: Step.decode(torch.tensor([7, 0, 12, 3]), BLOCKS),
    "packed query holds 4 requests, seq_lens 3": lambda: Step.prefill(PackedQuery.of([1] * 4), SEQ_LENS, PAGING),
    "seq_lens_cpu holds 2 lengths, seq_lens 3": lambda: Step.decode(SEQ_LENS, PAGING, seq_lens_cpu=[7, 0]),
    "seq_lens_cpu holds 12, over max_committed=11": lambda: Step.decode(
        SEQ_LENS, PAGING, seq_lens_cpu=LENS, max_committed=11
    ),
    "seq_lens_cpu must be integers of the host": lambda: Step.decode(SEQ_LENS, PAGING, seq_lens_cpu=SEQ_LENS),  # type: ignore[arg-type]
    "32 committed ones leave no place for 1 more": lambda: Step.decode(SEQ_LENS, PAGING, seq_lens_cpu=[7, 0, 32]),
    "seq_lens holds 2 requests but the paging 3": lambda: Step.decode(SEQ_LENS[:2], PAGING, SLOTS[:2]),
    "packed query holds 2 requests, seq_lens 3": lambda: Step.prefill(PackedQuery.of([1, 1]), SEQ_LENS, PAGING, SLOTS),
    r"at least one query row, got lengths \(1, 0, 2\)": lambda: Step.prefill(
        PackedQuery.of([1, 0, 2]), SEQ_LENS, PAGING, SLOTS[:3]
    ),
    r"target_verify step must be \[12\] int32.*got \[11\]": lambda: Step.target_verify(4, SEQ_LENS, PAGING, SLOTS[:11]),
    r"must be \[12\] int32 or int64, got \[3, 4\]": lambda: Step.target_verify(4, SEQ_LENS, PAGING, SLOTS.view(3, 4)),
    r"draft_decode step must be \[18\] int32": lambda: Step.draft_decode(2, 3, SEQ_LENS, PAGING, SLOTS[:12]),
    r"out_cache_loc of a decode step must be \[3\] int32 or int64, got \[3\] torch.float32": lambda: Step.decode(
        SEQ_LENS, PAGING, SLOTS[:3].float()
    ),
    r"tree_mask must be \[3, 4, 4\] bool, got \[3, 4, 4\] torch.int64": lambda: Step.target_verify(
        4, SEQ_LENS, PAGING, tree_mask=torch.ones(3, 4, 4, dtype=torch.int64)
    ),
    r"tree_mask must be \[3, 4, 4\] bool, got \[3, 3, 3\]": lambda: Step.target_verify(
        4, SEQ_LENS, PAGING, tree_mask=torch.ones(3, 3, 3, dtype=torch.bool)
    ),
    "max_context must be a whole number, got 8.0": lambda: Capacity(1, 8.0, 4),  # type: ignore[arg-type]
    "num_rerun must be a whole number, got '2'": lambda: Capacity(1, 8, 4, num_rerun="2"),  # type: ignore[arg-type]
    "num_extended must be at least 4, the longest accepted path; got 3": lambda: Capacity(
        1, 8, 4, 4, 3, num_draft_tokens=16, num_extended=3
    ),
    "num_extended must be a whole number, got '4'": lambda: Capacity(1, 8, 4, num_extended="4"),  # type: ignore[arg-type]
    "max_bs must be at least 1, got 0": lambda: Capacity(0, 8, 4),
    "max_context must be at least 1": lambda: Capacity(1, 0, 4),
    "page_size must be at least 1": lambda: Capacity(1, 8, 0),
    "topk must be at least 1, got 0": lambda: Capacity(1, 8, 4, topk=0),
    "num_steps must be at least 1, got -1": lambda: Capacity(1, 8, 4, num_steps=-1),
    "num_rerun must be at least 0, got -1": lambda: Capacity(1, 8, 4, num_rerun=-1),
    r"in \[2, 9\].*topk=1 and num_steps=8; got 10": lambda: Capacity(1, 8, 4, 1, 8, 10),
    r"in \[2, 11\].*topk=2 and num_steps=3; got 12": lambda: Capacity(1, 8, 4, 2, 3, 12),
    r"in \[2, 11\].*got 1": lambda: Capacity(1, 8, 4, 2, 3, 1),
    "block_size must be a whole number, got 4.0": lambda: Capacity(1, 8, 4, block_size=4.0),  # type: ignore[arg-type]
    "block_width must be at least 1, got 0": lambda: Capacity(1, 8, 4, block_size=0),
    r"kind must be a StepKind of steps of one width \(decode, .*draft_extend\), got <StepKind.PREFILL": lambda: (
        Capacity(1, 8, 4).bucket(StepKind.PREFILL, 1)
    ),
    "kind must be a StepKind of steps of one width .* got 'draft_decode'": lambda: Capacity(1, 8, 4).bucket(
        "draft_decode",  # type: ignore[arg-type]
        1,
    ),
    "a bucket holds at least 1 request, got bs=0": lambda: Capacity(1, 8, 4).bucket(StepKind.DECODE, 0),
    "a bucket of prefill holds at least 1 token, got num_tokens=0": lambda: Capacity(1, 8, 4).prefill_bucket(0),
    r"query is \[1, 2, 3\]; it must be UniformQuery\(width\) or PackedQuery.of": lambda: Step.prefill(
        [1, 2, 3],  # type: ignore[arg-type]
        SEQ_LENS,
        PAGING,
    ),
    "query is 4; it must be UniformQuery": lambda: Step.draft_extend(4, SEQ_LENS, PAGING),  # type: ignore[arg-type]
    "max_committed must be at least 0 tokens, got -1": lambda: Step.decode(SEQ_LENS, PAGING, max_committed=-1),
    "seq_lens_cpu holds -7; a request has": lambda: Step.decode(SEQ_LENS, PAGING, seq_lens_cpu=[7, -7, 0]),
    f"{2**64} committed ones leave no place": lambda: Step.decode(SEQ_LENS, PAGING, seq_lens_cpu=[7, 2**64, 0]),
    "cu_seqlens is on meta and seq_lens on cpu": lambda: Step.prefill(
        PackedQuery.of([1] * 3, "meta"), SEQ_LENS, PAGING
    ),
    "table is on meta and seq_lens on cpu": lambda: Step.decode(
        SEQ_LENS, BlockTable(BLOCKS.table.to("meta"), GEOMETRY)
    ),
    "rows is on meta and seq_lens on cpu": lambda: Step.decode(SEQ_LENS, PAGING.on_static(SLOTS[:3].to("meta"))),
    "out_cache_loc is on meta and seq_lens on cpu": lambda: Step.decode(SEQ_LENS, PAGING, SLOTS[:3].to("meta")),
    r"num_real must be \[1\] int32, got \[1\] torch.int64": lambda: replace(
        Step.decode(SEQ_LENS, PAGING, SLOTS[:3]), num_real=torch.ones(1, dtype=torch.int64)
    ),
    r"num_real must be \[1\] int32, got \[0\]": lambda: replace(
        Step.decode(SEQ_LENS, PAGING, SLOTS[:3]), num_real=torch.ones(0, dtype=torch.int32)
    ),
    "num_real is on meta and seq_lens on cpu": lambda: replace(
        Step.decode(SEQ_LENS, PAGING, SLOTS[:3]), num_real=torch.ones(1, dtype=torch.int32, device="meta")
    ),
    "tree_mask is on meta and seq_lens on cpu": lambda: Step.target_verify(
        4, SEQ_LENS, PAGING, tree_mask=torch.ones(3, 4, 4, dtype=torch.bool, device="meta")
    ),
    "got <StepKind.IDLE: 'idle'>; prefills have a prefill_bucket": lambda: Capacity(1, 8, 4).bucket(StepKind.IDLE, 1),
}


@pytest.mark.parametrize("message", BAD)
def test_impossible_steps_and_capacities_are_refused(message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        BAD[message]()


FULL_ROW: dict[str, Callable[[Tensor, Paging], Step]] = {
    "prefill": lambda lens, paging: Step.prefill(PACKED, lens, paging, max_committed=32),
    "decode": lambda lens, paging: Step.decode(lens, paging, max_committed=32),
    "draft": lambda lens, paging: Step.draft_decode(2, 3, lens, paging, max_committed=32),
    "verify": lambda lens, paging: Step.target_verify(4, lens, paging, max_committed=32),
    "extend": lambda lens, paging: Step.draft_extend(UniformQuery(3), lens, paging, max_committed=32),
}


@pytest.mark.parametrize("form", [RequestTable, BlockTable])
@pytest.mark.parametrize("name", FULL_ROW)
def test_default_write_slots_past_the_table_are_refused(name: str, form: type) -> None:
    """A row of 32 tokens, full: what the step adds has no place in it, and host bounds say so."""
    with pytest.raises(InvalidStepError, match="row"):
        FULL_ROW[name](torch.tensor([3, 32, 9]), paging_of(form))


def test_steps_of_one_layout_differ_in_values_alone() -> None:
    """A replay of a layout that was taken asks about nothing else."""
    rows, pages = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32)
    request, block = RequestTable(pages.repeat(2, 4), rows, GEOMETRY), BlockTable(pages, GEOMETRY)
    lens, slots, mask = torch.tensor([4, 4, 9]), torch.arange(12), torch.ones(3, 4, 4, dtype=torch.bool)
    step = Step.target_verify(4, lens, request, slots)
    again = Step.target_verify(4, lens + 1, replace(request, rows=rows + 1), slots + 4, max_committed=20)
    assert again.layout == step.layout
    on_meta = replace(request, table=request.table.to("meta"), rows=rows.to("meta"))
    strided_slots, other = torch.arange(24)[::2], CacheGeometry(60, 4, reserved_page=6, reserved_row=1)
    layouts = [
        step.layout,
        Step.target_verify(4, lens.to("meta"), on_meta, slots.to("meta")).layout,
        Step.draft_extend(UniformQuery(4), lens, request, slots).layout,
        Step.draft_extend(PackedQuery.of([4, 4, 4]), lens, request, slots).layout,
        Step.target_verify(2, lens, request, slots[:6]).layout,
        Step.draft_decode(1, 3, lens, request, slots[:9]).layout,
        Step.draft_decode(1, 4, lens, request, slots).layout,
        Step.target_verify(4, lens, replace(request, geometry=other), slots).layout,
        Step.target_verify(4, lens[:2], replace(request, rows=rows[:2]), slots[:8]).layout,
        Step.target_verify(4, lens.int(), request, slots).layout,
        Step.target_verify(4, strided(lens), request, slots).layout,
        Step.target_verify(4, lens, request, slots.int()).layout,
        Step.target_verify(4, lens, request, strided_slots).layout,
        Step.target_verify(4, lens, replace(request, rows=rows.long()), slots).layout,
        Step.target_verify(4, lens, replace(request, rows=strided(rows)), slots).layout,
        Step.target_verify(4, lens, block, slots).layout,
        Step.target_verify(4, lens, replace(block, table=pages[:, :7]), slots).layout,
        Step.target_verify(4, lens, replace(block, table=strided(pages)), slots).layout,
        Step.target_verify(4, lens, request, slots, tree_mask=mask).layout,
        Step.target_verify(4, lens, request, slots, tree_mask=mask.transpose(1, 2)).layout,
    ]
    assert len(set(layouts)) == len(layouts)


def test_an_engine_may_extend_by_every_verified_node() -> None:
    """SGLang does; a tree verifies more nodes than a path can have, and pages must hold what it writes."""
    sizes = {"max_bs": 2, "max_context": 32, "page_size": 4, "topk": 4, "num_steps": 3, "num_draft_tokens": 16}
    accepted, every = Capacity(**sizes), Capacity(**sizes, num_extended=16)
    assert (accepted.extend_width, every.extend_width) == (4, 16)
    assert every.bucket(StepKind.DRAFT_EXTEND, 2).width == 16
    assert every.draft_room >= every.extend_width


def test_mask_rows_behind_the_accepted_ones_have_room() -> None:
    """P-EAGLE's draft extend has more rows than a verify, and begins behind up to max_context tokens."""
    capacity = Capacity(2, 32, 4, 1, 3, 4, num_extended=6)
    assert (capacity.extend_width, capacity.draft_room, capacity.max_tokens) == (6, 6, 38)
