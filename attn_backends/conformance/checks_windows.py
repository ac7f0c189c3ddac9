"""Sliding windows and attention sinks, alone and together, over every kind of step that a kernel declares them for.

Memory before every window holds the case's poison: an engine frees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from attn_backends.cache import CacheFormat
from attn_backends.conformance.cases import CACHE_DTYPES, Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.checks_math import measure_extra, packed_extend, prompts
from attn_backends.conformance.checks_scale import large
from attn_backends.conformance.situations import (
    PACKED_KINDS,
    RAGGED_KINDS,
    Cases,
    eager,
    graph,
    joined,
    long_contexts,
    main_dtype,
    one_page_size,
    ragged_steps,
)
from spec_metadata import StepKind
from spec_metadata.capacity import UNIFORM_KINDS

WINDOWS = (1, 5, 16, 17, 1000)  # within a page, a page, a key more, and beyond any context
LONG_WINDOWS = (2, 40, 64, 130)  # of blocks of 16 and of 64 keys: in one, at an edge, over several

TILES = ((0, 128), (1, 4096))  # windows of a tile and of many


def _every_kind(subject: Subject) -> list[Case]:
    """Chains, trees, prompts, packed extends and ragged steps at one page size, eagerly and through graphs, in the
    finest type.
    """
    found = one_page_size(joined(eager(), graph(), prompts, packed_extend, ragged_steps(*RAGGED_KINDS)))(subject)
    return [case for case in found if case.dtype == main_dtype(subject, StepKind(case.kind))]


def _long(subject: Subject) -> list[Case]:
    """Nine requests, some of several blocks of keys, of every kind; in bfloat16 too, where blocks are larger."""
    kinds = joined(
        *(large(kind, packed=False) for kind in UNIFORM_KINDS), *(large(kind, packed=True) for kind in PACKED_KINDS)
    )
    found = [case for case in kinds(subject) if case.size == "wide"]
    return found + [replace(case, dtype="bfloat16") for case in found if case.dtype == "float32"]


def _takes(subject: Subject, case: Case, *extras: str) -> bool:
    """Whether extras are declared for a case's kind, and over its tree."""
    declared = subject.capabilities[StepKind(case.kind)]
    over_trees = ["tree_window"] if "window" in extras and case.topk > 1 else []
    if case.layer or ("sinks" in extras and case.format != CacheFormat.KV):
        return False
    return all(getattr(declared, extra) for extra in [*extras, *over_trees])


def _with(subject: Subject, cases: Cases, extras: tuple[str, ...], features: Iterable[str]) -> list[Case]:
    able = [case for case in cases(subject) if _takes(subject, case, *extras)]
    return [replace(case, feature=feature) for feature in features for case in able]


def _windows(subject: Subject) -> list[Case]:
    small = _with(subject, _every_kind, ("window",), [f"window={window}" for window in WINDOWS])
    blocks = _with(subject, _long, ("window",), [f"window={window}" for window in LONG_WINDOWS])
    tiles = (_with(subject, long_contexts(turn), ("window",), [f"window={window}"]) for turn, window in TILES)
    return [*small, *blocks, *chain.from_iterable(tiles)]


def _sinks(subject: Subject) -> list[Case]:
    return _with(subject, joined(_every_kind, _long, long_contexts(1)), ("sinks",), ["sinks"])


def _both(subject: Subject) -> list[Case]:
    """Over a cache of the query's own type, and over 8-bit ones with their scales."""
    extras = ("window", "sinks")
    cases = _with(subject, joined(_every_kind, _long), extras, ["window=5+sinks"])
    cases += _with(subject, long_contexts(0), extras, ["window=128+sinks"])
    scaled = _with(subject, _every_kind, (*extras, "kv_scales"), ["window=5+sinks+kv_scales"])
    scaled += _with(subject, long_contexts(1), (*extras, "kv_scales"), ["window=128+sinks+kv_scales"])
    rounded = [
        replace(case, cache_dtype=name)
        for case in _with(subject, _every_kind, extras, ["window=5+sinks"])
        for name, dtype in CACHE_DTYPES.items()
        if dtype in subject.capabilities[StepKind(case.kind)].cache_dtypes
    ]
    return cases + scaled + rounded


@check("math.window", _windows)
def window(subject: Subject, case: Case) -> Measured:
    """A row sees the last keys of a sliding window, itself included, counted by its depth in a tree."""
    return measure_extra(subject, case)


@check("math.sinks", _sinks)
def sinks(subject: Subject, case: Case) -> Measured:
    """Attention sinks take their share of the softmax, once, and leave the log-sum-exp, where declared."""
    return measure_extra(subject, case)


@check("math.window_and_sinks", _both)
def window_and_sinks(subject: Subject, case: Case) -> Measured:
    """A sliding window and attention sinks in one layer, over scaled and 8-bit caches too."""
    return measure_extra(subject, case)
