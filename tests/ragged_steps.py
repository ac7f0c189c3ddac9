"""Random ragged steps in either form of table, verifies and draft extends, their captured steps, and how many rows each
request has by the rule, which is written here without the library's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spec_metadata import (
    BlockTable,
    BoundedQuery,
    BoundInputs,
    Buffers,
    CacheGeometry,
    Capacity,
    Extent,
    Paging,
    RequestTable,
    Step,
    StepKind,
    TokenBucket,
    allocate,
    input_specs,
    static_step,
)

PAGE_SIZE, WIDTH = 4, 4
GEOMETRY = CacheGeometry(num_pages=60, page_size=PAGE_SIZE, reserved_page=3, reserved_row=0)
CAPACITY = Capacity(max_bs=9, max_context=20, page_size=PAGE_SIZE, num_steps=WIDTH - 1, num_draft_tokens=WIDTH)


def cut(widths: Sequence[int], width: int, num_tokens: int) -> list[int]:
    """One row after the other goes, of the deepest the last."""
    kept = [min(max(each, 1), width) for each in widths]
    while sum(kept) > num_tokens:
        deepest = max(kept)
        kept[max(i for i, each in enumerate(kept) if each == deepest)] -= 1
    return kept


def strided(values: Sequence[int] | Tensor, dtype: torch.dtype) -> Tensor:
    given = torch.as_tensor(values, dtype=dtype)
    return torch.stack((given, given + 1), dim=-1)[..., 0]


class Ragged:
    """A batch whose widths may lie outside of the bounds, of an odd seed a draft extend, else a verify. num_padded:
    requests behind the real ones.
    """

    def __init__(
        self, seed: int, form: type = RequestTable, *, has_slots: bool = True, num_padded: int = 0, bs: int = 0
    ) -> None:
        rng = random.Random(f"{form.__name__} {seed}")
        self.kind = (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)[seed % 2]
        self.num_real = bs or rng.randint(1, 5)
        self.bs = self.num_real + num_padded
        self.index = rng.choice([torch.int32, torch.int64])
        self.widths = [rng.randint(-1, 6) for _ in range(self.bs)]
        self.lens = [rng.choice([0, 3, 4, 5, 20, rng.randint(0, 20)]) for _ in range(self.bs)]
        self.num_tokens = rng.randint(self.bs, self.bs * WIDTH)
        order = torch.randperm(GEOMETRY.num_pages - 4, generator=torch.Generator().manual_seed(seed)) + 4
        pages = order[: self.bs * 6].view(self.bs, 6)
        self.slots = [
            [int(pages[i, (n + j) // PAGE_SIZE]) * PAGE_SIZE + (n + j) % PAGE_SIZE for j in range(WIDTH)]
            for i, n in enumerate(self.lens)
        ]
        self.paging: Paging
        if form is BlockTable:
            self.paging = BlockTable(strided(pages, self.index), GEOMETRY)
        else:
            rows = rng.sample(range(1, self.bs + 3), self.bs)
            table = torch.full((self.bs + 3, 6), GEOMETRY.reserved_page)
            table[rows] = pages
            by_slot = (table.unsqueeze(2) * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1)
            self.paging = RequestTable(strided(by_slot, self.index), strided(rows, self.index), GEOMETRY)
        self.given = strided([slot for row in self.slots for slot in row], torch.int64) if has_slots else None

    @property
    def kept(self) -> list[int]:
        """Rows of each request by the rule."""
        return cut(self.widths[: self.num_real], WIDTH, self.num_tokens) + [0] * (self.bs - self.num_real)

    @property
    def written(self) -> list[int]:
        """Slots of the rows that are left."""
        return [slot for row, width in zip(self.slots, self.kept, strict=True) for slot in row[:width]]

    @property
    def step(self) -> Step:
        """The step; of a batch with padding, one that says so."""
        query = BoundedQuery(strided(self.widths, self.index), self.num_tokens, WIDTH)
        make = Step.target_verify if self.kind is StepKind.TARGET_VERIFY else Step.draft_extend
        step = make(query, strided(self.lens, self.index), self.paging, self.given)
        if self.bs == self.num_real:
            return step
        return replace(step, num_real=torch.tensor([self.num_real], dtype=torch.int32))

    def bucket(self, num_more: int) -> TokenBucket:
        """One with room for more requests and rows."""
        return CAPACITY.ragged_bucket(self.kind, self.bs + num_more, self.num_tokens + 3 * num_more)

    def inputs(self, *, include: bool = False, counted: bool = True) -> BoundInputs:
        """The batch as buffers of an engine. include: lengths count the rows that it asked for. counted: the engine
        says how many requests are real, else it fills the others by its convention.
        """
        lens = torch.tensor(self.lens) + (torch.tensor(self.widths) if include else 0)
        if not counted:
            lens[: self.num_real].clamp_(1)
            lens[self.num_real :] = 0
            if isinstance(self.paging, RequestTable):
                self.paging.rows[self.num_real :] = GEOMETRY.reserved_row
        num_real = torch.tensor([self.num_real]) if counted else None
        return BoundInputs(
            strided(lens, self.index), self.given, num_real, None, include, strided(self.widths, self.index)
        )


def static_of(case: Ragged, bucket: TokenBucket) -> tuple[Step, Buffers]:
    """A captured step of padding, and its buffers."""
    specs = input_specs(bucket, case.paging)
    buffers = allocate(specs, Extent.of_bucket(bucket, CAPACITY, GEOMETRY.num_pages), torch.device("cpu"))
    return static_step(bucket, case.paging, buffers), buffers
