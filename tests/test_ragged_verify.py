"""Ragged verifies: the rule that keeps widths within bounds, how rows are packed and padded, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from attn_backends import UnsupportedStepError, get_backend
from attn_backends.planning.metadata import WRITE_SLOTS
from spec_metadata import (
    BlockTable,
    BoundedQuery,
    BoundInputs,
    BoundStep,
    Capacity,
    InvalidStepError,
    PaddedQuery,
    RequestTable,
    Step,
    StepKind,
    TokenBucket,
    allocate,
    confident_widths,
    copy_step,
    fit_widths,
    pad_step,
    token_positions,
    write_slots,
)
from spec_metadata.bound_inputs import check_bound
from spec_metadata.static_inputs import closed
from tests.planner_laws import FORMS as PLANNERS
from tests.planner_laws import GARBAGE, RAGGED_RINGS, Form, check_along, written_along
from tests.ragged_steps import CAPACITY, GEOMETRY, WIDTH, Ragged, cut, static_of
from tests.triton_interpreter import interpreted, last_program_first

FORMS = [RequestTable, BlockTable]
PLANS = {name: PLANNERS[name] for name in ("ragged", "csr")} | {"compressed": RAGGED_RINGS.form}
TABLE = torch.cat((torch.full((1, 24), 12), 16 + torch.arange(9 * 24).view(9, 24)))
ROWS = RequestTable(TABLE, torch.tensor([2, 4, 7]), GEOMETRY)
LENS = torch.tensor([5, 2, 7], dtype=torch.int32)


def query(*widths: int, num_tokens: int = 12, width: int = WIDTH) -> BoundedQuery:
    return BoundedQuery(torch.tensor(widths, dtype=torch.int32), num_tokens, width)


def verify(*widths: int, **bounds: int) -> Step:
    return Step.target_verify(query(*widths, **bounds), LENS, ROWS)


def bucket_of(bs: int, num_tokens: int, kind: StepKind = StepKind.TARGET_VERIFY) -> TokenBucket:
    return CAPACITY.ragged_bucket(kind, bs, num_tokens)


@pytest.mark.parametrize(
    ("widths", "num_tokens", "kept"),
    [
        ((3, 1, 4), 12, [3, 1, 4]),
        ((3, 1, 4), 8, [3, 1, 4]),
        ((3, 1, 4), 7, [3, 1, 3]),
        ((3, 1, 4), 6, [3, 1, 2]),  # both have a third row, and the later one's goes
        ((4, 4, 4), 7, [3, 2, 2]),
        ((4, 4, 4), 3, [1, 1, 1]),
        ((0, -5, 9), 12, [1, 1, 4]),
    ],
)
def test_the_deepest_rows_of_the_last_requests_go_first(widths, num_tokens, kept) -> None:
    real = torch.ones(3, dtype=torch.bool)
    assert fit_widths(query(*widths, num_tokens=num_tokens), real).tolist() == kept == cut(widths, WIDTH, num_tokens)
    real[1] = False
    kept[1] = 0
    assert fit_widths(query(*widths, num_tokens=12), real)[1] == 0


def test_the_rule_as_it_is_said() -> None:
    for seed in range(200):
        case = Ragged(seed, num_padded=seed % 3)
        real = torch.arange(case.bs) < case.num_real
        assert fit_widths(case.step.query, real).tolist() == case.kept


def test_the_least_confident_rows_go_first() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.45, 0.4], [0.95, 0.2, 0.19]]).log()
    real = torch.ones(3, dtype=torch.bool)

    def widths(threshold: float, num_tokens: int) -> list[int]:
        return confident_widths(scores, threshold, num_tokens, real).tolist()

    assert widths(0, 12) == [4, 4, 4]
    assert widths(0.42, 12) == [3, 3, 2]
    assert widths(1, 12) == [1, 1, 1]
    assert [widths(0, n) for n in (3, 4, 5, 6, 7, 8, 9, 10, 11)] == [
        [1, 1, 1],
        [1, 1, 2],
        [2, 1, 2],
        [3, 1, 2],
        [3, 2, 2],
        [3, 3, 2],
        [3, 4, 2],
        [3, 4, 3],
        [3, 4, 4],
    ]
    real[1] = False
    assert widths(0, 6) == [3, 1, 3], "who is not real takes no row of the others"


def test_equal_and_impossible_confidence() -> None:
    real = torch.ones(2, dtype=torch.bool)
    certain = torch.zeros(2, 3)
    assert [confident_widths(certain, 0.5, n, real).tolist() for n in (3, 4, 5)] == [[2, 1], [2, 2], [3, 2]]
    overflowed = torch.tensor([[0.0, float("nan"), float("nan")], [float("-inf")] * 3])
    assert confident_widths(overflowed, 0.1, 8, real).tolist() == [2, 1]
    assert confident_widths(overflowed, 0, 4, real).tolist() == [2, 2]


@pytest.mark.parametrize("num_padded", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_packed_and_what_is_left_is_padding(form: type, num_padded: int) -> None:
    for seed, has_slots in product(range(6), (True, False)):
        case = Ragged(seed, form, has_slots=has_slots, num_padded=num_padded)
        step, kept = closed(case.step, CAPACITY), case.kept
        assert isinstance(step.query, PaddedQuery)
        num_rows, starts = sum(kept), step.query.cu_seqlens.tolist()
        assert starts[: case.bs + 1] == [sum(kept[:i]) for i in range(case.bs + 1)]
        assert starts[-1] == step.num_tokens == case.num_tokens
        assert write_slots(step)[:num_rows].tolist() == case.written
        assert set((write_slots(step)[num_rows:] // 4).tolist()) <= {GEOMETRY.reserved_page}
        expected = [n + j for n, width in zip(case.lens, kept, strict=True) for j in range(width)]
        assert token_positions(step)[:num_rows].tolist() == expected
        assert step.seq_lens[case.num_real :].tolist() == [0] * (step.bs - case.num_real)
        assert int(step.num_real) == case.num_real


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_has_the_rows_of_the_eager_step(form: type) -> None:
    """The bound of the step cuts, not that of the larger bucket."""
    for seed in range(6):
        case = Ragged(seed, form)
        eager, kept = closed(case.step, CAPACITY), sum(case.kept)
        static, _ = static_of(case, case.bucket(3))
        copy_step(static, case.step)
        assert static.query.cu_seqlens[: case.bs + 1].tolist() == eager.query.cu_seqlens[: case.bs + 1].tolist()
        assert torch.equal(static.flat_slots()[:kept], eager.flat_slots()[:kept])


def check_same(ours: dict, theirs: dict, case: Ragged, what: str) -> None:
    """Of a block table as far as tokens reach."""
    for name, tensor in theirs.items():
        if name == "paging" and isinstance(case.paging, BlockTable):
            added = theirs["cu_seqlens"].diff()
            live = torch.arange(tensor.shape[1]) < -(-(theirs["seq_lens"] + added) // 4).unsqueeze(1)
            assert torch.equal(ours[name] * live, tensor * live), f"{what}, paging"
            continue
        assert torch.equal(ours[name], tensor), f"{what}, {name}:\n{ours[name]}\n{tensor}"


@pytest.mark.parametrize(("form", "num_padded"), list(zip(FORMS, (0, 2), strict=True)))
def test_the_fused_copy(form: type, num_padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = interpreted("triton_inputs", "_copy_inputs")
    for seed, has_slots in product(range(2), (True, False)):
        monkeypatch.setattr(module, "_BLOCK", (2, 256)[seed % 2])
        case = Ragged(seed, form, has_slots=has_slots, num_padded=num_padded)
        for num_more in (0, 2):
            (expected, theirs), (fused, ours) = (static_of(case, case.bucket(num_more)) for _ in range(2))
            copy_step(expected, case.step)
            module.bind_inputs(fused)(case.step)(case.step)
            check_same(ours, theirs, case, f"seed {seed}, {num_more} more")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_bound_widths_are_what_a_replay_copies(form: type, include: bool) -> None:
    for seed, has_slots in product(range(3), (True, False)):
        case = Ragged(seed, form, has_slots=has_slots, num_padded=seed % 2)
        case.num_tokens = max(case.num_tokens, WIDTH)
        bucket, inputs = case.bucket(0), case.inputs(include=include)
        check_bound(inputs, bucket, case.paging, CAPACITY)
        (copied, expected), (read, ours) = (static_of(case, bucket) for _ in range(2))
        copy_step(copied, case.step)
        BoundStep(read, inputs, case.paging, CAPACITY).read()
        if form is RequestTable:
            for buffers in (expected, ours):  # whose rows are not real read nothing
                buffers["paging"][case.num_real : case.bs] = 0
        check_same(ours, expected, case, f"seed {seed}")


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_launch_reads_an_engine_and_plans(plan: str, form: type, counted: bool, monkeypatch) -> None:
    """None of its programs needs what another one writes."""
    last_program_first(monkeypatch)
    blocks = interpreted("triton_plan_tiles", "_write_words"), interpreted("triton_plan_compressed", "_plan_rows")
    for seed, has_slots in [(0, True), (1, False)] if plan == "compressed" else product(range(4), (True, False)):
        for module, name in zip(blocks, ("_REQUESTS", "_BLOCK"), strict=True):
            monkeypatch.setattr(module, name, (2, 256)[seed % 2])
        case = Ragged(seed, form, has_slots=has_slots, num_padded=seed % 3)
        check_bound_plan(PLANS[plan], case, case.inputs(include=not counted, counted=counted), f"seed {seed}")


def check_bound_plan(plan: Form, case: Ragged, inputs: BoundInputs, what: str) -> None:
    """The captured step and the plan are those of the definitions; nothing else of the plan was written."""
    (read, expected), (fused, ours) = (static_of(case, case.bucket(0)) for _ in range(2))
    BoundStep(read, inputs, case.paging, CAPACITY).read()
    planned, made = (allocate((WRITE_SLOTS, *plan.specs), expected.extent, read.device) for _ in range(2))
    for tensor in (*planned.values(), *made.values(), *ours.values()):
        tensor.fill_(GARBAGE)
    planned[WRITE_SLOTS.name][0].copy_(write_slots(read))
    plan.write(read, planned)
    launch = plan.bind(fused, made, BoundStep(fused, inputs, case.paging, CAPACITY))
    along = written_along(launch, made)
    launch()
    check_same(ours, expected, case, what)
    masks = plan.specified(read, planned)
    for name, tensor in made.items():
        mask = masks.get(name, torch.ones_like(tensor, dtype=torch.bool))
        wanted = torch.where(mask, planned[name], GARBAGE)
        assert torch.equal(tensor, wanted), f"{what}, {name}, widths {case.widths}:\n{tensor}\n{wanted}"
    check_along(along, planned)


@pytest.mark.parametrize("form", FORMS)
def test_slots_outside_the_pool_are_bound_to_the_reserved_page(form: type) -> None:
    interpreted("triton_plan", "_plan_pages")
    case = Ragged(1, form, bs=3)
    case.given, case.num_tokens = torch.full((3 * WIDTH,), -1), 12
    for is_fused in (False, True):
        static, buffers = static_of(case, case.bucket(0))
        bound = BoundStep(static, case.inputs(), case.paging, CAPACITY)
        plan = PLANS["ragged"]
        made = allocate((WRITE_SLOTS, *plan.specs), buffers.extent, static.device)
        (plan.bind(static, made, bound) if is_fused else bound.read)()
        assert set((static.flat_slots() // 4).tolist()) == {GEOMETRY.reserved_page}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: verify(1, 2, num_tokens=12), r"widths of 3 requests must be \[3\] int32 or int64, got"),
        (lambda: verify(1, 2, 3, num_tokens=2), "at least 3, a row of each of 3 requests; got 2"),
        (lambda: verify(1, 2, 3, width=0), "must be at least 1, got 0"),
        (
            lambda: Step.target_verify(query(1, 1, 1), LENS, ROWS, tree_mask=torch.ones(3, 4, 4).bool()),
            "its rows are chains. Verify a tree at one width",
        ),
        (lambda: bucket_of(4, 3, StepKind.DRAFT_EXTEND), "a bucket of draft_extend steps holds a row of each"),
        (lambda: replace(verify(1, 1, 1), kind=StepKind.DRAFT_BLOCK), "a draft_block step has no widths of the device"),
        (lambda: token_positions(verify(1, 1, 1)), r"has rows once it is planned: .* \(meta.step\)"),
        (lambda: bucket_of(4, 3), "a bucket of target_verify steps holds a row of each request, got"),
        (lambda: confident_widths(torch.zeros(2, 3), 1.5, 8, torch.ones(2).bool()), "a probability in"),
        (lambda: confident_widths(torch.zeros(2, 3), 0.5, 1, torch.ones(2).bool()), "at least 2, a row of each"),
        (lambda: confident_widths(torch.zeros(2), 0.5, 4, torch.ones(2).bool()), "scores must be"),
    ],
)
def test_what_is_no_ragged_step(make, message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        make()


BAD = [
    ((2, 0, 1), 12, "request 1 has a width of 0; a ragged step has 1 to 4 rows"),
    ((2, 5, 1), 12, "request 1 has a width of 5; a ragged step has 1 to 4 rows"),
    ((4, 3, 1), 7, r"widths \[4, 3, 1\] are 8 rows, over the bound of 7"),
]


@pytest.mark.parametrize(("widths", "num_tokens", "message"), BAD)
def test_bad_widths_are_told_in_checking_mode_and_cut_otherwise(widths, num_tokens, message: str) -> None:
    step = verify(*widths, num_tokens=num_tokens)
    strict, plain = (get_backend("fa3")(CAPACITY, GEOMETRY, checking=checking) for checking in (True, False))
    with pytest.raises(InvalidStepError, match=message):
        strict.init_forward_metadata(step)
    captured = strict.capture(bucket_of(4, 14), ROWS)
    with pytest.raises(InvalidStepError, match=message):
        strict.replay(captured, step)
    starts = plain.init_forward_metadata(step).plans[0].cu_seqlens_q.tolist()
    assert starts[:4] == [sum(cut(widths, WIDTH, num_tokens)[:i]) for i in range(4)]
    bucket = bucket_of(3, num_tokens)
    inputs = BoundInputs(LENS, num_real=torch.tensor([3]), widths=step.query.widths)
    with pytest.raises(InvalidStepError, match=message):
        strict.refresh(strict.capture(bucket, ROWS, inputs))
    static, _ = static_of(Ragged(0, bs=3), bucket)
    BoundStep(static, inputs, ROWS, CAPACITY).read()
    with pytest.raises(InvalidStepError, match=message):
        BoundStep(static, inputs, ROWS, CAPACITY).check()


@pytest.mark.parametrize(
    ("inputs", "bucket", "message"),
    [
        ({}, bucket_of(3, 9), "inputs.widths of .* is None; a ragged step has them, no other"),
        ({"widths": LENS}, CAPACITY.bucket(StepKind.DECODE, 3), "a ragged step has them, no other"),
        ({"widths": LENS[:2]}, bucket_of(3, 9), r"inputs.widths must be \[3\]"),
        ({"widths": LENS, "out_cache_loc": torch.zeros(9).long()}, bucket_of(3, 9), r"must be \[12\]"),
        ({}, TokenBucket(StepKind.PREFILL, 3, 9), "whose inputs are copied"),
    ],
)
def test_what_can_not_be_bound(inputs: dict, bucket, message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        check_bound(BoundInputs(LENS, num_real=torch.tensor([3]), **inputs), bucket, ROWS, CAPACITY)


def test_a_kind_that_is_never_ragged_has_no_bucket_of_it() -> None:
    for kind in (StepKind.DECODE, StepKind.PREFILL, StepKind.IDLE):
        with pytest.raises(InvalidStepError, match=f"no {kind} step is ragged"):
            CAPACITY.ragged_bucket(kind, 2, 4)


def test_wider_than_the_capacity_or_the_graph() -> None:
    backend = get_backend("fa3")(CAPACITY, GEOMETRY)
    with pytest.raises(InvalidStepError, match=r"target_verify step of up to 6 rows .* holds at most 4"):
        backend.init_forward_metadata(verify(1, 1, 1, width=6))
    meta = backend.capture(bucket_of(3, 9), ROWS)
    with pytest.raises(UnsupportedStepError, match=r"captured for \(target_verify bs=3 num_tokens=9\), the step is"):
        backend.replay(meta, verify(1, 1, 1))
    paging = replace(ROWS, rows=torch.tensor([1, 2, 3, 4]))
    four = Step.target_verify(query(1, 1, 1, 1, num_tokens=9), torch.zeros(4).int(), paging)
    with pytest.raises(UnsupportedStepError, match="captured for 3 requests, the step has 4"):
        backend.replay(meta, four)
    with pytest.raises(UnsupportedStepError, match="fits no graph"):
        backend.replay(meta, Step.target_verify(4, LENS, ROWS))


def test_rows_that_run_again_count_in_the_width_of_a_draft_extend() -> None:
    capacity = replace(CAPACITY, max_context=16, num_rerun=2)
    backend = get_backend("fa3")(capacity, GEOMETRY, checking=True)
    meta = backend.capture(capacity.ragged_bucket(StepKind.DRAFT_EXTEND, 3, 14), ROWS)
    step = Step.draft_extend(query(6, 3, 5, num_tokens=14, width=6), LENS, ROWS)
    backend.replay(meta, step)
    assert meta.step.query.cu_seqlens[:4].tolist() == [0, 6, 9, 14]
    eager = backend.init_forward_metadata(step)
    assert meta.step.width == eager.step.width == eager.plans[0].max_seqlen_q == 6
    with pytest.raises(InvalidStepError, match=r"draft_extend step of up to 7 rows .* holds at most 6"):
        backend.init_forward_metadata(replace(step, query=query(1, 1, 1, width=7)))


def test_a_kernel_of_one_width_refuses_it() -> None:
    capacity = Capacity(3, 20, 32, num_steps=3, num_draft_tokens=4)
    geometry = replace(GEOMETRY, page_size=32)
    rows = RequestTable(torch.zeros(4, 64).int(), torch.tensor([1, 2, 3]), geometry)
    backend = get_backend("trtllm_mla")(capacity, geometry)
    with pytest.raises(UnsupportedStepError, match=r"packed query rows \(it takes one uniform width\)"):
        backend.init_forward_metadata(Step.target_verify(query(1, 1, 1), LENS, rows))
    with pytest.raises(UnsupportedStepError, match=r"packed query rows \(it takes one uniform width\)"):
        backend.capture(capacity.ragged_bucket(StepKind.TARGET_VERIFY, 3, 9), rows)


def test_a_layout_seen_before_is_not_asked_about_again() -> None:
    """Widths differ from step to step, and their layout does not."""
    backend = get_backend("fa3")(CAPACITY, GEOMETRY)
    meta = backend.capture(bucket_of(3, 12), ROWS)
    backend.replay(meta, verify(1, 2, 3))
    assert meta.captured.admits(verify(4, 4, 4))
    assert not meta.captured.admits(verify(4, 4, 4, num_tokens=11))
    backend.replay(meta, verify(4, 1, 2))
    assert meta.step.query.cu_seqlens[:4].tolist() == [0, 4, 5, 7]


def test_a_padded_step_is_taken_as_it_is() -> None:
    step = pad_step(verify(1, 2, 3), bucket_of(4, 14), CAPACITY)
    assert closed(step, CAPACITY) is step
    assert step.width == WIDTH
