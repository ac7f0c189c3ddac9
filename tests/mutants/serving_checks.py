"""Checks of serving, in the form of the catalogue's: the laws of `serving_laws`, `request_laws` and `ragged_laws`."""

from __future__ import annotations

from importlib import import_module

from attn_backends.conformance import Case, Check, Measured, Subject
from spec_metadata import StepKind

# A law, and what it is run with.
LAWS: dict[str, tuple[str, tuple[tuple, ...]]] = {
    "serving.random": ("serving_laws.check_random", ((0,), (1,))),
    "serving.ends": ("request_laws.check_ends", ((0,), (1,))),
    "serving.cancel": ("request_laws.check_cancel", ((),)),
    "serving.queue": ("serving_laws.check_queue", ((None,), (4,))),
    "serving.lag": ("serving_laws.check_lag", ((0,), (1,))),
    "serving.lag_context": ("serving_laws.check_lag_at_the_end_of_the_context", ((),)),
    "serving.buckets": ("serving_laws.check_buckets", ((),)),
    "serving.sharing": ("serving_laws.check_sharing", ((),)),
    "serving.sharing_together": ("serving_laws.check_sharing_together", ((),)),
    "serving.rounds": ("serving_laws.check_rounds", ((),)),
    "serving.stream": ("request_laws.check_stream", ((),)),
    "serving.text": ("request_laws.check_text", ((),)),
    "serving.statistics": ("request_laws.check_statistics", ((),)),
    "serving.phase_backends": ("serving_laws.check_phase_backends", ((),)),
    "serving.ragged_drafts": ("ragged_laws.check_drafts", ((),)),
    "serving.refusals": ("request_laws.check_refusals", ((),)),
}


def run(subject: Subject, case: Case) -> Measured:
    """Run a law with each of its arguments."""
    law, variants = LAWS[case.check]
    module, name = law.split(".")
    for arguments in variants:
        getattr(import_module(f"tests.{module}"), name)(*arguments)  # needs the models' packages
    return Measured()


SERVING_CHECKS = {
    id: Check(id, name, run, lambda subject, id=id: [Case(id, StepKind.TARGET_VERIFY)])
    for id, (name, _) in LAWS.items()
}
