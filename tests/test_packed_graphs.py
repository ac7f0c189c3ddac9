"""Packed rows in a graph: how a step is padded, what fits, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.vendors.flashinfer import mla_kernel
from spec_metadata import (
    BlockTable,
    CacheGeometry,
    Capacity,
    Extent,
    InvalidStepError,
    PackedQuery,
    PaddedQuery,
    RequestTable,
    Step,
    StepKind,
    TokenBucket,
    UniformQuery,
    dense_part,
    idle_step,
    misfit,
    pad_step,
    padding_step,
    token_positions,
)
from spec_metadata.admission import check_values
from tests.torch_kernels import torch_kernel

CAPACITY = Capacity(max_bs=4, max_context=12, page_size=4)  # 16 tokens in a table row
GEOMETRY = CacheGeometry(num_pages=20, page_size=4, reserved_page=3, reserved_row=0)
TABLE = torch.cat((torch.full((1, 16), 3 * 4), 16 + torch.arange(4 * 16).view(4, 16)))
ROWS = RequestTable(TABLE, torch.tensor([2, 4]), GEOMETRY)
PAGES = BlockTable(torch.tensor([[8, 9, 10], [16, 17, 18]]), GEOMETRY)
BUCKET = TokenBucket(StepKind.PREFILL, 4, 10)


def prefill(paging=ROWS, lens=(3, 2), committed=(0, 5)) -> Step:
    return Step.prefill(PackedQuery.of(lens), torch.tensor(committed, dtype=torch.int32), paging, max_committed=8)


def starts(step: Step) -> list[int]:
    return step.query.cu_seqlens.tolist()


@pytest.mark.parametrize("paging", [ROWS, PAGES], ids=["table", "blocks"])
def test_rows_that_are_left_over_belong_to_the_last_request(paging) -> None:
    step = prefill(paging)
    padded = pad_step(step, BUCKET, CAPACITY)
    assert isinstance(padded.query, PaddedQuery)
    assert (padded.bs, padded.max_real, padded.num_tokens, padded.width) == (5, 4, 10, 10)
    assert starts(padded) == [0, 3, 5, 5, 5, 10]
    assert padded.seq_lens.tolist() == [0, 5, 0, 0, 0]
    assert dense_part(padded, 0).kv_lens.tolist() == [3, 7, 0, 0, 5]
    assert int(padded.num_real) == 2
    slots = padded.flat_slots()
    assert slots[:5].tolist() == step.flat_slots().tolist()
    assert set((slots[5:] // 4).tolist()) == {3}
    assert token_positions(padded).tolist() == [0, 1, 2, 5, 6, 0, 1, 2, 3, 4]
    pages = padded.paging.pages(3)
    assert torch.equal(pages[:2], step.paging.pages(3))
    assert (pages[2:] == 3).all()
    check_values(padded, CAPACITY)


@pytest.mark.parametrize(
    ("num_tokens", "lens", "expected"),
    [
        (5, (3, 2), [0, 3, 5, 5, 5, 5]),
        (16, (3, 2), [0, 3, 5, 5, 5, 16]),
        (17, (3, 2), [0, 3, 5, 5, 5, 17, 17]),  # 12 rows fit in one request
        (40, (3, 2), [0, 3, 5, 5, 5, 21, 37, 40]),  # of 35 rows none may have more than 16
        (40, (), [0, 0, 0, 0, 0, 16, 32, 40]),
    ],
)
def test_no_padded_request_is_longer_than_a_table_row(num_tokens: int, lens: tuple, expected: list[int]) -> None:
    bucket = replace(BUCKET, num_tokens=num_tokens)
    padded = pad_step(prefill(lens=lens), bucket, CAPACITY) if lens else padding_step(bucket, ROWS, CAPACITY)
    assert starts(padded) == expected
    assert max(padded.query.cu_seqlens.diff().tolist()) <= padded.width <= CAPACITY.max_kv_len
    extent = Extent.of_bucket(bucket, CAPACITY)
    assert (extent.bs, extent.width, extent.num_tokens) == (padded.bs, padded.width, num_tokens)
    assert padded.extent(CAPACITY).max_pages == extent.max_pages


def test_a_padded_step_is_checked_without_the_hosts_lengths() -> None:
    padded = pad_step(prefill(), BUCKET, CAPACITY)
    assert padded.seq_lens_cpu is None
    padded.query.cu_seqlens[1] = 6
    with pytest.raises(InvalidStepError, match=r"cu_seqlens \[0, 6, 5, 5, 5, 10\] don't rise from 0 to 10"):
        check_values(padded, CAPACITY)
    with pytest.raises(InvalidStepError, match=r"which PackedQuery.of makes, must be \[6\] int32, got \[5\]"):
        replace(padded, query=replace(padded.query, cu_seqlens=padded.query.cu_seqlens[:5]))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (prefill(lens=(9, 2), committed=(0, 0)), r"\(prefill bs=4 num_tokens=10\).*\(prefill bs=2 num_tokens=11\)"),
        (
            Step.draft_extend(PackedQuery.of([1, 1]), torch.tensor([1, 1]), ROWS),
            r"captured for \(prefill .* the step is \(draft_extend bs=2 num_tokens=2\)",
        ),
        (
            Step.prefill(
                PackedQuery.of([1] * 5), torch.zeros(5).int(), RequestTable(TABLE, torch.zeros(5).int(), GEOMETRY)
            ),
            "captured for 4 requests, the step has 5",
        ),
        (Step.decode(torch.tensor([3, 4]), ROWS), "a uniform width of 1 fits no graph of packed rows"),
        (
            pad_step(prefill(), BUCKET, CAPACITY),
            "rows padded to 10 fit no graph, which pads them itself; give a PackedQuery",
        ),
        (
            Step.prefill(PaddedQuery(torch.tensor([0, 2, 4]).int(), 4, 10), torch.zeros(2).int(), ROWS),  # type: ignore[arg-type]
            "rows padded to 4 fit no graph",
        ),
        (prefill(PAGES), "captured on a RequestTable, the step has a BlockTable"),
    ],
)
def test_what_fits_no_graph_of_packed_rows(step: Step, message: str) -> None:
    backend = torch_backend(FA3Backend)
    meta = backend.capture(BUCKET, ROWS)
    before = {name: tensor.clone() for name, tensor in meta.buffers.items()}
    with pytest.raises(UnsupportedStepError, match=message):
        backend.replay(meta, step)
    assert all(torch.equal(tensor, before[name]) for name, tensor in meta.buffers.items())


def test_a_uniform_graph_takes_no_padded_rows() -> None:
    uniform = padding_step(CAPACITY.bucket(StepKind.DRAFT_EXTEND, 4), ROWS, CAPACITY)
    assert misfit(uniform, pad_step(prefill(), BUCKET, CAPACITY)) == [
        "a packed query fits no graph of one uniform width"
    ]


def test_an_idle_step_is_known_to_the_host_whole() -> None:
    step = idle_step(BUCKET, ROWS, CAPACITY)
    assert isinstance(step.query, PackedQuery)
    assert (step.query.lens_cpu, step.seq_lens_cpu, step.max_committed) == ((10,), (), 0)
    assert isinstance(idle_step(CAPACITY.bucket(StepKind.DECODE, 2), ROWS, CAPACITY).query, UniformQuery)


def torch_backend(backend, **changes):
    """A backend with the torch kernel alone, whose capabilities are changed."""
    kernel = torch_kernel(backend)
    able = {kind: replace(declared, **changes) for kind, declared in kernel.capabilities.items()}
    narrow = type(backend.__name__, (backend,), {"kernels": (replace(kernel, capabilities=able),)})
    return narrow(CAPACITY, GEOMETRY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed_graph": False}, r"kernel torch can't be captured over packed rows\.$"),
        ({"needs_host_lens": True}, "kernel torch can't be captured over packed rows: it plans on the host from their"),
        ({"packed": False}, r"packed query rows \(it takes one uniform width\)"),
    ],
    ids=str,
)
def test_a_kernel_that_can_not_be_captured_says_why(changes: dict, message: str) -> None:
    with pytest.raises(UnsupportedStepError, match=message):
        torch_backend(FA3Backend, **changes).capture(BUCKET, ROWS)


def test_which_kernels_can() -> None:
    can = {
        kind
        for kind in StepKind
        if kind in (c := torch_kernel(TrtllmMLABackend).capabilities) and c[kind].captures_packed
    }
    assert can == {StepKind.PREFILL}
    ours, theirs = (mla_kernel("fa3", frozenset({9}), version).capabilities for version in ("0.7.2", "9.0.0"))
    packed = {StepKind.PREFILL, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND}
    assert {kind for kind in ours if ours[kind].captures_packed} == packed
    assert not any(declared.captures_packed for declared in theirs.values())


def test_too_many_requests_are_refused_when_captured() -> None:
    with pytest.raises(Exception, match="larger than max_bs=4"):
        torch_backend(FA3Backend).capture(replace(BUCKET, bs=5), ROWS)
