"""Checks of multimodal prompts, in the form of the catalogue's: the laws of `tests/mm_laws.py`."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance import Case, Check, Measured, Subject
from spec_metadata import StepKind

LAWS = {
    "multimodal.graphs": "check_graphs",
    "multimodal.modules": "check_modules",
    "multimodal.sharing": "check_sharing",
}


def run(subject: Subject, case: Case) -> Measured:
    """Run a law."""
    from tests import mm_laws  # needs the models' packages

    getattr(mm_laws, LAWS[case.check])(replace(mm_laws.PLACE, device=str(subject.device)))
    return Measured()


MULTIMODAL_CHECKS = {
    id: Check(
        id,
        name,
        run,
        lambda subject, id=id: [Case(id, StepKind.PREFILL, "graph" if id == "multimodal.graphs" else "eager")],
    )
    for id, name in LAWS.items()
}
