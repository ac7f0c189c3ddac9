"""Verifies and draft extends whose widths the device alone knows, where a kernel captures packed rows of them."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.checks_math import extra_world_of, measure_extra
from attn_backends.conformance.comparisons import compare_memory, compare_outputs, nearest
from attn_backends.conformance.exercise import Captured, Ran, batch_of, run_eagerly, scene_of
from attn_backends.conformance.situations import Cases, in_8_bits, joined, one_page_size, ragged_kinds, ragged_steps
from spec_metadata import StepKind


def _of_kind(kind: StepKind) -> Cases:
    """Ragged steps of a kind, and at one page size those over caches of 8-bit floats and with scales."""
    return joined(ragged_steps(kind), in_8_bits(ragged_steps(kind)))


def _measured(ran: Ran) -> Measured:
    compare_memory(ran.scene, ran.before, padded=True)
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


@check("math.ragged_verify", _of_kind(StepKind.TARGET_VERIFY))
def ragged_verify(subject: Subject, case: Case) -> Measured:
    """Row j of a verify sees the committed tokens and j + 1 more, however many rows the device gives its request."""
    return measure_extra(subject, case)


@check("math.ragged_draft_extend", _of_kind(StepKind.DRAFT_EXTEND))
def ragged_draft_extend(subject: Subject, case: Case) -> Measured:
    """A draft extend has and writes the rows that the device says were accepted, and no row of a rejected token."""
    return measure_extra(subject, case)


ASKED_AND_KEPT = (
    ((4, 4, 4), (3, 2, 2)),
    ((1, 9, 3), (1, 3, 2)),
    ((0, 4, 4), (1, 2, 1)),
    ((4, 4, 4), (3, 2, 0)),  # the last is padding
    ((4,), (1,)),
)


def _over_the_bound(subject: Subject) -> list[Case]:
    cases = []
    for case in one_page_size(ragged_kinds)(subject):
        three = replace(case, lens=case.lens[:3], widths=(4, 4, 4))
        cases += [three, replace(three, path="graph", captured_lens=(2, 1), captured_widths=(1, 3), bs=3, num_tokens=9)]
    return cases


@check("math.ragged_cut", joined(_over_the_bound, in_8_bits(_over_the_bound)))
def ragged_cut(subject: Subject, case: Case) -> Measured:
    """Widths over the bound are cut by the rule: the deepest rows go, of equally deep ones those of later requests, and
    the root of each stays. Requests that the device says are padding have no row and no token.
    """
    world, found = extra_world_of(subject, case), []
    captured = Captured(world, case) if case.path == "graph" else None
    for turn, (asked, kept) in enumerate(ASKED_AND_KEPT):
        batch = replace(batch_of(case), lens=case.lens[: len(kept)], widths=kept, asked=asked)
        scene = scene_of(world, batch, case.seed + turn)
        ran = run_eagerly(scene, case) if captured is None else captured.run(scene, case)
        if any(padded := ran.meta.step.seq_lens[int(ran.meta.step.num_real) :].tolist()):
            raise CheckFailure("committed tokens of padding", "it has some", None, "0", str(padded))
        found.append(_measured(ran))
    return nearest(found)
