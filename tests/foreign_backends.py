"""A project with a metadata interface of its own, in small, and its driver; bugs in either are subclasses.

`Work` is its batch object, `Attention` its backend, `Pool` its memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, CacheInputs, Latents, PagedCache, PagedLatent
from attn_backends.conformance.foreign.driver import (
    ForeignBackend,
    ForeignStep,
    Handed,
    LatentSlots,
    first_use,
    launch,
)
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.kernels.torch_attention import page_table_attention
from attn_backends.layer import AttentionLayer
from spec_metadata import Bucket, Step, StepKind

KINDS = (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)


@dataclass
class Work:
    """committed: [bs]. slots: [bs, most] of each request's tokens. writes: [bs * rows * steps]. rows: of a request."""

    committed: Tensor
    slots: Tensor
    writes: Tensor
    rows: int
    steps: int

    def writes_of(self, forward: int) -> Tensor:
        """A view, strided where there are several forwards."""
        return self.writes.view(-1, self.steps)[:, forward]


class Pool:
    """One layer's latents. memory: [num_slots, dim]."""

    def __init__(self, num_slots: int, dim: int, dtype: torch.dtype) -> None:
        self.memory = torch.zeros(num_slots, dim, dtype=dtype)

    def put(self, slots: Tensor, rows: Tensor) -> None:
        self.memory[slots.long()] = rows


class DensePool(Pool):
    """Reads slots as if they were dense."""

    def put(self, slots: Tensor, rows: Tensor) -> None:
        super().put(slots.as_strided(slots.shape, (1,)), rows)


class Attention:
    """plan: keys of each request's last row, into memory that a graph reads. others: slots that other layers write by.
    attend: over the keys.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def plan(self, work: Work, forwards: int) -> None:
        for forward in range(forwards):
            keys = self.count(work, forward)
            self.keys.setdefault(forward, keys.clone()).copy_(keys)

    def count(self, work: Work, forward: int) -> Tensor:
        return work.committed + work.rows + forward

    def others(self, work: Work, forward: int) -> Tensor:
        return work.writes_of(forward)

    def attend(self, work: Work, forward: int, q: Tensor, pool: Pool, layer: AttentionLayer) -> Tensor:
        bs = len(work.committed)
        memory = pool.memory[:, None, None]
        starts = torch.arange(bs + 1, dtype=torch.int32) * work.rows
        out, _ = page_table_attention(
            q,
            memory,
            memory[..., : layer.v_head_dim],
            starts,
            work.slots,
            self.keys[forward],
            max_seqlen_q=work.rows,
            causal=True,
            scale=layer.scale,
        )
        return out


class CommittedAlone(Attention):
    """A draft that attends to committed tokens alone."""

    def count(self, work: Work, forward: int) -> Tensor:
        return work.committed if work.steps > 1 else super().count(work, forward)


class CutOff(Attention):
    """A plan for other layers has the slots of all forwards, cut off at the batch size."""

    def others(self, work: Work, forward: int) -> Tensor:
        return work.writes[: len(work.writes) // work.steps]


class PlannedOnce(Attention):
    """A graph keeps what it was captured with."""

    def plan(self, work: Work, forwards: int) -> None:
        if not self.keys:
            super().plan(work, forwards)


class Dies(Attention):
    """A verify takes the process down."""

    def plan(self, work: Work, forwards: int) -> None:
        if work.rows > 1:
            os._exit(7)
        super().plan(work, forwards)


class TinyStep(ForeignStep):
    def __init__(self, driver: Tiny, work: Work, forwards: int) -> None:
        self.driver, self.work, self.forwards = driver, work, forwards
        self.attention = driver.attention()
        self.attention.plan(work, forwards)

    def load(self, step: Step) -> None:
        self.driver.fill(self.work, step)
        self.attention.plan(self.work, self.forwards)

    def begin(self, forward: int) -> None:
        pass

    def store(self, forward: int, inputs: CacheInputs, layer: AttentionLayer) -> None:
        assert isinstance(inputs, Latents)
        self.driver.made_pool.put(self.work.writes_of(forward), self.driver.rows_of(inputs.latent))

    def attend(self, forward: int, q: Tensor, layer: AttentionLayer) -> Tensor:
        return self.attention.attend(self.work, forward, q, self.driver.made_pool, layer)

    def read_slots(self, forward: int) -> list[list[int]]:
        keys = self.attention.keys[forward].tolist()
        slots, rows = self.work.slots.tolist(), self.work.rows
        return [slots[i][: n - rows + 1 + row] for i, n in enumerate(keys) for row in range(rows)]

    def handed_slots(self, forward: int) -> Handed:
        return Handed.of(self.work.writes_of(forward), torch.Tensor.clone)

    def latent_slots(self, forward: int) -> list[LatentSlots]:
        return [LatentSlots("others", self.attention.others(self.work, forward).tolist())]


def _no_reasons(device: torch.device) -> list[str]:
    return []


def _kernel(unavailable_reasons: Any = _no_reasons) -> Kernel:
    able = Capabilities(frozenset({1, 16}), frozenset({torch.float64}), needs_host_lens=True)
    return Kernel("its_own", launch, dict.fromkeys(KINDS, able), unavailable_reasons, schedule=first_use)


class Tiny(ForeignBackend):
    """The driver."""

    name = "tiny:attention"
    project = "Tiny"
    formats = frozenset({CacheFormat.LATENT})
    kernels = (_kernel(),)
    attention: ClassVar[type[Attention]] = Attention
    pool: ClassVar[type[Pool]] = Pool

    @classmethod
    def control(cls) -> type[ForeignBackend]:
        return type(cls.__name__, (cls,), {"attention": Attention, "pool": Pool})

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        return {"TINY_DEVICE": device}

    def plan_eagerly(self, step: Step) -> ForeignStep:
        work = self.work(step.bs, step.width, step.num_steps)
        self.fill(work, step)
        return TinyStep(self, work, step.num_forwards)

    def plan_captured(self, bucket: Bucket) -> ForeignStep:
        drafts = bucket.kind is StepKind.DRAFT_DECODE
        steps = self.capacity.num_steps if drafts else 1
        return TinyStep(self, self.work(bucket.bs, bucket.width, steps), steps - 1 if drafts else 1)

    def work(self, bs: int, rows: int, steps: int) -> Work:
        reserved = self.geometry.reserved_slot
        slots = torch.full((bs, self.capacity.max_tokens), reserved)
        writes = torch.full((bs * rows * steps,), reserved)
        return Work(torch.zeros(bs, dtype=torch.int64), slots, writes, rows, steps)

    def fill(self, work: Work, step: Step) -> None:
        real = 0 if step.kind is StepKind.IDLE else step.bs
        reserved = self.geometry.reserved_slot
        for tensor, padding in ((work.committed, 0), (work.slots, reserved), (work.writes, reserved)):
            tensor.fill_(padding)
        if real:
            positions = torch.arange(self.capacity.max_tokens).expand(real, -1)
            work.committed[:real].copy_(self.committed_of(step))
            work.slots[:real].copy_(step.paging.slots(positions))
            work.writes[: step.num_writes].copy_(self.writes_of(step))

    def committed_of(self, step: Step) -> Tensor:
        return step.seq_lens

    def writes_of(self, step: Step) -> Tensor:
        return step.flat_slots()

    def rows_of(self, latent: Tensor) -> Tensor:
        return latent

    def bring_in(self, cache: PagedCache) -> None:
        assert isinstance(cache, PagedLatent)
        if not hasattr(self, "made_pool"):
            self.made_pool = self.pool(self.geometry.num_slots, cache.latent.shape[-1], cache.dtype)
        self.made_pool.memory.copy_(cache.latent.flatten(0, 1))

    def bring_out(self, cache: PagedCache) -> None:
        assert isinstance(cache, PagedLatent)
        cache.latent.copy_(self.made_pool.memory.view(cache.latent.shape))


class DriverCountsOneLess(Tiny):
    """The driver's mistake: a committed token is forgotten."""

    def committed_of(self, step: Step) -> Tensor:
        return step.seq_lens - 1


class DriverTurnsSlotsRound(Tiny):
    """The driver's mistake: the slots of the last request come first."""

    def writes_of(self, step: Step) -> Tensor:
        return step.flat_slots().flip(0)


class DraftsCommittedAlone(Tiny):
    attention = CommittedAlone


class CutsOffSlots(Tiny):
    attention = CutOff


class StoresDensely(Tiny):
    pool = DensePool


class PlansOnce(Tiny):
    attention = PlannedOnce


class DiesInVerify(Tiny):
    attention = Dies


class OfAnotherVersion(Tiny):
    kernels = (_kernel(lambda device: ["tiny 3.0 is installed (the driver knows 1.0, 2.0)"]),)
