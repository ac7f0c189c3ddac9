"""A committed state: what is loaded into it is planned as steps are that are copied phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import CaptureError, RecordedGraph, get_backend
from attn_backends.backend import AttentionBackend
from attn_backends.planning.metadata import Metadata
from attn_backends.selection import providers
from spec_metadata import (
    AnyBucket,
    BlockTable,
    BoundedQuery,
    BoundStep,
    CacheGeometry,
    Capacity,
    CommittedState,
    InvalidStepError,
    RequestTable,
    Step,
    StepKind,
    TokenBucket,
    UniformQuery,
)
from spec_metadata.capacity import UNIFORM_KINDS
from spec_metadata.visibility import leading, query_starts
from tests.specified import TABLES, specified
from tests.triton_interpreter import interpreted

FORMS = [RequestTable, BlockTable]
PAGE_SIZES = {"fa3": 4, "trtllm_mla": 32, "flashinfer_mla": 4, "reference": 4, "dsv4": 256}
SIZES = [(name, topk) for name in PAGE_SIZES for topk in (1, 2) if (name, topk) != ("dsv4", 2)]
MAX_BS, NUM_ROWS = 4, 6
BATCHES = [([5, 0, 40], [2, 6, 1]), ([12, 41, 1, 7], [5, 3, 4, 1]), ([], []), ([33, 8], [6, 2])]
"""Committed tokens of requests, and their rows of the table."""


class Engine:
    """Requests in random pages of one cache, a state of them, and backends. Row 0 and page 1 are reserved."""

    def __init__(self, name: str, form: type, topk: int = 1, **options: Any) -> None:
        page_size = PAGE_SIZES[name]
        self.capacity = Capacity(MAX_BS, 47, page_size, topk, num_steps=3, num_draft_tokens=4)
        columns = self.capacity.max_pages
        geometry = CacheGeometry(2 + NUM_ROWS * columns, page_size, reserved_page=1)
        pages = 2 + torch.randperm(NUM_ROWS * columns, generator=torch.Generator().manual_seed(topk))
        self.pages = torch.cat((torch.ones(1, columns, dtype=torch.int64), pages.view(NUM_ROWS, -1)))
        slots = (self.pages.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
        self.rows = RequestTable(slots.int(), torch.zeros(0, dtype=torch.int64), geometry)
        self.blocks = BlockTable(torch.zeros(MAX_BS, columns, dtype=torch.int32), geometry)
        self.form, self.paging = form, self.rows if form is RequestTable else self.blocks
        self.state = CommittedState.of(self.paging, MAX_BS)
        self.mask = torch.ones(MAX_BS, 4, 4, dtype=torch.bool).tril()
        self.make: Callable[[], AttentionBackend] = lambda: get_backend(name)(
            self.capacity, geometry, kernel="torch", **options
        )

    def load(self, lens: Sequence[int], rows: Sequence[int], state: CommittedState | None = None) -> None:
        """Into the state, and pages into the engine's block table."""
        state, given = state or self.state, torch.tensor(lens, dtype=torch.int64)
        if self.form is RequestTable:
            state.load(given, torch.tensor(rows, dtype=torch.int32))
        else:
            self.blocks.table[: len(rows)] = self.pages[list(rows)].int()
            state.load(given)

    def capture(self, backend: AttentionBackend, bucket: AnyBucket, state: CommittedState | None = None) -> Metadata:
        """A phase on the state."""
        has_mask = bucket.kind is StepKind.TARGET_VERIFY and self.capacity.topk > 1
        mask = self.mask[: bucket.bs] if has_mask else None
        return backend.capture(bucket, *(state or self.state).bound(bucket.bs, tree_mask=mask))

    def step(self, kind: StepKind, lens: Sequence[int], rows: Sequence[int]) -> Step:
        """The same requests as a step of their own."""
        given, topk = torch.tensor(lens, dtype=torch.int32), self.capacity.topk
        paging: Any = BlockTable(self.pages[list(rows)], self.rows.geometry)
        if self.form is RequestTable:
            paging = self.rows.on_static(torch.tensor(rows, dtype=torch.int64))
        if not lens:
            return Step.idle(paging)
        match kind:
            case StepKind.DECODE:
                return Step.decode(given, paging)
            case StepKind.DRAFT_DECODE:
                return Step.draft_decode(topk, 3, given, paging)
            case StepKind.DRAFT_BLOCK:
                return Step.draft_block(4, given, paging)
            case StepKind.DRAFT_EXTEND:
                return Step.draft_extend(UniformQuery(self.capacity.extend_width), given, paging)
        return Step.target_verify(4, given, paging, tree_mask=self.mask[: len(lens)] if topk > 1 else None)


def live(meta: Metadata) -> dict[str, Tensor]:
    """Every buffer of metadata, without what nothing reads."""
    step, masks = meta.step, {}
    if any(name in meta.buffers for name in TABLES):
        masks = specified(
            step, meta.buffers, getattr(meta.owner, "compressions", ()) * ("num_entries_4" in meta.buffers)
        )
    if isinstance(step.paging, BlockTable):
        num_tokens = step.seq_lens + query_starts(step).diff() * step.num_steps
        masks["paging"] = leading(-(-num_tokens // step.paging.geometry.page_size), step.paging.table.shape[1])
    return {
        name: torch.where(masks[name], buffer, -1) if name in masks else buffer.clone()
        for name, buffer in meta.buffers.items()
    }


def check_same(found: Metadata, expected: Metadata) -> None:
    ours, theirs = live(found), live(expected)
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), f"{name} of ({found.bucket}):\n{ours[name]}\n{buffer}"


def recorded(backend: AttentionBackend, meta: Metadata) -> RecordedGraph:
    """A graph that is planned as it begins, and then uses its metadata."""
    graph = RecordedGraph()
    graph.capture(lambda: (backend.refresh(meta), meta.at() if not meta.step.is_tree else None))
    return graph


def check_cycles(
    engine: Engine, kinds: Sequence[StepKind], bs: int, batches: Sequence[tuple[list[int], list[int]]]
) -> None:
    """All phases are planned, each by its graph, before any is looked at."""
    backend, copying = engine.make(), engine.make()
    buckets = [engine.capacity.bucket(kind, bs) for kind in kinds if kind in backend.choices]
    ours = [engine.capture(backend, bucket) for bucket in buckets]
    graphs = [recorded(backend, meta) for meta in ours]
    theirs = [copying.capture(bucket, engine.paging) for bucket in buckets]
    for lens, rows in batches:
        engine.load(lens, rows)
        for graph in graphs:
            graph.replay()
        for bucket, meta, expected in zip(buckets, ours, theirs, strict=True):
            copying.replay(expected, engine.step(bucket.kind, lens, rows))
            check_same(meta, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "topk"), SIZES)
def test_phases_on_one_state_are_planned_side_by_side_as_copied_steps_are(name: str, topk: int, form: type) -> None:
    engine = Engine(name, form, topk)
    check_cycles(engine, UNIFORM_KINDS, MAX_BS, BATCHES)
    check_cycles(engine, UNIFORM_KINDS, 3, [batch for batch in BATCHES if len(batch[0]) <= 3])


@pytest.mark.parametrize(
    ("name", "topk", "form", "kind"),
    [
        ("fa3", 2, RequestTable, StepKind.TARGET_VERIFY),
        ("trtllm_mla", 1, BlockTable, StepKind.DRAFT_DECODE),
        ("flashinfer_mla", 1, RequestTable, StepKind.DRAFT_EXTEND),
    ],
)
def test_a_launch_plans_from_the_state_too(
    name: str, topk: int, form: type, kind: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted("triton_plan", "_plan_pages")
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    check_cycles(Engine(name, form, topk, planner="fused"), [kind], MAX_BS, BATCHES[1:])


@pytest.mark.parametrize("form", FORMS)
def test_a_ragged_verify_reads_its_widths_beside_the_state(form: type) -> None:
    engine = Engine("fa3", form)
    backend, copying, widths = engine.make(), engine.make(), torch.ones(MAX_BS, dtype=torch.int32)
    bucket = TokenBucket(StepKind.TARGET_VERIFY, MAX_BS, 9)
    meta = backend.capture(bucket, *engine.state.bound(MAX_BS, widths=widths))
    graph, expected = recorded(backend, meta), copying.capture(bucket, engine.paging)
    for lens, rows in BATCHES[:2]:
        widths.copy_(torch.tensor([3, 1, 4, 1]))
        engine.load(lens, rows)
        graph.replay()
        uniform = engine.step(StepKind.TARGET_VERIFY, lens, rows)
        query = BoundedQuery(widths[: len(lens)].clone(), 9, 4)
        copying.replay(expected, Step.target_verify(query, uniform.seq_lens, uniform.paging))
        check_same(meta, expected)


@pytest.mark.parametrize("form", FORMS)
def test_target_and_draft_of_different_lengths_have_a_state_each(form: type) -> None:
    engine = Engine("fa3", form)
    draft = CommittedState.of(engine.paging, MAX_BS)
    backend, copying = engine.make(), engine.make()
    places = {StepKind.TARGET_VERIFY: engine.state, StepKind.DRAFT_DECODE: draft, StepKind.DRAFT_EXTEND: draft}
    buckets = {kind: engine.capacity.bucket(kind, MAX_BS) for kind in places}
    metas = {kind: engine.capture(backend, buckets[kind], state) for kind, state in places.items()}
    assert len({meta.buffers["page_table"].data_ptr() for meta in metas.values()}) == 1, "one table for both"
    lens, rows = [9, 0, 30], [4, 2, 3]
    shorter = [max(length - 3, 0) for length in lens]
    engine.load(lens, rows)
    engine.load(shorter, rows, draft)
    for meta in metas.values():
        backend.refresh(meta)
    for kind, meta in metas.items():
        expected = copying.capture(buckets[kind], engine.paging)
        copying.replay(expected, engine.step(kind, lens if kind is StepKind.TARGET_VERIFY else shorter, rows))
        check_same(meta, expected)


def test_given_slots_are_read_beside_the_state() -> None:
    engine, slots = Engine("fa3", RequestTable), torch.full((MAX_BS,), 9, dtype=torch.int64)
    backend = engine.make()
    meta = backend.capture(engine.capacity.bucket(StepKind.DECODE, MAX_BS), *engine.state.bound(MAX_BS, slots))
    engine.load([5, 6], [1, 2])
    slots[:2] = torch.tensor([20, 30])
    backend.refresh(meta)
    assert meta.at().write_slots.tolist() == [20, 30, 6, 7], "padding writes to the reserved page"


@pytest.mark.parametrize("form", FORMS)
def test_lengths_are_clamped_to_the_capacity_and_told_in_checking_mode(form: type) -> None:
    engine = Engine("fa3", form)
    bucket, most = engine.capacity.bucket(StepKind.TARGET_VERIFY, MAX_BS), engine.capacity.max_kv_len - 4
    metas = []
    for backend in (engine.make(), get_backend("fa3")(engine.capacity, engine.rows.geometry, checking=True)):
        engine.load([], [])
        metas.append((backend, engine.capture(backend, bucket)))
        engine.load([10**6, 5, most], [1, 2, 3])
        if not backend.checking:
            backend.refresh(metas[0][1])
            assert metas[0][1].step.seq_lens.tolist() == [most, 5, most, 0]
    with pytest.raises(InvalidStepError, match="request 0 has 1000000 committed tokens and adds 4"):
        backend.refresh(metas[1][1])


def test_a_bucket_that_is_smaller_than_what_was_loaded_says_so_in_checking_mode() -> None:
    engine = Engine("fa3", RequestTable, checking=True)
    backend = engine.make()
    meta = engine.capture(backend, engine.capacity.bucket(StepKind.DECODE, 2))
    engine.load([5, 6, 7], [1, 2, 3])
    with pytest.raises(InvalidStepError, match="num_real is 3; this bucket has 2 requests"):
        backend.refresh(meta)


def test_a_graph_may_load_it() -> None:
    """As a worker's does that knows on the device what was accepted."""
    engine, graph = Engine("fa3", RequestTable), RecordedGraph()
    lens, rows = torch.tensor([3, 4]), torch.tensor([1, 2])
    graph.capture(lambda: engine.state.load(lens, rows))
    lens += 2
    graph.replay()
    assert engine.state.seq_lens.tolist() == [5, 6, 0, 0]
    assert engine.state.num_real.tolist() == [2]


ROWS, BLOCKS = Engine("fa3", RequestTable), Engine("fa3", BlockTable)
TWO = torch.tensor([1, 2])
REFUSED: dict[str, Callable[[], object]] = {
    r"seq_lens must be \[bs\] of at most 4 requests, got \[5\] torch.int64": lambda: ROWS.state.load(
        torch.arange(5), torch.arange(5)
    ),
    r"seq_lens must be \[bs\] of at most 4 requests, got \[1, 2\]": lambda: ROWS.state.load(TWO.unsqueeze(0), TWO),
    r"seq_lens must be \[bs\] of at most 4 requests, got \[3, 4\]": lambda: ROWS.state.load([3, 4], TWO),  # type: ignore[arg-type]
    r"seq_lens must be \[2\] int32 or int64, got \[2\] torch.float32": lambda: ROWS.state.load(TWO.float(), TWO),
    r"rows must be \[2\] int32 or int64, got None": lambda: ROWS.state.load(TWO),
    r"rows must be \[2\] int32 or int64, got \[1\] torch.int64": lambda: ROWS.state.load(TWO, TWO[:1]),
    r"rows must be \[2\] int32 or int64, got \[2\] torch.bool": lambda: ROWS.state.load(TWO, TWO > 1),
    "seq_lens is on meta and the state on cpu": lambda: ROWS.state.load(TWO.to("meta"), TWO),
    "rows is on meta and the state on cpu": lambda: ROWS.state.load(TWO, TWO.to("meta")),
    r"a block table has no rows, got \[2\] torch.int64: write pages": lambda: BLOCKS.state.load(TWO, TWO),
    "a state of 5 requests reads a block table of 4": lambda: CommittedState.of(BLOCKS.blocks, 5),
    "a state holds at least 1 request, got max_bs=0": lambda: CommittedState.of(ROWS.state.paging, 0),
    "a bucket of 5 requests on a state of 4": lambda: ROWS.state.bound(5),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_refused_in_words_and_nothing_is_written(words: str) -> None:
    for engine in (ROWS, BLOCKS):
        engine.load([7], [3])
    with pytest.raises(InvalidStepError, match=words):
        REFUSED[words]()
    for engine in (ROWS, BLOCKS):
        assert engine.state.seq_lens.tolist() == [7, 0, 0, 0]
        assert engine.state.num_real.tolist() == [1]
    assert ROWS.state.paging.static_input().tolist()[0] == 3


def test_a_state_on_another_device_is_refused_by_the_backend() -> None:
    engine = Engine("fa3", RequestTable)
    elsewhere = CommittedState.of(RequestTable(engine.rows.table.to("meta"), TWO.to("meta"), engine.rows.geometry), 4)
    with pytest.raises(Exception, match=r"tensors on meta \(the backend was built for cpu"):
        engine.make().capture(engine.capacity.bucket(StepKind.DECODE, 4), *elsewhere.bound(4))


def test_metadata_on_a_state_takes_no_step() -> None:
    engine = Engine("fa3", RequestTable)
    backend = engine.make()
    meta = engine.capture(backend, engine.capacity.bucket(StepKind.DECODE, 4))
    with pytest.raises(CaptureError, match="reads the engine's buffers"):
        backend.copy_inputs(meta, engine.step(StepKind.DECODE, [5], [1]))


def bound_of(engine: Engine, state: CommittedState | None = None) -> BoundStep:
    """What a captured decode of four requests on the engine's state is bound to."""
    captured: Any = engine.capture(engine.make(), engine.capacity.bucket(StepKind.DECODE, 4), state).captured
    assert isinstance(captured.bound, BoundStep)
    return captured.bound


def test_a_step_of_its_own_is_held_and_any_other_on_its_table_is_taken() -> None:
    engine, lens = Engine("fa3", RequestTable), torch.tensor([5, 9])
    bound = bound_of(engine)
    own = Step.decode(*engine.state.load(lens, torch.tensor([2, 6])))
    engine.state.take(bound, own)
    assert (own.seq_lens.tolist(), own.paging.static_input().tolist()) == ([5, 9], [2, 6])
    engine.state.take(bound, engine.step(StepKind.DECODE, [7], [3]))
    assert (int(engine.state.num_real), engine.state.seq_lens[:1].tolist()) == (1, [7])


@pytest.mark.parametrize("table", [RequestTable, BlockTable])
def test_a_state_takes_an_idle_step_on_any_table(table: type) -> None:
    engine = Engine("fa3", table)
    bound = bound_of(engine)
    for paging in (engine.rows, engine.blocks):
        engine.load([7], [3])
        engine.state.take(bound, Step.idle(paging.on_static(paging.static_input()[:0])))
        assert int(engine.state.num_real) == 0


def unheld(engine: Engine, lens: Tensor, paging: RequestTable) -> dict[str, Step]:
    """Steps that a state can't hold, by what it says of them. lens, paging: of its last load, of three requests."""
    table, rows, geometry = paging.table, torch.tensor([3]), paging.geometry
    other, given = RequestTable(table.clone(), rows, geometry), RequestTable(table, rows, geometry)
    first, one = paging.on_static(paging.static_input()[:2]), torch.tensor([9])
    view = "seq_lens shares memory with the state's own: make the step of what the last load returned"
    return {
        "it is on another table": Step.decode(one, other),
        r"captured for \(decode.*, the step is \(target_verify": engine.step(StepKind.TARGET_VERIFY, [7], [3]),
        view: Step.decode(lens[:2], first),
        f".*{view}": Step.decode(lens, paging.on_static(torch.tensor([6, 5, 4]))),
        "rows shares memory with the state's own": Step.decode(torch.tensor([3, 4]), first),
        "0 of its 1 requests are real, a state's all are": replace(Step.decode(one, given), num_real=0),
        "it brings slots, the graph writes to those after": Step.decode(one, given, torch.tensor([40])),
    }


def test_what_a_state_can_not_hold_of_a_step_is_refused_and_nothing_is_written() -> None:
    engine = Engine("fa3", RequestTable)
    bound = bound_of(engine)
    lens, paging = engine.state.load(torch.tensor([5, 6, 7]), torch.tensor([4, 5, 6]))
    assert isinstance(paging, RequestTable)
    for words, step in unheld(engine, lens, paging).items():
        with pytest.raises(InvalidStepError, match=words):
            engine.state.take(bound, step)
        assert (engine.state.seq_lens.tolist(), int(engine.state.num_real)) == ([5, 6, 7, 0], 3)


def test_a_step_of_an_earlier_load_is_refused() -> None:
    engine = Engine("fa3", RequestTable)
    bound = bound_of(engine)
    step = Step.decode(*engine.state.load(torch.tensor([5, 6]), torch.tensor([4, 5])))
    engine.load([7], [3])
    with pytest.raises(InvalidStepError, match="seq_lens shares memory with the state's own"):
        engine.state.take(bound, step)


def test_rows_of_a_block_table_of_other_strides_are_another_table() -> None:
    engine = Engine("fa3", BlockTable)
    bound, table = bound_of(engine), engine.state.paging.table
    with pytest.raises(InvalidStepError, match="another table"):
        engine.state.take(bound, Step.decode(torch.tensor([5, 6]), BlockTable(table[::2], engine.rows.geometry)))


def test_lengths_of_the_host_over_the_capacity_are_refused_on_a_wider_table() -> None:
    engine = Engine("fa3", RequestTable)
    wide = RequestTable(engine.rows.table.repeat(1, 2), torch.tensor([3]), engine.rows.geometry)
    state = CommittedState.of(wide, MAX_BS)
    bound = bound_of(engine, state)
    state.take(bound, Step.decode(torch.tensor([51]), wide, seq_lens_cpu=[51]))
    with pytest.raises(InvalidStepError, match="a request has up to 52 committed tokens, the graph takes 51"):
        state.take(bound, Step.decode(torch.tensor([52]), wide, seq_lens_cpu=[52]))
    with pytest.raises(InvalidStepError, match="a request has up to 80 committed tokens, the graph takes 51"):
        state.take(bound, Step.decode(torch.tensor([5]), wide, max_committed=80))


def test_a_load_that_failed_half_way_is_not_held() -> None:
    engine = Engine("fa3", RequestTable)
    bound = bound_of(engine)
    step = Step.decode(*engine.state.load(torch.tensor([5, 6]), torch.tensor([4, 5])))

    def half(state: CommittedState, seq_lens: Tensor, rows: Tensor | None) -> None:
        state.seq_lens[:2].copy_(seq_lens)
        raise RuntimeError("no room for a launch")

    engine.state.__dict__["_load"] = half
    with pytest.raises(RuntimeError, match="no room"):
        engine.load([33, 34], [1, 2])
    with pytest.raises(InvalidStepError, match="shares memory"):
        engine.state.take(bound, step)
