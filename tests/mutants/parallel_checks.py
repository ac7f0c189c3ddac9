"""The check of P-EAGLE, in the form of the catalogue's: the law of `tests/parallel_laws.py`."""

from __future__ import annotations

from attn_backends.conformance import Case, Check, Measured, Subject
from spec_metadata import StepKind

DRAFTS = "parallel.drafts"


def run(subject: Subject, case: Case) -> Measured:
    """Run the law."""
    from tests import parallel_laws  # needs the models' packages

    parallel_laws.check_drafts("speculators P-EAGLE")
    return Measured()


PARALLEL_CHECKS = {DRAFTS: Check(DRAFTS, "check_drafts", run, lambda subject: [Case(DRAFTS, StepKind.DRAFT_EXTEND)])}
