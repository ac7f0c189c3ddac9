"""What the host knows of lengths and tables: what fits is taken, and what can't fit is refused with its sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.selection import providers
from spec_metadata import (
    BlockTable,
    CacheGeometry,
    Capacity,
    InvalidStepError,
    PackedQuery,
    Paging,
    RequestTable,
    Step,
    StepKind,
    UniformQuery,
    pad_step,
)
from spec_metadata.admission import check_table_room
from spec_metadata.static_inputs import padding_step
from tests.checks import check_identical
from tests.triton_interpreter import interpreted

RERUN = Capacity(2, 12, 1, topk=1, num_steps=3, num_draft_tokens=4, num_rerun=2)
NARROW = Capacity(2, 30, 16, topk=1, num_steps=3, num_draft_tokens=4)


def backend_of(
    form: type[AttentionBackend], planner: str, capacity: Capacity, geometry: CacheGeometry
) -> AttentionBackend:
    """A backend without checking mode."""
    return form(capacity, geometry, kernel="torch", planner=planner)


@pytest.fixture(params=[(ReferenceBackend, "torch"), (FA3Backend, "torch"), (FA3Backend, "fused")], ids=str)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AttentionBackend]:
    """A backend of a capacity and geometry, for each way to plan."""
    form, planner = request.param
    if planner == "fused":
        interpreted("triton_plan", "_plan_pages")
        monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    return lambda capacity, geometry: backend_of(form, planner, capacity, geometry)


def table_of(capacity: Capacity, row_tokens: int) -> RequestTable:
    """Two requests behind the reserved row, rows of so many tokens."""
    rows = 3 * capacity.max_kv_len
    slots = torch.arange(rows, dtype=torch.int32).view(3, -1)[:, :row_tokens]
    geometry = CacheGeometry(rows // capacity.page_size, capacity.page_size)
    return RequestTable(slots.contiguous() % geometry.num_slots, torch.tensor([1, 2]), geometry)


# W1: the capacity's own uniform draft extend.


@pytest.mark.parametrize("bounds", [{}, {"max_committed": RERUN.max_context}, {"max_committed": 9}], ids=str)
def test_the_capacity_s_own_draft_extend_needs_no_bounds(make, bounds: dict[str, int]) -> None:
    """It begins at the tokens that it runs again, so that a request of the whole context leaves it room."""
    paging = table_of(RERUN, RERUN.max_kv_len)
    backend = make(RERUN, paging.geometry)
    last = RERUN.max_kv_len - RERUN.extend_width
    meta = backend.capture(RERUN.bucket(StepKind.DRAFT_EXTEND, 2), paging)
    for lens in ([0, 3], [last, min(last, 9)]):
        step = Step.draft_extend(UniformQuery(RERUN.extend_width), torch.tensor(lens), paging, **bounds)
        eager = backend.init_forward_metadata(step)
        backend.replay(meta, step)
        backend.replay(meta, step)
        ends = paging.slots((torch.tensor(lens) + RERUN.extend_width - 1).unsqueeze(1)).flatten()
        for each in (eager, meta):
            assert torch.equal(each.at().write_slots.view(2, -1)[:, -1], ends)


def test_a_draft_extend_that_is_known_not_to_fit_is_refused(make) -> None:
    paging = table_of(RERUN, RERUN.max_kv_len)
    backend = make(RERUN, paging.geometry)
    meta = backend.capture(RERUN.bucket(StepKind.DRAFT_EXTEND, 2), paging)
    query, slots = UniformQuery(RERUN.extend_width), torch.arange(2 * RERUN.extend_width)
    fits = Step.draft_extend(query, torch.tensor([3, 4]), paging, slots)
    backend.replay(meta, fits)
    exact = (RERUN.max_kv_len - RERUN.extend_width + 1, 0)
    step = Step.draft_extend(query, torch.tensor(exact), paging, slots, seq_lens_cpu=exact)
    for take in (lambda: backend.init_forward_metadata(step), lambda: backend.replay(meta, step)):
        with pytest.raises(
            InvalidStepError, match="12 committed tokens and adds 6, together 18; the capacity holds 17"
        ):
            take()
    wider = Step.draft_extend(UniformQuery(7), torch.tensor([0, 0]), paging, torch.arange(14))
    with pytest.raises(InvalidStepError, match="adds 7, together 19"):
        backend.init_forward_metadata(wider)


@pytest.mark.parametrize("packed", [False, True])
def test_a_padded_step_keeps_the_bound_on_its_lengths(packed: bool) -> None:
    paging = table_of(NARROW, 20)
    lens = torch.tensor([5, 7], dtype=torch.int32)
    if packed:
        step = Step.prefill(PackedQuery.of([2, 3]), lens, paging, max_committed=9)
        padded = pad_step(step, NARROW.prefill_bucket(8), NARROW)
    else:
        step = Step.decode(lens, paging, max_committed=9, seq_lens_cpu=(5, 7))
        padded = pad_step(step, step.bucket(4), NARROW)
        assert padded.seq_lens_cpu == (5, 7)
    assert padded.max_committed == 9
    check_table_room(padded, NARROW)


# W5: a bound is a bound.


def steps_within(paging: Paging, **bounds: int) -> Iterator[Step]:
    """Steps of every kind that fit behind 0 and 5 committed tokens."""
    lens = torch.tensor([0, 5])
    yield Step.prefill(PackedQuery.of([25, 20]), lens, paging, **bounds)
    yield Step.draft_extend(PackedQuery.of([9, 3]), lens, paging, **bounds)
    yield Step.decode(lens, paging, **bounds)
    yield Step.draft_decode(1, 3, lens, paging, **bounds)
    yield Step.target_verify(4, lens, paging, **bounds)
    yield Step.draft_extend(UniformQuery(4), lens, paging, **bounds)


@pytest.mark.parametrize("bound", [5, 20, NARROW.max_context])
def test_the_capacity_s_own_bound_refuses_nothing_that_none_takes(make, bound: int) -> None:
    paging = table_of(NARROW, NARROW.max_kv_len)
    backend = make(NARROW, paging.geometry)
    for known, unknown in zip(steps_within(paging, max_committed=bound), steps_within(paging), strict=True):
        metas = [backend.init_forward_metadata(step) for step in (known, unknown)]
        check_identical("write_slots", *(meta.at().write_slots for meta in metas))


def test_what_can_not_fit_is_refused_with_its_sum() -> None:
    paging, lens = table_of(NARROW, NARROW.max_kv_len), torch.tensor([0, 5])
    slots = torch.arange(60)
    cases: list[tuple[Step, str]] = [
        (
            Step.prefill(PackedQuery.of([40, 2]), lens, paging, slots[:42], seq_lens_cpu=(9, 5)),
            r"9 committed tokens and adds 40, together 49; the capacity holds 48 \(max_context=30 and 4 drafted, in "
            r"whole pages of 16\)",
        ),
        (Step.prefill(PackedQuery.of([49, 2]), lens, paging, slots[:51]), "adds 49, together 49; the capacity holds"),
        (
            Step.decode(lens, paging, slots[:2], max_committed=48),
            r"up to 48 committed tokens \(max_committed\) and adds 1, together 49; the capacity holds 48",
        ),
        (
            Step.target_verify(19, lens, paging, slots[:38]),
            r"up to 30 committed tokens \(max_context\) and adds 19, together 49",
        ),
    ]
    for step, message in cases:
        with pytest.raises(InvalidStepError, match=message):
            check_table_room(step, NARROW)


def test_the_advice_of_a_refusal_leads_to_a_step_that_is_taken() -> None:
    """Of a narrow table: either a bound or exact lengths, whichever the host has, and no second refusal."""
    paging, lens = table_of(NARROW, 20), torch.tensor([2, 5])
    step = Step.decode(lens, paging)
    with pytest.raises(InvalidStepError, match=r"a table row holds 20 tokens; 34 are needed.*pass max_committed"):
        check_table_room(step, NARROW)
    check_table_room(Step.decode(lens, paging, max_committed=19), NARROW)
    check_table_room(Step.decode(lens, paging, seq_lens_cpu=(2, 5)), NARROW)
    prompt = Step.prefill(PackedQuery.of([15, 4]), lens, paging, seq_lens_cpu=(2, 5))
    check_table_room(prompt, NARROW)
    with pytest.raises(InvalidStepError, match="a table row holds 20 tokens; 21 are needed") as refused:
        check_table_room(Step.decode(lens, paging, torch.tensor([1, 2]), seq_lens_cpu=(2, 20)), NARROW)
    assert "max_committed" not in str(refused.value)


# B5: a table that is wide enough.


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_request_table_needs_no_whole_pages(make, page_size: int) -> None:
    """SGLang's rows are as long as its context and what it drafts, whatever the pages."""
    capacity = Capacity(2, 100, page_size, topk=1, num_steps=3, num_draft_tokens=4)
    paging = table_of(capacity, 104)
    backend = make(capacity, paging.geometry)
    wide = table_of(capacity, capacity.max_kv_len)
    for kind, last in ((StepKind.DECODE, 103), (StepKind.TARGET_VERIFY, 100)):
        meta = backend.capture(capacity.bucket(kind, 2), paging)
        for lens in ([last, 0], [3, last - 1]):
            step, same = (
                Step.decode(torch.tensor(lens), each)
                if kind is StepKind.DECODE
                else Step.target_verify(4, torch.tensor(lens), each)
                for each in (paging, wide)
            )
            backend.replay(meta, step)
            expected = backend.init_forward_metadata(same)
            for each in (meta, backend.init_forward_metadata(step)):
                check_identical("write_slots", each.at().write_slots, expected.at().write_slots)
                for name in ("seqused_k", "num_visible"):
                    if name in each.buffers:
                        check_identical(name, each.buffers[name], expected.buffers[name])


def test_pages_of_a_narrow_request_table_are_those_of_a_wide_one() -> None:
    capacity = Capacity(2, 100, 64, topk=1, num_steps=3, num_draft_tokens=4)
    lens = torch.tensor([103, 63])
    backend = FA3Backend(capacity, table_of(capacity, 104).geometry, kernel="torch", planner="torch")
    narrow, wide = (
        backend.init_forward_metadata(Step.decode(lens, table_of(capacity, tokens))).buffers["page_table"]
        for tokens in (104, capacity.max_kv_len)
    )
    check_identical("page_table", narrow, wide)


def test_a_row_one_token_too_short_is_refused() -> None:
    capacity = Capacity(2, 100, 64, topk=1, num_steps=3, num_draft_tokens=4)
    paging = table_of(capacity, 103)
    backend = FA3Backend(capacity, paging.geometry)
    message = r"a table row holds 103 tokens; 104 are needed, max_context=100 and 4 drafted"
    with pytest.raises(InvalidStepError, match=message):
        backend.init_forward_metadata(Step.decode(torch.tensor([3, 4]), paging))
    with pytest.raises(InvalidStepError, match=message) as refused:
        backend.capture(capacity.bucket(StepKind.DECODE, 2), paging)
    assert "max_committed" not in str(refused.value), "a capture has no bound to pass"
    too_long = Step.decode(torch.tensor([103, 4]), paging, torch.tensor([70, 71]), seq_lens_cpu=(103, 4))
    with pytest.raises(InvalidStepError, match="103 tokens; 104 are needed"):
        backend.init_forward_metadata(too_long)


def test_a_replay_with_more_tokens_than_the_row_is_refused() -> None:
    """The capacity's last page is longer than the row: exact lengths that end between the two can't be read."""
    capacity = Capacity(2, 100, 64, topk=1, num_steps=3, num_draft_tokens=4)
    paging = table_of(capacity, 104)
    backend = FA3Backend(capacity, paging.geometry)
    meta = backend.capture(capacity.bucket(StepKind.DECODE, 2), paging)
    slots = torch.tensor([70, 71])
    backend.replay(meta, Step.decode(torch.tensor([103, 4]), paging, slots, seq_lens_cpu=(103, 4)))
    for bounds in ({"seq_lens_cpu": (104, 4)}, {"max_committed": 104}):
        with pytest.raises(InvalidStepError, match="a table row holds 104 tokens; 105 are needed"):
            backend.replay(meta, Step.decode(torch.tensor([104, 4]), paging, slots, **bounds))


@pytest.mark.parametrize("form", [RequestTable, BlockTable])
def test_packed_rows_are_padded_on_a_row_that_is_just_wide_enough(form: type) -> None:
    """Padded rows may be as many as the capacity's last page holds; they are the reserved page's."""
    capacity = Capacity(2, 100, 64, topk=1, num_steps=3, num_draft_tokens=4)
    paging: Paging = table_of(capacity, 104)
    if form is BlockTable:
        paging = BlockTable(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), paging.geometry)
    bucket = capacity.prefill_bucket(300)
    for kind in (ReferenceBackend, FA3Backend):
        backend = backend_of(kind, "torch", capacity, paging.geometry)
        meta = backend.capture(bucket, paging)
        step = Step.prefill(PackedQuery.of([100, 7]), torch.tensor([4, 9], dtype=torch.int32), paging)
        backend.replay(meta, step)
        eager = backend.init_forward_metadata(pad_step(step, bucket, capacity))
        check_identical("write_slots", meta.at().write_slots, eager.at().write_slots)
    assert int(padding_step(bucket, paging, capacity).num_real) == 0
