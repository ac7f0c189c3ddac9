"""Mixed batches: steps of several kinds as one of packed rows, and what can't be mixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends import get_backend
from spec_metadata import (
    BlockTable,
    BoundedQuery,
    InvalidStepError,
    PackedQuery,
    RequestTable,
    Step,
    StepKind,
    UniformQuery,
    allocate,
    copy_step,
    input_specs,
    mixed_step,
    packed_rows,
    pad_step,
    static_step,
    token_positions,
    write_slots,
)
from spec_metadata.capacity import Extent
from spec_metadata.static_inputs import closed
from tests.ragged_steps import CAPACITY, GEOMETRY
from tests.triton_interpreter import interpreted

TABLE = torch.cat((torch.full((1, 24), 12), 16 + torch.arange(9 * 24).view(9, 24)))
PAGES = TABLE[:, ::4] // 4
BUCKET = CAPACITY.prefill_bucket(16)


def part_of(kind: StepKind, rows: list[int], lens: list[int], query: object, table: type = RequestTable) -> Step:
    index = torch.tensor(rows)
    paging = RequestTable(TABLE, index, GEOMETRY) if table is RequestTable else BlockTable(PAGES[index], GEOMETRY)
    return Step(kind, query, torch.tensor(lens, dtype=torch.int32), paging, None, len(rows))


def parts(table: type = RequestTable, last: StepKind = StepKind.TARGET_VERIFY) -> list[Step]:
    """A chunk of 5 rows, two decodes, a verify of 3 rows, and two ragged ones that ask for more than their bound."""
    ragged = BoundedQuery(torch.tensor([4, 4]), 5, 4)
    return [
        part_of(StepKind.PREFILL, [4], [2], PackedQuery.of([5]), table),
        part_of(StepKind.DECODE, [2, 7], [9, 3], UniformQuery(1), table),
        part_of(StepKind.TARGET_VERIFY, [1], [11], UniformQuery(3), table),
        part_of(last, [8, 5], [4, 20], ragged, table),
    ]


@pytest.mark.parametrize("table", [RequestTable, BlockTable])
@pytest.mark.parametrize(
    ("has_slots", "last"),
    [(False, StepKind.TARGET_VERIFY), (True, StepKind.TARGET_VERIFY), (True, StepKind.DRAFT_EXTEND)],
)
def test_rows_of_a_mixed_step_are_those_of_its_parts(table: type, has_slots: bool, last: StepKind) -> None:
    given = parts(table, last)
    if has_slots:
        given = [replace_slots(part) for part in given]
    step = closed(mixed_step(given), CAPACITY)
    assert step.kind is StepKind.PREFILL
    positions = [*range(2, 7), 9, 3, 11, 12, 13, 4, 5, 6, 20, 21]
    assert token_positions(step)[:15].tolist() == positions
    rows = [4] * 5 + [2, 7] + [1] * 3 + [8] * 3 + [5] * 2
    assert write_slots(step)[:15].tolist() == TABLE[rows, positions].tolist()
    whole = closed(mixed_step(given[:3]), CAPACITY)
    assert isinstance(whole.query, PackedQuery)
    assert token_positions(whole).tolist() == positions[:10]
    assert packed_rows(whole.query)[0].tolist() == [0] * 5 + [1, 2] + [3] * 3


def replace_slots(part: Step) -> Step:
    is_ragged = isinstance(part.query, BoundedQuery)
    of_longest = TABLE[[8] * 4 + [5] * 4, [*range(4, 8), *range(20, 24)]]
    return replace(part, out_cache_loc=of_longest if is_ragged else part.flat_slots())


def test_a_graph_of_prefills_takes_it_and_the_fused_copy_is_the_same() -> None:
    module, step = interpreted("triton_inputs", "_copy_inputs"), mixed_step(parts())
    extent, specs = Extent.of_bucket(BUCKET, CAPACITY, GEOMETRY.num_pages), input_specs(BUCKET, step.paging)
    both = [allocate(specs, extent, torch.device("cpu")) for _ in range(2)]
    expected, fused = (static_step(BUCKET, step.paging, buffers) for buffers in both)
    copy_step(expected, step)
    module.bind_inputs(fused)(step)(step)
    for name, theirs in both[0].items():
        assert torch.equal(both[1][name], theirs), name
    assert torch.equal(pad_step(step, BUCKET, CAPACITY).query.cu_seqlens, expected.query.cu_seqlens)


def test_bounds_of_the_host_are_those_of_all_parts() -> None:
    known = [replace(part, seq_lens_cpu=tuple(part.seq_lens.tolist()), max_committed=20) for part in parts()[:3]]
    step = mixed_step(known)
    assert (step.seq_lens_cpu, step.max_committed) == ((2, 9, 3, 11), 20)
    step = mixed_step([replace(known[0], seq_lens_cpu=None, max_committed=None), *known[1:]])
    assert (step.seq_lens_cpu, step.max_committed) == (None, None)


def longest(first: int, rows: int, second: int) -> Step:
    """A chunk of so many rows after `first` tokens, and ragged verifies after `second` and 4 tokens, with slots."""
    both = [
        part_of(StepKind.PREFILL, [4], [first], PackedQuery.of([rows])),
        part_of(StepKind.TARGET_VERIFY, [8, 5], [second, 4], BoundedQuery(torch.tensor([4, 4]), 5, 4)),
    ]
    given = [torch.zeros(part.num_writes, dtype=torch.int64) for part in both]
    known = [tuple(part.seq_lens.tolist()) for part in both]
    return mixed_step(
        [
            replace(part, out_cache_loc=slots, seq_lens_cpu=lens)
            for part, slots, lens in zip(both, given, known, strict=True)
        ]
    )


def test_a_part_that_is_too_long_is_refused_beside_a_ragged_verify() -> None:
    backend = get_backend("fa3")(CAPACITY, GEOMETRY, "cpu", kernel="torch")
    fitting = longest(8, 16, 20)
    backend.init_forward_metadata(fitting)
    meta = backend.capture(CAPACITY.prefill_bucket(24), fitting.paging)
    backend.replay(meta, fitting)
    for step in (longest(9, 16, 20), longest(8, 16, 21)):
        with pytest.raises(InvalidStepError, match="together 25; the capacity holds 24"):
            backend.init_forward_metadata(step)
        with pytest.raises(InvalidStepError, match="together 25; the capacity holds 24"):
            backend.replay(meta, step)


def test_what_cannot_be_mixed() -> None:
    chunk, decode, verify, ragged = parts()
    mask = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    other = replace(decode, paging=RequestTable(TABLE.clone(), decode.paging.rows, GEOMETRY))
    refused = {
        "there are none": [],
        "a target_verify of a tree, whose rows see their ancestors alone": [chunk, replace(verify, tree_mask=mask)],
        "a draft_block step": [chunk, part_of(StepKind.DRAFT_BLOCK, [3], [2], UniformQuery(4))],
        "a draft_decode step": [chunk, replace(decode, kind=StepKind.DRAFT_DECODE, num_steps=2)],
        "a ragged step stands before another part": [ragged, chunk],
        "a decode step with padded requests": [chunk, replace(decode, num_real=1)],
        "a target_verify step with padded requests": [
            verify,
            replace(verify, num_real=torch.ones(1, dtype=torch.int32)),
        ],
        "some parts have out_cache_loc": [chunk, replace_slots(verify)],
        "different request-to-token tables": [chunk, other],
        "tables of different forms": [chunk, parts(BlockTable)[1]],
    }
    for reason, given in refused.items():
        with pytest.raises(InvalidStepError, match=f"can't be mixed: .*{reason}"):
            mixed_step(given)
    with pytest.raises(InvalidStepError, match="a step is what"):
        mixed_step([chunk, 3])


@pytest.mark.parametrize("most", [(4,), (4, 5)])
def test_bounds_of_another_number_or_over_the_width_are_refused(most: tuple[int, ...]) -> None:
    query = BoundedQuery(torch.tensor([4, 4]), 8, 4, most)
    with pytest.raises(InvalidStepError, match=r"most bounds the rows of each of 2 requests by up to 4, got \(4,"):
        part_of(StepKind.TARGET_VERIFY, [8, 5], [4, 20], query)
