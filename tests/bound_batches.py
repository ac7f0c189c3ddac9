"""An engine's own buffers of random batches, filled by its conventions, and captured steps that are read from them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from spec_metadata import (
    BlockTable,
    BoundInputs,
    BoundStep,
    Buffers,
    Extent,
    Paging,
    RequestTable,
    Step,
    allocate,
    input_specs,
    static_step,
)
from tests.plan_batches import Case

CPU = torch.device("cpu")


class Engine(NamedTuple):
    """An engine's buffers of a bucket, filled from a case. bad: values that nothing can be read at, for padding."""

    inputs: BoundInputs
    paging: Paging

    def bind(self, static: Step, case: Case) -> BoundStep:
        """A captured step that is read from them."""
        return BoundStep(static, self.inputs, self.paging, case.capacity)


def longer(tensor: Tensor, num_more: int, fill: int) -> Tensor:
    """A strided tensor with more leading entries."""
    more = tensor.new_full((num_more, *tensor.shape[1:]), fill)
    return torch.stack((torch.cat((tensor, more)),) * 2, dim=-1)[..., 0]


def engine(case: Case, num_more: int, *, counted: bool, with_slots: bool) -> Engine:
    """counted: padding holds anything and the engine counts the real requests, else it fills in its convention."""
    step, bad = case.step, 2**30
    lens, include = step.seq_lens, False
    if isinstance(step.paging, RequestTable):
        fill, rows = (1, longer(step.paging.rows, num_more, bad if counted else step.paging.geometry.reserved_row))
        paging: Paging = replace(step.paging, rows=rows)
    else:
        include = not counted
        fill, paging = 0, replace(step.paging, table=longer(step.paging.table, num_more, -bad))
        lens = lens + (step.width if include else 0)
    slots = longer(step.out_cache_loc, num_more * step.width * step.num_steps, -1) if with_slots else None
    mask = None if step.tree_mask is None else longer(step.tree_mask, num_more, 1).transpose(1, 2).transpose(1, 2)
    num_real = torch.tensor([step.bs]) if counted else None
    return Engine(BoundInputs(longer(lens, num_more, bad if counted else fill), slots, num_real, mask, include), paging)


def statics(case: Case, num_more: int) -> tuple[Step, Step, Buffers]:
    """Two captured steps, and the buffers of the second."""
    bucket = case.bucket(num_more)
    extent, specs = Extent.of_bucket(bucket, case.capacity, case.geometry.num_pages), input_specs(bucket, case.paging)
    one, two = allocate(specs, extent, CPU), allocate(specs, extent, CPU)
    return static_step(bucket, case.paging, one), static_step(bucket, case.paging, two), two


def conventions(case: Case) -> list[tuple[bool, bool]]:
    """(counted, with slots), as far as a table's form tells what is real."""
    is_draft_block = isinstance(case.paging, BlockTable) and case.step.num_steps > 1
    return [(c, s) for c in (True, False) for s in (True, False) if c or not is_draft_block]


def spoil(given: Engine) -> None:
    """Values that no pool, table or capacity holds."""
    given.inputs.seq_lens[0] = 2**30
    if given.inputs.out_cache_loc is not None:
        given.inputs.out_cache_loc[::3] = -1
        given.inputs.out_cache_loc[1::3] = 2**30
    if isinstance(given.paging, RequestTable):
        given.paging.rows[-1] = -5
    else:
        given.paging.table[:, 1] = 2**30
