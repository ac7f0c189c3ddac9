"""The conformance suite: whether a backend is right for draft extend, multi-step draft, verify, capture and replay.

One catalogue of checks; `run_conformance`, `attn-backends conformance` and pytest are doors to it.
"""

from attn_backends.conformance import (
    checks_api,
    checks_bound,
    checks_cache,
    checks_compressed,
    checks_edges,
    checks_graph,
    checks_hosts,
    checks_kept,
    checks_laws,
    checks_layers,
    checks_lost_states,
    checks_math,
    checks_mixed,
    checks_numbers,
    checks_plan,
    checks_poison,
    checks_ragged,
    checks_refusals,
    checks_scale,
    checks_selected,
    checks_sets,
    checks_streams,
    checks_turns,
    checks_unwritten,
    checks_windows,
    checks_worker,
    worker_laws,
)
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CATALOGUE, Check, CheckFailure, Measured, Subject, check
from attn_backends.conformance.expectations import ExpectedFailure, known_failures
from attn_backends.conformance.outcomes import Outcome, Report, Row
from attn_backends.conformance.profiles import PROFILES, Profile
from attn_backends.conformance.runner import run_conformance
from attn_backends.conformance.running import run_case
from attn_backends.conformance.selection import Selection, selected_cases
from attn_backends.conformance.subjects import resolve_subjects

CHECK_MODULES = (
    checks_plan,
    checks_math,
    checks_ragged,
    checks_mixed,
    checks_numbers,
    checks_windows,
    checks_scale,
    checks_streams,
    checks_turns,
    checks_sets,
    checks_layers,
    checks_lost_states,
    checks_worker,
    checks_bound,
    checks_graph,
    checks_cache,
    checks_poison,
    checks_unwritten,
    checks_laws,
    checks_refusals,
    checks_hosts,
    checks_kept,
    checks_api,
    checks_compressed,
    checks_selected,
    checks_edges,
)

__all__ = [
    "CATALOGUE",
    "CHECK_MODULES",
    "PROFILES",
    "Case",
    "Check",
    "CheckFailure",
    "ExpectedFailure",
    "Measured",
    "Outcome",
    "Profile",
    "Report",
    "Row",
    "Selection",
    "Subject",
    "check",
    "known_failures",
    "resolve_subjects",
    "run_case",
    "run_conformance",
    "selected_cases",
    "worker_laws",
]
