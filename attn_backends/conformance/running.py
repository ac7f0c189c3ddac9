"""Runs one case, and says what came of it."""

from __future__ import annotations

import time
import traceback
from importlib.util import find_spec
from pathlib import Path

import torch

from attn_backends.config.toml_options import closest_to
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CATALOGUE, GROUPS, CheckFailure, Measured, Subject, group_of
from attn_backends.conformance.failures import lost_refusals
from attn_backends.conformance.outcomes import Outcome, Row
from attn_backends.errors import AttnBackendsError, ConfigError, PlanError
from spec_metadata import InvalidStepError

_TORCH = Path(torch.__file__).parent
_PACKAGES = filter(None, map(find_spec, ("attn_backends", "spec_metadata", "attn_backends_reference")))
_OURS = {Path(folder) for package in _PACKAGES for folder in package.submodule_search_locations or ()}


def run_case(subject: Subject, case: Case) -> Row:
    """Run one case; never raises for what a backend does."""
    if case.check not in CATALOGUE:
        told = closest_to(case.check, [*CATALOGUE]) or f". The groups are {', '.join(f'{each}.*' for each in GROUPS)}"
        raise ConfigError(f"no check has the id {case.check!r}{told}")
    start = time.perf_counter()
    measured, status, reason = Measured(), Outcome.PASS, ""
    try:
        measured = CATALOGUE[case.check].run(subject, case)
    except (CheckFailure, PlanError) as failure:
        status, reason = Outcome.FAIL, str(failure)
        if group_of(case.check) == "refusals":
            reason += lost_refusals(subject)
    except AssertionError as failure:
        status, reason = Outcome.FAIL, f"{str(failure) or 'an assertion failed'} ({place(failure)})"
    except (AttnBackendsError, InvalidStepError) as refusal:
        status, reason = Outcome.FAIL, f"declared, yet refused: {refusal}"
    except Exception as error:
        status, reason = Outcome.ERROR, f"{type(error).__name__}: {error} ({place(error)})"
    if measured.refusal:
        status, reason = Outcome.REFUSED, measured.refusal
    ms = round((time.perf_counter() - start) * 1e3, 1)
    return Row(
        subject.backend.name,
        subject.kernel,
        case.check,
        case,
        case.path,
        status,
        reason,
        measured.max_err,
        measured.budget,
        ms,
    )


def place(error: Exception) -> str:
    """The innermost place that raised an error outside of torch, and outside of this library if there is one."""
    frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [found for found in frames if _TORCH not in found[0].parents]
    path, frame = ([found for found in frames if not _OURS.intersection(found[0].parents)] or frames)[-1]
    return f"{path.name}:{frame.lineno} in {frame.name}"
