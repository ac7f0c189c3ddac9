"""The phases of EAGLE's cycle for each set of steps. Sets take turns in one memory (`PhaseSets`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_backends.backend import AttentionBackend
from attn_backends.memory.phase_sets import PhaseSets
from attn_backends.runner import Phase, PhaseRunner, classify
from attn_backends_reference.eagle.phases import Accepted, Drafted, DraftState, Nothing
from spec_metadata import Capacity, CommittedState
from spec_metadata.buffers import aligned

MakeRunner = Callable[..., PhaseRunner[Any, Any]]
"""(phase, backend, within, sharing, state=its state) -> its runner."""
OfPhases = tuple[Any, Any, Any]
"""What a set has for its draft, verify and draft extend."""


@dataclass(frozen=True, slots=True, eq=False)
class StepSet:
    """The phases of a cycle that drafts in the shape of a capacity."""

    capacity: Capacity
    draft: PhaseRunner[Nothing, Drafted]
    verify: PhaseRunner[Any, Accepted]
    extend: PhaseRunner[Accepted, DraftState]


class StepSets:
    """The sets of a worker, in the order given.

    phases: those of each capacity. used: their backends, and states: what each is planned from. buckets: that each is
    captured in. make: a runner of a phase on a backend and a state, in a set of phases, beside another set's runner of
    the phase.
    """

    def __init__(
        self,
        phases: Sequence[tuple[Capacity, OfPhases]],
        used: tuple[AttentionBackend, ...],
        states: tuple[CommittedState, ...],
        buckets: Sequence[int],
        make: MakeRunner,
    ) -> None:
        sizes = [
            sum(_bytes_in_set(*every, buckets) for every in zip(each, used, states, strict=True)) for _, each in phases
        ]
        self._phase_sets = PhaseSets(used[0].device, max(sizes)) if len(phases) > 1 else None
        found: dict[int, StepSet] = {}
        before: Sequence[PhaseRunner[Any, Any] | None] = [None] * len(used)
        for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            within = None if self._phase_sets is None else self._phase_sets.add()
            capacity, own = phases[number]
            # The draft last, which is never ragged: a table that ragged phases fit in serves all (`StaticMemory`).
            every = reversed(list(zip(own, used, before, states, strict=True)))
            made = [make(phase, backend, within, beside, state=state) for phase, backend, beside, state in every][::-1]
            found[number], before = StepSet(capacity, *made), made
        self._sets = [found[number] for number in range(len(phases))]

    @property
    def num_bytes(self) -> int:
        """Bytes of the static memory that sets take turns in; 0 of a single set, whose phases have their own."""
        return 0 if self._phase_sets is None else self._phase_sets.num_bytes

    def __getitem__(self, number: int) -> StepSet:
        return self._sets[number]

    def cycle_ends(self) -> None:
        """The last graph of a cycle was launched: another set may be planned after it."""
        if self._phase_sets is not None:
            self._phase_sets.reads_end()


def _bytes_in_set(
    phase: Phase[Any, Any], backend: AttentionBackend, state: CommittedState, buckets: Sequence[int]
) -> int:
    """Bytes that a captured phase takes in a set of phases: its inputs, and what its backend plans into."""
    if not buckets:
        return 0
    given = phase.safe_inputs(max(buckets))
    inputs = [getattr(given, name) for name in classify(type(given))]
    of_inputs = sum(aligned(each.numel() * each.element_size()) for each in inputs)
    return of_inputs + aligned(backend.phases.own_bytes(phase.bucket(max(buckets)), state.paging))
