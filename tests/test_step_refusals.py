"""What a step can't be made of, and what can't be captured: the library's own words, and none of torch's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.worlds import Setup, World
from spec_metadata import (
    BlockTable,
    Bucket,
    Capacity,
    InvalidStepError,
    PackedQuery,
    RequestTable,
    Step,
    StepKind,
    TokenBucket,
    UniformQuery,
    pad_step,
)
from spec_metadata.admission import check_values
from tests.test_layout import GEOMETRY, PAGING, SEQ_LENS, SLOTS, paging_of

Anything: Any = Step  # what is given has no right type
Query: Any = UniformQuery
Packed: Any = PackedQuery
Rows: Any = RequestTable
Blocks: Any = BlockTable
AnyBucket: Any = Bucket
Nothing: Any = None
FORMS = [RequestTable, BlockTable]

BAD: dict[str, Callable[[], object]] = {
    r"seq_lens must be \[bs\] int32 or int64, got \[7, 0, 12\]": lambda: Anything.decode([7, 0, 12], PAGING),
    "seq_lens must be .* got None": lambda: Anything.decode(None, PAGING),
    "seq_lens must be .* got 7": lambda: Anything.decode(7, PAGING, SLOTS[:1]),
    r"seq_lens must be .* got \[3\] torch.float32": lambda: Anything.decode(SEQ_LENS.float(), PAGING),
    "paging must be a RequestTable or a BlockTable, got None": lambda: Anything.decode(SEQ_LENS, None),
    r"paging must be .* got \[5, 32\] torch.int32": lambda: Anything.decode(SEQ_LENS, PAGING.table, SLOTS[:3]),
    "paging must be .* got 'table'": lambda: Anything.idle("table"),
    r"out_cache_loc of a decode step must be \[3\] int32 or int64, got \[1, 2, 3\]": lambda: Anything.decode(
        SEQ_LENS, PAGING, [1, 2, 3]
    ),
    r"tree_mask must be \[3, 4, 4\] bool, got \[\[True\]\]": lambda: Anything.target_verify(
        4, SEQ_LENS, PAGING, tree_mask=[[True]]
    ),
    "width must be a whole number, got None": lambda: Anything.target_verify(None, SEQ_LENS, PAGING),
    "width must be a whole number, got 2.0": lambda: Anything.draft_extend(Query(2.0), SEQ_LENS, PAGING),
    "num_steps must be a whole number, got 3.5": lambda: Anything.draft_decode(2, 3.5, SEQ_LENS, PAGING),
    "lengths of a packed query must be integers of the host, got None": lambda: Packed.of(None),
    r"lengths of a packed query .* got \[1, 2.5\]": lambda: Packed.of([1, 2.5]),
    r"lengths of a packed query .* got \[2\] torch.int64": lambda: Packed.of(torch.tensor([1, 2])),
    r"cu_seqlens, which PackedQuery.of makes, must be \[2\] int32, got \[0, 1\]": lambda: Step.prefill(
        Packed([0, 1], (1,)), SEQ_LENS[:1], PAGING.on_static(SLOTS[:1])
    ),
    r"lengths of a packed query must be integers of the host, got \('a',\)": lambda: Step.prefill(
        Packed(torch.tensor([0, 1], dtype=torch.int32), ("a",)), SEQ_LENS[:1], PAGING.on_static(SLOTS[:1])
    ),
    "max_committed must be an integer of the host, got 7.0": lambda: Anything.decode(
        SEQ_LENS, PAGING, max_committed=7.0
    ),
    r"max_committed must be an integer of the host, got \[\] torch.int32": lambda: Anything.decode(
        SEQ_LENS, PAGING, max_committed=SEQ_LENS.max()
    ),
    r"seq_lens_cpu must be integers of the host, got \[7.5, 0, 12\]": lambda: Anything.decode(
        SEQ_LENS, PAGING, seq_lens_cpu=[7.5, 0, 12]
    ),
    "seq_lens_cpu must be integers of the host, got 7": lambda: Anything.decode(SEQ_LENS, PAGING, seq_lens_cpu=7),
    r"seq_lens_cpu must be integers of the host, got \[tensor": lambda: Anything.decode(
        SEQ_LENS, PAGING, seq_lens_cpu=list(SEQ_LENS)
    ),
    "seq_lens_cpu holds -1; a request has at least 0": lambda: Anything.decode(
        SEQ_LENS, PAGING, seq_lens_cpu=[-1, "a", 2]
    ),
    "seq_lens_cpu must be integers of the host, got {0": lambda: Anything.decode(
        SEQ_LENS, PAGING, seq_lens_cpu={0, 7, 12}
    ),
    r"RequestTable.table must be .* got \[\[1, 2\]\]": lambda: Rows([[1, 2]], SLOTS[:1], GEOMETRY),
    "RequestTable.rows must be .* got None": lambda: Rows(PAGING.table, None, GEOMETRY),
    "BlockTable.table must be .* got None": lambda: Blocks(None, GEOMETRY),
    "geometry must be a CacheGeometry, got 4": lambda: Blocks(torch.zeros(2, 2, dtype=torch.int32), 4),
    "geometry must be a CacheGeometry, got None": lambda: Rows(PAGING.table, SLOTS[:1], None),
    "28 committed ones leave no place for 5 more": lambda: Step.prefill(
        PackedQuery.of([1, 5, 1]), SEQ_LENS, PAGING, seq_lens_cpu=[0, 28, 31]
    ),
    "a packed draft_extend step fits no bucket of one width": lambda: Step.draft_extend(
        PackedQuery.of([2, 5, 1]), SEQ_LENS, PAGING
    ).bucket(),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_part_of_a_step_is_named(message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        BAD[message]()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lens", [[7, 32, 12], [7, -1, 12], [7, 10**9, 12]], ids=str)
def test_lengths_outside_of_the_table_index_nothing(form: type, lens: list[int]) -> None:
    """The device alone knows them, so checking mode says so; slots that don't exist are the reserved page's."""
    step = Step.decode(torch.tensor(lens), paging_of(form))
    fits = Step.decode(torch.tensor([7, 31, 12]), paging_of(form))
    assert step.flat_slots()[[0, 2]].tolist() == fits.flat_slots()[[0, 2]].tolist()
    assert int(step.flat_slots()[1]) == GEOMETRY.reserved_page * GEOMETRY.page_size
    with pytest.raises(InvalidStepError, match=f"request 1 has {lens[1]} committed tokens and adds 1; its table row"):
        check_values(step, Capacity(3, 28, 4))


@pytest.mark.parametrize("row", [-1, 5, 10**9])
def test_rows_outside_of_the_table_index_nothing(row: int) -> None:
    step = Step.decode(SEQ_LENS, PAGING.on_static(torch.tensor([3, row, 4])))
    assert int(step.flat_slots()[1]) == GEOMETRY.reserved_page * GEOMETRY.page_size
    with pytest.raises(InvalidStepError, match=rf"rows \[3, {row}, 4\] must lie in the table's \[0, 5\)"):
        check_values(step, Capacity(3, 28, 4))


@pytest.mark.parametrize("nothing", [None, "decode", SEQ_LENS], ids=repr)
def test_what_is_no_step_is_planned_by_nobody(nothing: Any) -> None:
    world = World(Setup(FA3Backend, CacheFormat.KV, 4))
    backend, capacity, bucket = world.backend, world.capacity, world.capacity.bucket(StepKind.DECODE, 3)
    replay = partial(backend.replay, backend.capture(bucket, world.paging()))
    for plan in (backend.init_forward_metadata, replay, lambda step: pad_step(step, bucket, capacity)):
        with pytest.raises(
            InvalidStepError, match=r"a step is what Step's constructors return, .* got (None|'d|\[3\])"
        ):
            plan(nothing)


CAPACITY = Capacity(6, 20, 4, topk=2, num_steps=3, num_draft_tokens=4)


def pads_what_does_not_fit() -> None:
    """A verify in the bucket of a decode."""
    pad_step(Step.target_verify(4, SEQ_LENS, PAGING), CAPACITY.bucket(StepKind.DECODE, 3), CAPACITY)


def test_a_step_is_padded_in_no_bucket_of_another() -> None:
    with pytest.raises(InvalidStepError, match=r"a target_verify step does not fit: captured for \(decode bs=3"):
        pads_what_does_not_fit()


def test_an_optimized_interpreter_refuses_too() -> None:
    code = "from tests.test_step_refusals import pads_what_does_not_fit as pad; pad()"
    found = subprocess.run(
        [sys.executable, "-O", "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "InvalidStepError: a target_verify step does not fit" in found.stderr


BUCKETS: dict[str, Bucket | TokenBucket] = {
    "an idle step has no bucket of its own": Bucket(StepKind.IDLE, 1, 1),
    r"at least 1 request and 1 query row, got \(decode bs=0 width=1\)": Bucket(StepKind.DECODE, 0, 1),
    r"at least 1 request and 1 query row, got \(target_verify bs=2 width=0\)": Bucket(StepKind.TARGET_VERIFY, 2, 0),
    r"at least 1 request and 1 query row, got \(prefill bs=2 num_tokens=0\)": TokenBucket(StepKind.PREFILL, 2, 0),
    r"a decode step has 1 query row per request, got \(decode bs=2 width=2\)": Bucket(StepKind.DECODE, 2, 2),
    "adds 5000 tokens to a request; the capacity holds": Bucket(StepKind.TARGET_VERIFY, 2, 5000),
    "adds 400 tokens to a request; the capacity holds": Bucket(StepKind.DRAFT_DECODE, 2, 2, 200, tree=True),
    "a prefill step has packed rows": Bucket(StepKind.PREFILL, 2, 4),
    "a decode step has no packed rows": TokenBucket(StepKind.DECODE, 2, 4),
    "no draft_decode step of width 2 has num_steps=3 and tree=False": Bucket(StepKind.DRAFT_DECODE, 2, 2, 3),
    "no draft_extend step of width 2 has num_steps=1 and tree=True": Bucket(StepKind.DRAFT_EXTEND, 2, 2, tree=True),
    "no target_verify step of width 2 has num_steps=3": Bucket(StepKind.TARGET_VERIFY, 2, 2, 3),
    r"sizes of a bucket are whole numbers, got \(decode bs=2.5 width=1\)": AnyBucket(StepKind.DECODE, 2.5, 1),
    r"sizes of a bucket are whole numbers, got \(decode bs=2 width=None\)": AnyBucket(StepKind.DECODE, 2, None),
    "a bucket is what Capacity.bucket, prefill_bucket or ragged_bucket returns, got Bucket": AnyBucket("decode", 2, 1),
    "a bucket is what Capacity.bucket, prefill_bucket or ragged_bucket returns, got None": Nothing,
}


@pytest.mark.parametrize("message", BUCKETS)
def test_no_step_fills_such_a_bucket(message: str) -> None:
    world = World(Setup(FA3Backend, CacheFormat.KV, 4))
    with pytest.raises(InvalidStepError, match=message):
        world.backend.capture(BUCKETS[message], world.paging())
    assert world.backend.memory.num_bytes == 0


@pytest.mark.parametrize(
    "bucket", [None, Bucket(StepKind.DECODE, -2, 1), TokenBucket(StepKind.PREFILL, 3, 0), AnyBucket("decode", 3, 1)]
)
def test_a_step_is_padded_in_no_such_bucket(bucket: Any) -> None:
    with pytest.raises(InvalidStepError, match="a bucket"):
        pad_step(Step.decode(SEQ_LENS, PAGING), bucket, CAPACITY)


@pytest.mark.parametrize("size", [2.5, None, 0])
def test_a_capacity_has_no_bucket_of_no_whole_number(size: Any) -> None:
    with pytest.raises(InvalidStepError, match=f"at least 1 request, got bs={size}"):
        CAPACITY.bucket(StepKind.DECODE, size)
    with pytest.raises(InvalidStepError, match=f"at least 1 token, got num_tokens={size}"):
        CAPACITY.prefill_bucket(size)
