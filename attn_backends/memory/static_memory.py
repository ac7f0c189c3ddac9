"""The static memory of captured steps: one allocation, in which all phases of a worker lie over each other.

Phases run one after the other, on one stream, and each replay writes its inputs and plans anew. So they need not keep
what was planned for another one: the memory is as large as its largest phase. It has one tenant at a time, the captured
metadata that was replayed last; the others are stale until their own next replay, and say so when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor

from attn_backends.errors import CaptureError
from attn_backends.graphs import repeat_at_replays
from attn_backends.kernels.device_memory import room_for
from spec_metadata import Arena, Bucket, Capacity, Paging, RequestTable, Step, TokenBucket, UniformQuery
from spec_metadata.admission import longest_promised, most_committed

Sizes = Mapping[str, int]
"""Bytes of each buffer of a phase, by name."""

CopyInputs = Callable[[Step], None]
"""Fills the static inputs of captured metadata from a step of one layout."""


class StaticMemory:
    """Memory for the captured steps of backends that one worker runs in turn on one stream.

    Allocated by the first capture, for the largest phase that any of its backends can have. A capture that needs more,
    of a bucket that no capacity named, gets an allocation of its own size.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._needs: list[WeakMethod[Callable[[Paging], int]]] = []
        self._tenant: Tenant | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(block.numel() for block in self._blocks)

    def join(self, needed: Callable[[Paging], int]) -> None:
        """Announce a backend, until it is collected. needed: its method, a table of the engine -> bytes of its largest
        phase on it.
        """
        self._needs.append(WeakMethod(needed))

    def block(self, owner: str, num_bytes: int, sizes: Sizes, paging: Paging, device: torch.device) -> Tensor:
        """[num_bytes or more] uint8. owner, sizes: whose buffers are to lie in it, for a refusal before allocation."""
        place = torch.empty(0, device=device).device  # "cuda" has no index
        if self._blocks and self._blocks[0].device != place:
            raise CaptureError(
                f"{owner} is on {place} and was given static memory on {self._blocks[0].device}: one memory is for "
                "backends on one device, so give it a StaticMemory of its own"
            )
        fitting = [block for block in self._blocks if block.numel() >= num_bytes]
        if fitting:
            return fitting[0]
        self._needs = [each for each in self._needs if each() is not None]
        most = max([num_bytes, *(needed(paging) for each in self._needs if (needed := each()))])
        with room_for(most, device, lambda found: CaptureError(_too_large(owner, most, sizes, found))):
            self._blocks.append(torch.empty(most, dtype=torch.uint8, device=device))
        return self._blocks[-1]

    def let_to(self, tenant: Tenant | None) -> None:
        """Give all of the memory to captured metadata, or to nobody; what others had in it is lost. A graph that is
        recorded around it does so at every replay.
        """
        self._tenant = tenant
        repeat_at_replays(partial(setattr, self, "_tenant", tenant))

    def is_let_to(self, tenant: Tenant) -> bool:
        """Whether nobody has written over a captured metadata since it was replayed."""
        return self._tenant is tenant

    @property
    def tenant(self) -> Tenant | None:
        """Who was replayed, or captured, last."""
        return self._tenant


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """An engine's buffers, which captured metadata is planned from. read: writes the static step from them, on the
    device. check: refuses values that it brought within bounds; reads the device back.
    """

    read: Callable[[], None]
    check: Callable[[], None]


@dataclass(slots=True, eq=False)
class Tenant:
    """What captured metadata has of static memory.

    arena: of all buckets of its phase. captured_on: the engine's table. bind_inputs: a step -> what fills the static
    inputs, padded, from steps of its layout. bound: an engine's buffers that are read instead, else None.
    What it took once it takes again, unless it is longer: a step is asked about, and its inputs are bound, when its
    layout is another than the last one's.
    """

    bucket: Bucket | TokenBucket
    capacity: Capacity
    memory: StaticMemory
    arena: Arena
    captured_on: Tensor
    bind_inputs: Callable[[Step], CopyInputs]
    bound: Bound | None = None
    copy_inputs: CopyInputs = field(init=False, repr=False)
    _layout: Hashable = field(default=None, init=False)
    _table: Hashable = field(default=None, init=False)
    _longest: int = field(default=-1, init=False)

    def begin(self) -> None:
        """Before it is planned again: what a replay copied must be there still; an engine's buffers lie elsewhere."""
        if self.bound is None:
            self.check()
        else:
            self.memory.let_to(self)

    def reading(self, plan: Callable[[], None]) -> Callable[[], None]:
        """What plans it, after an engine's buffers were read if it is bound to those."""
        bound = self.bound
        if bound is None:
            return plan

        def read_and_plan() -> None:
            bound.read()
            plan()

        return read_and_plan

    def check_bound(self) -> None:
        """Refuse values of an engine's buffers that were brought within bounds; reads the device back."""
        if self.bound is not None:
            self.bound.check()

    def admits(self, step: Step) -> bool:
        """Whether a step like this one was taken already. One that is bound takes none."""
        if self.bound is not None:
            raise CaptureError(
                f"metadata of ({self.bucket}) reads the engine's buffers: write those, then refresh it or replay the "
                "graph that does"
            )
        is_known = step.layout == self._layout and _table_of(step.paging, self.captured_on) == self._table
        return is_known and longest_promised(step, self.capacity) <= self._longest

    def admit(self, step: Step) -> None:
        """Bind the inputs of a step, and remember its layout. A packed one has lengths of its own every time."""
        self.copy_inputs, self._layout = self.bind_inputs(step), None
        if isinstance(step.query, UniformQuery):
            self._layout, self._table = step.layout, _table_of(step.paging, self.captured_on)
            self._longest = most_committed(step, self.capacity)

    def check(self) -> None:
        """Refuse to be used after another replay, and have a graph that is recorded around it refuse its replays."""
        repeat_at_replays(self.check)
        if not self.memory.is_let_to(self):
            other = self.memory.tenant
            raise CaptureError(
                f"metadata of ({self.bucket}) was overwritten by a replay or capture of "
                f"({other.bucket if other else 'nothing'}), which shares its static memory: replay it again, or give "
                "the backends memory of their own"
            )


def _table_of(paging: Paging, captured_on: Tensor) -> Hashable:
    """Where a request table is read in place, and how; nothing of a block table, which is copied as its layout says."""
    if not isinstance(paging, RequestTable):
        return None
    table = paging.table
    return table.data_ptr(), None if table is captured_on else (table.shape, table.dtype, table.stride())


def _too_large(owner: str, num_bytes: int, sizes: Sizes, found: str) -> str:
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {size:,}" for name, size in largest)
    return (
        f"{owner}: static buffers need {num_bytes:,} bytes and {found} (of one phase: {listed}); lower max_bs or "
        "max_context, take larger pages, or run these steps eagerly"
    )
