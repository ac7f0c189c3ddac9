"""Profiles: parts of the suite with names, so that partial conformance is a sentence: "passes chain-graph and tree".

A kernel passes a profile if all cases of it ran, none failed, and each step kind that the profile is about passed one:
what is refused is right, but no capability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attn_backends.compressed_cache import CompressedFormat
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import group_of
from attn_backends.conformance.outcomes import Outcome, Row
from attn_backends.contract import CONTRACT
from spec_metadata import StepKind

DRAFTED = (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)
CHAINED = (StepKind.DECODE, *DRAFTED, StepKind.DRAFT_EXTEND)
EXTRAS = ("window", "sinks")


@dataclass(frozen=True)
class Profile:
    """A part of the suite. about: a description. holds: whether a case belongs to it. kinds: step kinds that must each
    have passed a case.
    """

    name: str
    about: str
    holds: Callable[[Case], bool]
    kinds: tuple[StepKind, ...]


def _is_plain(case: Case) -> bool:
    """Neither a larger world, nor a layer or cache beyond the plain ones."""
    return group_of(case.check) != "scale" and not _has_extras(case) and not case.cache_dtype


def _has_extras(case: Case) -> bool:
    """Whether its layer has what it asks for, and is not to be refused for it."""
    return group_of(case.check) != "refusals" and any(extra in case.feature for extra in EXTRAS)


def _is_uniform(case: Case) -> bool:
    return not case.widths and case.kind != StepKind.PREFILL


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "chain",
            "decodes, drafts, verifies and draft extends of chains, eagerly",
            lambda case: _is_plain(case) and _is_uniform(case) and case.path == "eager" and case.topk == 1,
            CHAINED,
        ),
        Profile(
            "chain-graph",
            "the same through graphs",
            lambda case: _is_plain(case) and _is_uniform(case) and case.path == "graph" and case.topk == 1,
            CHAINED,
        ),
        Profile(
            "tree",
            "drafts and verifies of trees, eagerly and through graphs",
            lambda case: _is_plain(case) and case.topk > 1,
            DRAFTED,
        ),
        Profile(
            "packed",
            "prompts and draft extends whose requests have differing numbers of rows, eagerly, extends through graphs",
            lambda case: _is_plain(case) and not _is_uniform(case) and not _is_prefill_graph(case),
            (StepKind.PREFILL, StepKind.DRAFT_EXTEND),
        ),
        Profile(
            "prefill-graph",
            "prompts through graphs",
            lambda case: _is_plain(case) and _is_prefill_graph(case),
            (StepKind.PREFILL,),
        ),
        Profile(
            "compressed",
            "compressed keys: windows, selected entries and all entries",
            lambda case: case.format == CompressedFormat.COMPRESSED,
            (StepKind.PREFILL, *CHAINED),
        ),
        Profile(
            "sinks-window",
            "layers with sliding windows and attention sinks",
            _has_extras,
            CHAINED,
        ),
        Profile("fp8", "caches of 8-bit floats", lambda case: bool(case.cache_dtype), CHAINED),
        Profile(
            "scale",
            "larger worlds: long contexts, many requests, wide chains and trees, many heads",
            lambda case: group_of(case.check) == "scale",
            CHAINED,
        ),
        Profile(
            "streams",
            "planning and inputs on a second stream, in the order that events give",
            lambda case: group_of(case.check) == "streams",
            CHAINED,
        ),
    )
}


def _is_prefill_graph(case: Case) -> bool:
    return case.kind == StepKind.PREFILL and case.path == "graph"


def totals(cases: Iterable[Case | None]) -> dict[str, int]:
    """The number of cases that each profile holds, without those drawn at random."""
    known = {case for case in cases if case is not None and not case.drawn}
    return {name: sum(map(profile.holds, known)) for name, profile in PROFILES.items()}


def lacking(rows: Iterable[Row], profile_cases: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The number of cases that each `backend/kernel` lacks of each profile: those in no row. A profile that lacks none
    is left out. profile_cases: how many cases there are.
    """
    by_kernel = _by_kernel(rows)
    ran = {kernel: totals(row.case for row in by_kernel.get(kernel, ())) for kernel in profile_cases}
    found = {
        kernel: {name: total - ran[kernel][name] for name, total in known.items() if total != ran[kernel][name]}
        for kernel, known in profile_cases.items()
    }
    return {kernel: names for kernel, names in found.items() if names}


def passed(
    rows: Iterable[Row], profile_cases: Mapping[str, Mapping[str, int]], names: Iterable[str] = PROFILES
) -> dict[str, list[str]]:
    """The profiles of those named that each `backend/kernel` passes; without kernels that lack cases of every one.

    profile_cases: how many cases of each profile each kernel has. Another project's backend (`project:name`) passes
    none, because some checks are not run on it.
    """
    rows = list(rows)
    missing, asked, found = lacking(rows, profile_cases), list(names), dict[str, list[str]]()
    for kernel, of_kernel in _by_kernel(rows).items():
        known = profile_cases.get(kernel, {})
        whole = [name for name in asked if known.get(name) and name not in missing.get(kernel, {})]
        if whole:
            found[kernel] = [name for name in whole if _passes(PROFILES[name], of_kernel)]
    return found


def _by_kernel(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of a case of each `backend/kernel` of this project."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.case is not None and ":" not in row.backend:
            found.setdefault(f"{row.backend}/{row.kernel}", []).append(row)
    return found


def _passes(profile: Profile, rows: Sequence[Row]) -> bool:
    held = [(row.case, row.status) for row in rows if row.case is not None and profile.holds(row.case)]
    good = all(status in (Outcome.PASS, Outcome.REFUSED) for _, status in held)
    return good and {case.kind for case, status in held if status is Outcome.PASS} >= set(profile.kinds)


def told(names: Sequence[str]) -> str:
    """A sentence that names what a kernel passes."""
    *most, last = names or ("no profile",)
    return f"passes {' and '.join(filter(None, [', '.join(most), last]))} of contract {CONTRACT}"
