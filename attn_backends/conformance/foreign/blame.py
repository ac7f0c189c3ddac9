"""Blame for a failed case, the driver's or the backend's: the same driver runs it again on a backend that is right."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.foreign.causes import LATENT, causes, latent
from attn_backends.conformance.foreign.driver import ForeignBackend
from attn_backends.conformance.outcomes import Outcome, Row
from attn_backends.conformance.running import run_case

OWNED_SLOTS = "cache.writes_owned_slots"
FAILED = (Outcome.FAIL, Outcome.ERROR)


def run_foreign_case(subject: Subject, case: Case) -> Row:
    """A case of a foreign backend. A failure tells its cause, and is an error where it is the driver's own mistake."""
    row = _run(subject, case)
    if row.status not in FAILED:
        return row
    backend = subject.backend
    assert issubclass(backend, ForeignBackend), "it has a driver"
    held = _run(replace(subject, backend=backend.control()), case)
    if held.status in FAILED:
        reason = (
            f"a mistake of the driver, not of {backend.project}: with a backend that is right behind the same driver "
            f"the case fails as well: {held.reason}"
        )
        return replace(row, status=Outcome.ERROR, reason=reason)
    told = [] if row.reason.startswith(LATENT) else _causes(subject, case)
    shown = f". Cause: {'; and '.join(told)}" if told else ""
    return replace(
        row, reason=f"{row.reason}{shown}. The case passes with a backend that is right behind the same driver"
    )


def _run(subject: Subject, case: Case) -> Row:
    """A case; one about slots fails, too, where those that no layer here writes by are wrong."""
    row = run_case(subject, case)
    if row.status is not Outcome.PASS or case.check != OWNED_SLOTS:
        return row
    told = latent(subject, case)
    return replace(row, status=Outcome.FAIL, reason=told) if told else row


def _causes(subject: Subject, case: Case) -> list[str]:
    """The causes, as far as its batch can be run by itself; where that is right, those of the step planned before."""
    lens = tuple(max(length, 1) for length in case.lens)
    before = [replace(case, kind=case.after, lens=lens, widths=(), after="")] if case.after else []
    if case.path == "graph" and len(case.lens) > case.bs:  # its graph refuses it, and it has run eagerly
        case = replace(case, path="eager", captured_lens=(), bs=0)
    try:
        return next(filter(None, (causes(subject, each) for each in (case, *before))), [])
    except Exception as error:  # the other project may raise anything, and has failed already
        return [f"none was found, because running its batch again raised {type(error).__name__}: {error}"]
