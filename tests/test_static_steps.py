"""Static steps: how a step is padded, what is copied into one, and what does not fit one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spec_metadata import (
    BlockTable,
    Buffers,
    Capacity,
    Extent,
    Paging,
    RequestTable,
    Step,
    allocate,
    copy_step,
    dense_part,
    input_specs,
    misfit,
    pad_step,
    real_rows,
    static_step,
)
from tests.test_layout import (
    GEOMETRY,
    LENS,
    MAKERS,
    NEW_TOKENS,
    PACKED,
    PAGES,
    PAGING,
    ROWS,
    SEQ_LENS,
    paging_of,
)

CAPACITY = Capacity(6, 20, 4, topk=2, num_steps=3, num_draft_tokens=4)
PADDABLE = [name for name in MAKERS if name in NEW_TOKENS]


@pytest.mark.parametrize("form", [RequestTable, BlockTable])
@pytest.mark.parametrize("name", PADDABLE)
@pytest.mark.parametrize("bs", [3, 5])
def test_padding_has_one_policy(name: str, form: type, bs: int) -> None:
    step = MAKERS[name](SEQ_LENS, paging_of(form))
    padded = pad_step(step, step.bucket(bs), CAPACITY)
    extra = bs - 3
    assert (padded.kind, padded.query, padded.num_steps, padded.bs) == (step.kind, step.query, step.num_steps, bs)
    assert padded.seq_lens.tolist() == LENS + [0] * extra
    assert int(padded.num_real) == 3
    assert real_rows(padded).tolist() == [True] * 3 + [False] * extra
    slots = padded.flat_slots()
    assert slots[: step.num_writes].tolist() == step.flat_slots().tolist()
    assert {int(s) // 4 for s in slots[step.num_writes :]} <= {5}
    num_pages = CAPACITY.max_pages
    assert padded.paging.pages(num_pages).tolist() == (
        [PAGES[row][:num_pages] for row in ROWS] + [[5 if form is BlockTable else PAGES[1][0]] * num_pages] * extra
        if form is BlockTable
        else [PAGES[row][:num_pages] for row in [*ROWS, *[1] * extra]]
    )
    for i in range(step.num_forwards):
        dense, real = dense_part(padded, i), dense_part(step, i)
        assert dense.kv_lens.tolist() == real.kv_lens.tolist() + [step.width] * extra  # never advanced
        assert dense.causal == real.causal


def test_padding_a_tree_mask() -> None:
    mask = torch.rand(3, 4, 4) < 0.5
    step = Step.target_verify(4, SEQ_LENS, PAGING, tree_mask=mask)
    padded = pad_step(step, step.bucket(5), CAPACITY)
    assert padded.tree_mask is not None
    assert torch.equal(padded.tree_mask[:3], mask)
    assert torch.equal(padded.tree_mask[3:], torch.eye(4, dtype=torch.bool).expand(2, -1, -1))


@pytest.mark.parametrize("form", [RequestTable, BlockTable])
def test_a_larger_batch_leaves_nothing_behind(form: type) -> None:
    """After a large batch and a small one a static step is the small one, padded; after an idle one, all padding."""
    paging, mask = paging_of(form), torch.rand(3, 4, 4) < 0.5
    large = Step.target_verify(4, SEQ_LENS, paging, tree_mask=mask)
    small = Step.target_verify(4, SEQ_LENS[:1], paging.on_static(paging.static_input()[:1]), tree_mask=mask[:1])
    static = pad_step(large, large.bucket(3), CAPACITY)
    empty = static_tensors(static_step(large.bucket(), paging, static_buffers(large, paging)))
    copy_step(static, small)
    assert all(
        torch.equal(*pair)
        for pair in zip(static_tensors(static), static_tensors(pad_step(small, small.bucket(3), CAPACITY)), strict=True)
    )
    copy_step(static, Step.idle(paging.on_static(paging.static_input()[:0])))
    assert all(torch.equal(*pair) for pair in zip(static_tensors(static), empty, strict=True))


def static_buffers(step: Step, paging: Paging) -> Buffers:
    """Fresh static inputs of a step's bucket."""
    specs = input_specs(step.bucket(), paging)
    return allocate(specs, Extent.of_bucket(step.bucket(), CAPACITY), torch.device("cpu"))


def static_tensors(step: Step) -> list[Tensor]:
    """Everything that a graph reads of a step."""
    assert step.tree_mask is not None
    assert isinstance(step.num_real, Tensor)
    return [step.num_real, step.seq_lens, step.flat_slots(), step.paging.static_input(), step.tree_mask]


def test_padding_leaves_the_step_alone() -> None:
    step = Step.target_verify(4, SEQ_LENS.clone(), PAGING)
    before = [step.seq_lens.clone(), step.flat_slots().clone(), PAGING.static_input().clone()]
    padded = pad_step(step, step.bucket(5), CAPACITY)
    padded.seq_lens.zero_()
    padded.flat_slots().zero_()
    padded.paging.static_input().zero_()
    after = [step.seq_lens, step.flat_slots(), PAGING.static_input()]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_misfit_gives_every_reason() -> None:
    step = Step.target_verify(4, SEQ_LENS, PAGING)
    static = pad_step(step, step.bucket(3), CAPACITY)
    assert misfit(static, Step.target_verify(4, SEQ_LENS, PAGING)) == []
    assert misfit(static, Step.idle(PAGING.on_static(torch.empty(0, dtype=torch.int64)))) == []
    four = BlockTable(torch.zeros(4, 8, dtype=torch.int32), GEOMETRY)
    reasons = misfit(static, Step.target_verify(3, torch.zeros(4, dtype=torch.int32), four))
    assert len(reasons) == 3
    assert "width=3" in reasons[0]
    assert "has 4" in reasons[1]
    assert "BlockTable" in reasons[2]
    packed = Step.draft_extend(PACKED, SEQ_LENS, PAGING)
    assert "lengths (2, 5, 1)" in misfit(static, packed)[0]


def test_misfit_sees_another_view_of_the_same_memory() -> None:
    """A graph reads the table with the strides of its capture."""
    memory = torch.zeros(10, 32, dtype=torch.int32)
    one, two = (
        RequestTable(memory[:5], torch.tensor([0]), GEOMETRY),
        RequestTable(memory[::2], torch.tensor([0]), GEOMETRY),
    )
    lens, slots = torch.tensor([3]), torch.tensor([40])
    step = Step.decode(lens, one, slots)
    static = pad_step(step, step.bucket(2), CAPACITY)
    assert misfit(static, Step.decode(lens, replace(one, rows=torch.tensor([4])), slots)) == []
    assert misfit(static, Step.decode(lens, two, slots)) != []
