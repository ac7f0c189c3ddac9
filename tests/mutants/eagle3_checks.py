"""Checks of EAGLE-3, in the form of the catalogue's: the laws of `tests/eagle3_laws.py`."""

from __future__ import annotations

from attn_backends.conformance import Case, Check, Measured, Subject
from spec_metadata import StepKind

LAWS = {
    "eagle3.chain": "check_chain",
    "eagle3.tree": "check_tree",
    "eagle3.graphs": "check_graphs",
    "eagle3.window": "check_window",
}


def run(subject: Subject, case: Case) -> Measured:
    """Run a law."""
    from tests import eagle3_laws  # needs the models' packages

    getattr(eagle3_laws, LAWS[case.check])(str(subject.device))
    return Measured()


EAGLE3_CHECKS = {
    id: Check(
        id,
        name,
        run,
        lambda subject, id=id: [Case(id, StepKind.DRAFT_EXTEND, "graph" if id == "eagle3.graphs" else "eager")],
    )
    for id, name in LAWS.items()
}
