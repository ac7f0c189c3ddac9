"""Draft blocks: how wide they are, what their rows see in a sliding window, and who refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends import AttentionLayer, PagedKV, UnsupportedStepError
from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from spec_metadata import BlockTable, CacheGeometry, Capacity, InvalidStepError, PackedQuery, Step, StepKind
from spec_metadata.visibility import drafted, windowed
from tests.torch_kernels import torch_kernel

GEOMETRY = CacheGeometry(num_pages=9, page_size=128)
CAPACITY = Capacity(max_bs=3, max_context=200, page_size=128, num_steps=3, num_draft_tokens=4)


def step_of(width: int) -> Step:
    """A block of three requests."""
    lens = torch.tensor([7, 0, 12], dtype=torch.int32)
    return Step.draft_block(width, lens, BlockTable(torch.arange(1, 7).view(3, 2), GEOMETRY), max_committed=12)


@pytest.mark.parametrize(("window", "besides"), [(None, None), (5, [-3, -2, -1, 0] * 3)])
def test_a_window_begins_by_the_row_and_ends_with_the_block(window: int | None, besides: list[int] | None) -> None:
    """Row j behind L tokens sees from L + j - 4 on: the last 5 of the dense part's L + 4 keys, and -besides more."""
    left, found = windowed(window, drafted(step_of(4), 0))
    assert left == window
    assert (None if found is None else found.tolist()) == besides


def test_a_block_is_as_wide_as_the_capacity_says() -> None:
    """DFlash's has a row for the root, DSpark's none; room is for either."""
    assert CAPACITY.bucket(StepKind.DRAFT_BLOCK, 2).width == 4
    wide = replace(CAPACITY, block_size=7)
    assert wide.bucket(StepKind.DRAFT_BLOCK, 2).width == wide.draft_room == 7
    assert replace(CAPACITY, block_size=3).draft_room == CAPACITY.draft_room == 4


def causal_fa3() -> type[AttentionBackend]:
    """With one kernel, which declares draft blocks and has no mode without a causal mask."""
    kernel = torch_kernel(FA3Backend)
    able = {kind: replace(known, non_causal=False) for kind, known in kernel.capabilities.items()}
    return type("CausalFA3", (FA3Backend,), {"kernels": (replace(kernel, capabilities=able),)})


def blockless_fa3() -> type[AttentionBackend]:
    """With one kernel, which declares no draft blocks."""
    kernel = torch_kernel(FA3Backend)
    able = {kind: known for kind, known in kernel.capabilities.items() if kind is not StepKind.DRAFT_BLOCK}
    return type("BlocklessFA3", (FA3Backend,), {"kernels": (replace(kernel, capabilities=able),)})


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (causal_fa3(), "see those after them (it needs a non-causal kernel: take one, or draft token by token)"),
        (blockless_fa3(), "draft token by token, in draft_decode steps, or take a backend that has one"),
    ],
    ids=["kernel", "backend"],
)
def test_who_has_no_mode_without_a_mask_refuses_a_block_and_says_what_works(
    backend: type[AttentionBackend], reason: str
) -> None:
    made = backend(CAPACITY, GEOMETRY)
    for call in (
        lambda: made.init_forward_metadata(step_of(4)),
        lambda: made.capture(CAPACITY.bucket(StepKind.DRAFT_BLOCK, 2), step_of(4).paging),
    ):
        with pytest.raises(UnsupportedStepError) as error:
            call()
        assert reason in str(error.value)


LENS = torch.tensor([7, 0, 12], dtype=torch.int32)
PAGES = BlockTable(torch.arange(1, 7).view(3, 2), GEOMETRY)
UNKEPT = {
    "draft_decode step with branches or nodes": (Step.draft_decode(2, 3, LENS, PAGES, max_committed=12), LENS),
    "target_verify step with branches or nodes": (
        Step.target_verify(2, LENS, PAGES, tree_mask=torch.ones(3, 2, 2).bool(), max_committed=12),
        LENS,
    ),
    "draft_extend step with packed rows": (
        Step.draft_extend(PackedQuery.of([1, 2, 1]), LENS, PAGES, max_committed=12),
        LENS,
    ),
    r"num_kept must be \[3\] int32 or int64, got \[2\]": (step_of(4), LENS[:2]),
    r"num_kept must be \[3\] int32 or int64, got \[3\] torch.float32": (step_of(4), LENS.float()),
    r"num_kept is \[1, 5, 0\], together 6; a request has 4 rows, and 8 are kept": (step_of(4), torch.tensor([1, 5, 0])),
    r"num_kept is \[4, 4, 1\], together 9; a request has 4 rows, and 8": (step_of(4), torch.tensor([4, 4, 1])),
}


@pytest.mark.parametrize("reason", UNKEPT)
def test_rows_that_can_not_be_kept_are_refused(reason: str) -> None:
    """The last two by their values, in checking mode alone."""
    step, counts = UNKEPT[reason]
    wide = replace(CAPACITY, topk=2)
    meta = FA3Backend(wide, GEOMETRY, checking="together" in reason).init_forward_metadata(step)
    with pytest.raises(InvalidStepError, match=reason):
        meta.keeping(counts, 8)


def test_kept_rows_do_not_attend() -> None:
    backend = FA3Backend(CAPACITY, GEOMETRY)
    layer, cache = AttentionLayer(0, 2, 1, 8, 8, 0.3), PagedKV(*(torch.zeros(9, 128, 1, 8) for _ in "kv"))
    at = backend.init_forward_metadata(step_of(4)).keeping(torch.tensor([4, 4, 4]))
    with pytest.raises(UnsupportedStepError, match=r"kept rows, which are stored alone.*pass meta.at"):
        backend.forward(torch.zeros(12, 2, 8), cache, at, layer)


def test_an_idle_step_keeps_nothing() -> None:
    idle = FA3Backend(CAPACITY, GEOMETRY).init_forward_metadata(Step.idle(PAGES.on_static(PAGES.table[:0])))
    assert idle.keeping(torch.zeros(0, dtype=torch.int32)).write_slots.shape == (0,)
