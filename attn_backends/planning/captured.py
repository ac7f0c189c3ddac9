"""The captured part of metadata: its bucket, its static memory, and the copy of another step into it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from attn_backends.errors import CaptureError
from attn_backends.graphs import being_recorded, repeat_at_replays
from attn_backends.memory.phases import PhaseMemory
from spec_metadata import AnyBucket, BoundStep, Capacity, Paging, RequestTable, Step
from spec_metadata.admission import check_values, most_committed
from spec_metadata.query import most_rows

CopyInputs = Callable[[Step], None]
"""Fills the static inputs of captured metadata from a step of one layout."""


@dataclass(slots=True, eq=False)
class Captured:
    """static: the step of static inputs. phase: memory that the buckets of its phase share. captured_on: the engine's
    table. bind_inputs: a step -> what fills the static inputs, padded, from steps of its layout. bound: an engine's
    buffers that are read instead, else None.

    Validation and input binding are cached per layout, and redone only if the layout changes or a longer context
    appears.
    """

    bucket: AnyBucket
    static: Step
    capacity: Capacity
    phase: PhaseMemory
    captured_on: Tensor
    bind_inputs: Callable[[Step], CopyInputs]
    bound: BoundStep | None = None
    copy_inputs: CopyInputs = field(init=False, repr=False)
    _layout: Hashable = field(default=None, init=False)
    _table: Hashable = field(default=None, init=False)
    _longest: int = field(default=-1, init=False)

    def load(self, step: Step) -> bool:
        """Copy a step into the static inputs if one like it was taken already; False, with nothing written, if not."""
        if not self.admits(step):
            return False
        if being_recorded():
            repeat_at_replays(self.take_phase)
        self.phase.take(None)  # until all is written, which may fail
        self.copy_inputs(step)
        self.phase.planned = self
        return True  # else it is copied again

    def admits(self, step: Step) -> bool:
        """Whether a step like this one was taken already. One that is bound takes none."""
        if self.bound is not None:
            raise CaptureError(
                f"metadata of ({self.bucket}) reads the engine's buffers: write those, then refresh it or replay the "
                "graph that does"
            )
        if step is self.static:
            raise CaptureError("meta.step is what a replay overwrites: pass a step of tensors of your own")
        is_known = _table_of(step.paging, self.captured_on) == self._table and step.layout == self._layout
        return is_known and step.longest(self.capacity) <= self._longest

    def admit(self, step: Step) -> None:
        """Bind the inputs of a step, and remember its layout. Packed rows have lengths of their own every time."""
        self.copy_inputs, self._layout = self.bind_inputs(step), None
        if most_rows(step.query) is None:
            self._layout, self._table = step.layout, _table_of(step.paging, self.captured_on)
            self._longest = most_committed(step, self.capacity)

    def begin(self) -> None:
        """Before it is planned again: what a replay copied must be there still; an engine's buffers are elsewhere. A
        graph that is recorded around it does so too.
        """
        if being_recorded():
            repeat_at_replays(self._check_alive)
            repeat_at_replays(self.begin)
        if self.bound is None:
            self.check_phase()
        else:
            self.take_phase()
        for table in self.phase.tables:
            table.planned.pop(self.phase, None)
            table.planned[self.phase] = self

    def check_bound(self) -> None:
        """Refuse values of an engine's buffers that were brought within bounds; reads the device back."""
        if self.bound is not None:
            self.bound.check()
            check_values(self.bound.static, self.capacity)

    def take_phase(self) -> None:
        """Have its phase hold its step, and that of no other bucket. A graph that is recorded around it does so too."""
        if being_recorded():
            repeat_at_replays(self.take_phase)
        self.phase.take(self)

    def _check_alive(self) -> None:
        """Before a recorded graph plans: it makes no set of phases alive, because a CUDA graph makes none."""
        if self.phase.within is not None and not self.phase.within.is_alive:
            raise CaptureError(
                f"a graph plans ({self.bucket}) in the memory of another set of phases: call PhaseSet.revive of its "
                "own set before it"
            )

    def check_phase(self) -> None:
        """Refuse to be used after another bucket of its phase. A graph that is recorded around it refuses so too, and
        to attend to the pages of other requests.
        """
        if being_recorded():
            repeat_at_replays(self._check_replay)
        other = self.phase.planned
        if other is not self:
            by = "by another set of phases, which takes turns with its own"
            if isinstance(other, Captured):
                by = f"by a replay or capture of ({other.bucket}), which is of the same phase"
            elif self.phase.within is None or self.phase.within.is_alive:
                by = "by a replay, refresh or capture that failed"
            raise CaptureError(f"metadata of ({self.bucket}) was overwritten {by}: replay it again")

    def _check_replay(self) -> None:
        """Before a recorded graph runs. Reads rows, which a CUDA graph's host does not."""
        self.check_phase()
        for table in self.phase.tables:
            planned = list(table.planned.values())
            for other in planned[planned.index(self) + 1 :] if self in planned else ():
                assert isinstance(other, Captured), "what is planned in a table was captured"
                if not _same_requests(self.static, other.static):
                    raise CaptureError(
                        f"the table of ({self.bucket}) was overwritten by a replay of ({other.bucket}), which is of "
                        "other requests or of fewer: run the graphs of one batch before the next is planned"
                    )


def _same_requests(one: Step, other: Step) -> bool:
    """Whether the pages of one step's real requests are left in place by another, whose padded rows have the reserved
    page; of tables that are copied nobody knows.
    """
    if not (isinstance(one.paging, RequestTable) and isinstance(other.paging, RequestTable)):
        return True
    real = min(int(one.num_real), other.bs)
    return one.paging.rows[:real].tolist() == other.paging.rows[:real].tolist()


def _table_of(paging: Paging, captured_on: Tensor) -> Hashable:
    """Where a request table is read in place, and how; nothing of a block table, which is copied as its layout says."""
    if not isinstance(paging, RequestTable):
        return None
    table = paging.table
    return table.data_ptr(), None if table is captured_on else (table.shape, table.dtype, table.stride())
