"""Checks of multi-layer MTP, in the form of the catalogue's: the laws of `tests/mtp_laws.py`."""

from __future__ import annotations

from attn_backends.conformance import Case, Check, Measured, Subject
from spec_metadata import StepKind

LAWS = {
    "mtp.random": "check_random",
    "mtp.short_prompts": "check_short_prompts",
    "mtp.chunks": "check_chunks",
    "mtp.batches": "check_batches",
    "mtp.room": "check_room",
    "mtp.paths": "check_paths",
    "mtp.sharing": "check_sharing",
    "mtp.failures": "check_failures",
    "mtp.refusals": "check_refusals",
}
GRAPHS = {"mtp.batches", "mtp.paths"}
"""Those that replay graphs, on the device that they are asked for; the others run on a CPU."""


def run(subject: Subject, case: Case) -> Measured:
    """Run a law."""
    from tests import mtp_laws  # needs the models' packages

    device = {"device": str(subject.device)} if case.path == "graph" else {}
    getattr(mtp_laws, LAWS[case.check])(**device)
    return Measured()


MTP_CHECKS = {
    id: Check(
        id,
        name,
        run,
        lambda subject, id=id: [Case(id, StepKind.DRAFT_EXTEND, "graph" if id in GRAPHS else "eager")],
    )
    for id, name in LAWS.items()
}
