"""Checks of serving, in the form of the catalogue's: the laws of `tests/serving_laws.py`."""

from __future__ import annotations

from attn_backends.conformance import Case, Check, Measured, Subject
from spec_metadata import StepKind

# A law, and what it is run with.
LAWS: dict[str, tuple[str, tuple[tuple, ...]]] = {
    "serving.random": ("check_random", ((0,), (1,))),
    "serving.ends": ("check_ends", ((0,), (1,))),
    "serving.cancel": ("check_cancel", ((),)),
    "serving.queue": ("check_queue", ((None,), (4,))),
    "serving.lag": ("check_lag", ((0,), (1,))),
    "serving.lag_context": ("check_lag_at_the_end_of_the_context", ((),)),
    "serving.buckets": ("check_buckets", ((),)),
    "serving.sharing": ("check_sharing", ((),)),
    "serving.sharing_together": ("check_sharing_together", ((),)),
    "serving.rounds": ("check_rounds", ((),)),
    "serving.stream": ("check_stream", ((),)),
    "serving.text": ("check_text", ((),)),
    "serving.statistics": ("check_statistics", ((),)),
    "serving.phase_backends": ("check_phase_backends", ((),)),
    "serving.refusals": ("check_refusals", ((),)),
}


def run(subject: Subject, case: Case) -> Measured:
    """Run a law with each of its arguments."""
    from tests import serving_laws  # needs the models' packages

    name, variants = LAWS[case.check]
    for arguments in variants:
        getattr(serving_laws, name)(*arguments)
    return Measured()


SERVING_CHECKS = {
    id: Check(id, name, run, lambda subject, id=id: [Case(id, StepKind.TARGET_VERIFY)])
    for id, (name, _) in LAWS.items()
}
