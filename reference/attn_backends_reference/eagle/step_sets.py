"""The phases of EAGLE's cycle for each set of steps. Sets take turns in one memory (`PhaseSets`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_backends.backend import AttentionBackend
from attn_backends.memory.phase_sets import PhaseSets
from attn_backends.runner import Phase, PhaseRunner, classify
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.phases import (
    Accepted,
    Drafted,
    DraftState,
    Model,
    VerifyInputs,
    draft_phase,
)
from attn_backends_reference.eagle.ragged import extend_phase_of, verify_phase_of
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from spec_metadata import Capacity, Paging
from spec_metadata.buffers import aligned

MakeRunner = Callable[..., PhaseRunner[Any, Any]]
"""(phase, backend, within, sharing, paging=table) -> its runner."""


@dataclass(frozen=True, slots=True, eq=False)
class StepSet:
    """The phases of a cycle that drafts in the shape of a capacity."""

    capacity: Capacity
    draft: PhaseRunner[DraftState, Drafted]
    verify: PhaseRunner[VerifyInputs, Accepted]
    extend: PhaseRunner[Accepted, DraftState]


class StepSets:
    """The sets of a worker, in the order given.

    num_best: tokens of depth 1 that the state between cycles has, which any of them may begin with. make: a runner of a
    phase on a backend, in a set of phases, beside another set's runner of the phase. pagings: the tables that draft,
    verify and draft extend read, of no request.
    """

    def __init__(
        self,
        draft: Callable[[AttentionBackend], Model[DraftModel]],
        target: Model[TargetModel],
        backends: PhaseBackends,
        capacities: Sequence[Capacity],
        num_best: int,
        options: WorkerOptions,
        make: MakeRunner,
        pagings: tuple[Paging, Paging, Paging],
    ) -> None:
        used = backends.draft, backends.verify, backends.draft_extend
        phases: list[tuple[Phase[Any, Any], ...]] = [
            (
                draft_phase(draft(backends.draft), capacity, num_best, windowed=options.draft_window is not None),
                verify_phase_of(target, capacity, options),
                extend_phase_of(draft(backends.draft_extend), capacity, options, num_best),
            )
            for capacity in capacities
        ]
        sizes = [
            sum(_bytes_in_set(*every, options.buckets) for every in zip(each, used, pagings, strict=True))
            for each in phases
        ]
        takes_turns = len(capacities) > 1
        self._phase_sets = PhaseSets(target.model.device, max(sizes)) if takes_turns else None
        found: dict[int, StepSet] = {}
        before: Sequence[PhaseRunner[Any, Any] | None] = [None] * len(used)
        for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            within = None if self._phase_sets is None else self._phase_sets.add()
            every = zip(phases[number], used, before, pagings, strict=True)
            made = [make(phase, backend, within, beside, paging=table) for phase, backend, beside, table in every]
            found[number], before = StepSet(capacities[number], *made), made
        self._sets = [found[number] for number in range(len(capacities))]

    @property
    def num_bytes(self) -> int:
        """Of the static memory that sets take turns in; 0 of a single set, whose phases have their own."""
        return 0 if self._phase_sets is None else self._phase_sets.num_bytes

    def __getitem__(self, number: int) -> StepSet:
        return self._sets[number]

    def cycle_ends(self) -> None:
        """The last graph of a cycle was launched: another set may be planned after it."""
        if self._phase_sets is not None:
            self._phase_sets.reads_end()


def _bytes_in_set(phase: Phase[Any, Any], backend: AttentionBackend, paging: Paging, buckets: Sequence[int]) -> int:
    """Bytes that a captured phase takes in a set of phases: its inputs, and what its backend plans into."""
    if not buckets:
        return 0
    given = phase.safe_inputs(max(buckets))
    inputs = [getattr(given, name) for name in classify(type(given))]
    of_inputs = sum(aligned(each.numel() * each.element_size()) for each in inputs)
    return of_inputs + aligned(backend.phases.own_bytes(phase.bucket(max(buckets)), paging))
