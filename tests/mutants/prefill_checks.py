"""Checks of captured prefill, in the form of the catalogue's: the laws of `tests/prefill_laws.py`."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance import Case, Check, Measured, Subject
from spec_metadata import StepKind

LAWS = {
    "prefill.paths": "check_paths",
    "prefill.exact": "check_exact",
    "prefill.full": "check_full",
    "prefill.full_exact": "check_full_exact",
    "prefill.further_fields": "check_further_fields",
}


def run(subject: Subject, case: Case) -> Measured:
    """Run a law."""
    from tests import prefill_laws  # needs the models' packages

    place = replace(prefill_laws.PLACE, device=str(subject.device))
    getattr(prefill_laws, LAWS[case.check])(place=place)
    return Measured()


PREFILL_CHECKS = {
    id: Check(id, name, run, lambda subject, id=id: [Case(id, StepKind.PREFILL, "graph")]) for id, name in LAWS.items()
}
