"""What makes metadata captured: the bucket and memory that it has, and how a replay brings it another step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from attn_backends.errors import CaptureError
from attn_backends.graphs import repeat_at_replays
from attn_backends.memory.phases import PhaseMemory
from spec_metadata import Bucket, Capacity, Paging, RequestTable, Step, TokenBucket, UniformQuery
from spec_metadata.admission import longest_promised, most_committed

CopyInputs = Callable[[Step], None]
"""Fills the static inputs of captured metadata from a step of one layout."""


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """An engine's buffers, which captured metadata is planned from. read: writes the static step from them, on the
    device. check: refuses values that it brought within bounds; reads the device back.
    """

    read: Callable[[], None]
    check: Callable[[], None]


@dataclass(slots=True, eq=False)
class Captured:
    """phase: memory that the buckets of its phase share. captured_on: the engine's table. bind_inputs: a step -> what
    fills the static inputs, padded, from steps of its layout. bound: an engine's buffers that are read instead, else
    None.

    Validation and input binding are cached per layout, and redone only if the layout changes or a longer context
    appears.
    """

    bucket: Bucket | TokenBucket
    capacity: Capacity
    phase: PhaseMemory
    captured_on: Tensor
    bind_inputs: Callable[[Step], CopyInputs]
    bound: Bound | None = None
    copy_inputs: CopyInputs = field(init=False, repr=False)
    _layout: Hashable = field(default=None, init=False)
    _table: Hashable = field(default=None, init=False)
    _longest: int = field(default=-1, init=False)

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

    def reading(self, plan: Callable[[], None]) -> Callable[[], None]:
        """What plans it, after an engine's buffers were read if it is bound to those."""
        bound = self.bound
        if bound is None:
            return plan

        def read_and_plan() -> None:
            bound.read()
            plan()

        return read_and_plan

    def begin(self) -> None:
        """Before it is planned again: what a replay copied must be there still; an engine's buffers are elsewhere."""
        if self.bound is None:
            self.check_phase()
        else:
            self.take_phase()

    def check_bound(self) -> None:
        """Refuse values of an engine's buffers that were brought within bounds; reads the device back."""
        if self.bound is not None:
            self.bound.check()

    def take_phase(self) -> None:
        """Have its phase hold its step, and that of no other bucket. A graph that is recorded around it does so too."""
        repeat_at_replays(self.take_phase)
        self.phase.planned = self

    def check_phase(self) -> None:
        """Refuse to be used after another bucket of its phase. A graph that is recorded around it refuses so too."""
        repeat_at_replays(self.check_phase)
        other = self.phase.planned
        if other is not self:
            assert isinstance(other, Captured), "a phase is planned from its first capture"
            raise CaptureError(
                f"metadata of ({self.bucket}) was overwritten by a replay or capture of ({other.bucket}), which is of "
                "the same phase: replay it again"
            )


def _table_of(paging: Paging, captured_on: Tensor) -> Hashable:
    """Where a request table is read in place, and how; nothing of a block table, which is copied as its layout says."""
    if not isinstance(paging, RequestTable):
        return None
    table = paging.table
    return table.data_ptr(), None if table is captured_on else (table.shape, table.dtype, table.stride())
