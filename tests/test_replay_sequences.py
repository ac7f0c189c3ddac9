"""Random replays one after the other, inputs and plans fused: each leaves what it would leave had it been the first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends import backend as base
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.planning.metadata import Metadata
from attn_backends.selection import providers
from spec_metadata import (
    BlockTable,
    Bucket,
    CacheGeometry,
    Capacity,
    PackedQuery,
    Paging,
    RequestTable,
    Step,
    StepKind,
    TokenBucket,
    UniformQuery,
)
from spec_metadata.visibility import leading, query_starts
from tests.specified import specified
from tests.triton_interpreter import interpreted

PAGE_SIZE = 4
CAPACITY = Capacity(max_bs=4, max_context=21, page_size=PAGE_SIZE, topk=2, num_steps=3, num_draft_tokens=4)
GEOMETRY = CacheGeometry(num_pages=2 + 6 * CAPACITY.max_pages, page_size=PAGE_SIZE, reserved_page=1, reserved_row=0)
KINDS = [StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND, StepKind.PREFILL]
INTEGERS = (torch.int32, torch.int64)


class Engine:
    """Makes steps from tensors of its own, of types and strides that change with every step."""

    def __init__(self, form: type) -> None:
        self.rng, self.form = random.Random(0), form
        pages = 2 + torch.randperm(6 * CAPACITY.max_pages, generator=torch.Generator().manual_seed(0))
        self.pages = torch.cat((torch.ones(1, CAPACITY.max_pages, dtype=torch.int64), pages.view(6, -1)))
        self.table = (self.pages.unsqueeze(2) * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1).int()

    def tensor(self, values: Sequence[int] | Tensor) -> Tensor:
        given = torch.as_tensor(values).to(self.rng.choice(INTEGERS))
        return given if self.rng.random() < 0.5 else torch.stack((given, given + 1), dim=-1)[..., 0]

    def again(self, step: Step) -> Step:
        """The same values, one tensor of them in another form perhaps."""
        name = self.rng.choice(("seq_lens", "out_cache_loc", "paging"))
        if name == "paging":
            return replace(step, paging=step.paging.on_static(self.tensor(step.paging.static_input())))
        given = step.flat_slots() if name == "out_cache_loc" else step.seq_lens
        return replace(step, **{name: self.tensor(given)})

    def paging(self, rows: Sequence[int]) -> Paging:
        if self.form is RequestTable:
            return RequestTable(self.table, self.tensor(rows), GEOMETRY)
        return BlockTable(self.tensor(self.pages[list(rows)]), GEOMETRY)

    def bucket(self, kind: StepKind) -> Bucket | TokenBucket:
        bs = self.rng.randint(2, CAPACITY.max_bs)
        if kind is StepKind.PREFILL:
            return TokenBucket(kind, bs, self.rng.choice((5, 40, 90)))
        return CAPACITY.bucket(kind, bs)

    def step(self, bucket: Bucket | TokenBucket) -> Step:
        """One that fits a bucket."""
        bs = self.rng.randint(1, bucket.bs)
        lens = [self.rng.choice((0, 3, 4, 5, 13, 21)) for _ in range(bs)]
        paging, committed = self.paging(self.rng.sample(range(1, 7), bs)), self.tensor(lens)
        bound = {"max_committed": self.rng.choice((None, max(lens)))}
        match bucket.kind:
            case StepKind.DECODE:
                return Step.decode(committed, paging, **bound)
            case StepKind.DRAFT_DECODE:
                return Step.draft_decode(2, 3, committed, paging, **bound)
            case StepKind.TARGET_VERIFY:
                mask = torch.rand(bs, 4, 4, generator=torch.Generator().manual_seed(bs)) < 0.5
                return Step.target_verify(4, committed, paging, tree_mask=mask.mT, **bound)
            case StepKind.DRAFT_EXTEND:
                return Step.draft_extend(UniformQuery(CAPACITY.extend_width), committed, paging, **bound)
        most = max(1, min(5, bucket.num_tokens // bs))
        return Step.prefill(PackedQuery.of([self.rng.randint(1, most) for _ in lens]), committed, paging, **bound)


def written(meta: Metadata) -> dict[str, Tensor]:
    """What metadata says: its inputs and its plan, but for what nothing reads."""
    step, masks = meta.step, specified(meta.step, meta.buffers)
    if isinstance(step.paging, BlockTable):
        num_writes = query_starts(step).diff() * step.num_steps
        masks["paging"] = leading(-(-(step.seq_lens + num_writes) // PAGE_SIZE), CAPACITY.max_pages)
    return {
        name: torch.where(masks[name], buffer, -1) if name in masks else buffer.clone()
        for name, buffer in meta.buffers.items()
    }


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends whose planner is fused copy their inputs so, too, on a CPU."""
    interpreted("triton_plan", "_plan_pages")
    triton_inputs = interpreted("triton_inputs", "_copy_inputs")
    torchs = base.bind_inputs
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    monkeypatch.setattr(
        base,
        "bind_inputs",
        lambda planner, static: triton_inputs.bind_inputs(static) if planner.is_fused else torchs(planner, static),
    )


LONG = [pytest.param(form, 40, marks=pytest.mark.full) for form in (RequestTable, BlockTable)]


@pytest.mark.parametrize(("form", "turns"), [(RequestTable, 20), (BlockTable, 8), *LONG])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("fused")
def test_a_replay_depends_on_nothing_before_it(kind: StepKind, form: type, turns: int) -> None:
    """On two graphs of a kind and one of any, which share their memory."""
    engine = Engine(form)
    backend = FA3Backend(CAPACITY, GEOMETRY, kernel="torch", planner="fused")
    buckets = [engine.bucket(each) for each in (kind, kind, engine.rng.choice(KINDS))]
    metas = [(bucket, backend.capture(bucket, engine.paging([0]))) for bucket in buckets]
    paging = engine.paging([0])
    idle = Step.idle(paging.on_static(paging.static_input()[:0]))
    last = [engine.step(bucket) for bucket in buckets]
    for turn in range(turns):
        number, what = engine.rng.choice((0, 0, 0, 0, 1, 2)), engine.rng.choice(("idle", "again", "again", "new"))
        bucket, meta = metas[number]
        if what != "idle":
            last[number] = engine.again(last[number]) if what == "again" else engine.step(bucket)
        step = idle if what == "idle" else last[number]
        backend.replay(meta, step)
        alone = FA3Backend(CAPACITY, GEOMETRY, kernel="torch", planner="torch")
        first = alone.capture(bucket, engine.paging([0]))
        alone.replay(first, step)
        found, expected = written(meta), written(first)
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            assert torch.equal(found[name], buffer), f"turn {turn}, {step.kind} in {bucket}: {name}"
