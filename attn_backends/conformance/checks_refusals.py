"""Refusals: whatever a kernel does not declare is fed in, and must be refused with reasons and nothing written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attn_backends.cache import CacheFormat
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical
from attn_backends.conformance.exercise import batch_of, bucket_of, prepare_memory, scene_of, setup_of, world_of
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import (
    PACKED_KINDS,
    PAGE_SIZES,
    RAGGED_KINDS,
    TREE_KINDS,
    TREE_TOPK,
    Cases,
    formats_of,
    is_declared,
    layers_of,
    main_dtype,
    page_sizes,
)
from attn_backends.conformance.situations import cache_dtype as cache_dtype_of
from attn_backends.conformance.worlds import with_extra
from attn_backends.contract.capabilities import DTYPES, Capabilities
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.torch_attention import SINK_TYPES
from attn_backends.layer import AttentionLayer
from spec_metadata import StepKind
from spec_metadata.capacity import UNIFORM_KINDS

OTHER_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def _asks(subject: Subject, kind: StepKind, **changes: Any) -> Case:
    """An eager case of a declared kind at its smallest page size."""
    widths = (2, 1) if kind is StepKind.PREFILL else ()
    format = formats_of(subject)[0]
    size, dtype = page_sizes(subject, kind)[0], main_dtype(subject, kind)
    case = Case("", kind, format=format, page_size=size, dtype=dtype, lens=(5, 3), widths=widths)
    case = replace(case, cache_dtype=cache_dtype_of(subject, kind), layer=layers_of(subject, format)[-1])
    return replace(case, **changes)


def _undeclared(ask: Callable[[Subject, StepKind, Capabilities], Iterator[Case]]) -> Cases:
    """The cases that each declared kind's capabilities leave undeclared."""
    return lambda subject: [
        case for kind, declared in subject.capabilities.items() for case in ask(subject, kind, declared)
    ]


def _of_layers(ask: Callable[[Subject, StepKind, Capabilities], Iterator[Case]]) -> Cases:
    """The same, where the step itself is declared and its layer or cache is not."""
    undeclared = _undeclared(ask)
    return lambda subject: [case for case in undeclared(subject) if is_declared(subject, case)]


def refused(what: str, scene: Scene, *calls: Callable[[], object]) -> Measured:
    """Every call must raise UnsupportedStepError and change no byte of the cache."""
    before, reasons = scene.world.memory.clone(), ""
    for call in calls:
        try:
            call()
        except UnsupportedStepError as refusal:
            reasons = "; ".join(refusal.reasons)
        except Exception as error:
            message = f"not declared, and not refused with UnsupportedStepError but {type(error).__name__}: {error}"
            raise CheckFailure(what, message) from error
        else:
            raise CheckFailure(what, "not declared, yet taken instead of refused")
        compare_identical("cache after a refusal", scene.world.memory, before)
    return Measured(refusal=reasons)


def _refused_step(subject: Subject, case: Case) -> Measured:
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    prepare_memory(scene, case)
    if case.path == "graph":
        bucket = bucket_of(world, case)
        return refused(case.feature, scene, lambda: world.backend.capture(bucket, world.paging()))
    return refused(case.feature, scene, lambda: world.backend.init_forward_metadata(scene.step()))


def _paths(case: Case) -> Iterator[Case]:
    yield case
    if StepKind(case.kind) in UNIFORM_KINDS and not case.widths:
        yield replace(case, path="graph", captured_lens=case.lens, bs=2)


@check(
    "refusals.page_size",
    _undeclared(
        lambda subject, kind, declared: (
            case
            for size in (*PAGE_SIZES, 32)
            if declared.page_sizes is not None and size not in declared.page_sizes
            for case in _paths(_asks(subject, kind, page_size=size, feature=f"page size {size}"))
        )
    ),
)
def page_size(subject: Subject, case: Case) -> Measured:
    """A page size that is not declared."""
    return _refused_step(subject, case)


def _differing(subject: Subject, kind: StepKind, declared: Capabilities) -> Iterator[Case]:
    is_extend, feature = kind is StepKind.DRAFT_EXTEND, "widths that the device alone knows"
    for widths in ((3, 1), (2, 2)):
        if is_extend and not declared.packed:
            yield _asks(subject, kind, widths=widths, feature="packed query lengths")
        if kind in RAGGED_KINDS and not declared.captures_packed:
            yield _asks(subject, kind, widths=widths, ragged=is_extend, feature=feature)


@check("refusals.packed", _undeclared(_differing))
def packed(subject: Subject, case: Case) -> Measured:
    """Packed accept lengths, even those that divide evenly, and widths that the device alone knows."""
    return _refused_step(subject, case)


@check(
    "refusals.tree",
    _undeclared(
        lambda subject, kind, declared: (
            case
            for case in _paths(_asks(subject, kind, topk=TREE_TOPK, feature="a draft tree"))
            if kind in TREE_KINDS and not declared.tree
        )
    ),
)
def tree(subject: Subject, case: Case) -> Measured:
    """A draft tree, where the kernel can't show all rows a prefix and return its log-sum-exp."""
    return _refused_step(subject, case)


@check(
    "refusals.draft_block",
    _undeclared(
        lambda subject, kind, declared: (
            case
            for case in _paths(_asks(subject, kind, feature="a draft block"))
            if kind is StepKind.DRAFT_BLOCK and not declared.non_causal
        )
    ),
)
def draft_block(subject: Subject, case: Case) -> Measured:
    """A draft block, where the kernel can't show a row those after it."""
    return _refused_step(subject, case)


@check(
    "refusals.width",
    _undeclared(
        lambda subject, kind, declared: (
            case
            for case in _paths(_asks(subject, kind, feature="more query rows"))
            if kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND) and declared.max_width in (1, 2, 3)
        )
    ),
)
def width(subject: Subject, case: Case) -> Measured:
    """More query rows per request than declared."""
    return _refused_step(subject, case)


def _missing_kinds(subject: Subject) -> list[Case]:
    declared = _asks(subject, next(iter(subject.capabilities)))
    cases: list[Case] = []
    for kind in (StepKind.PREFILL, *UNIFORM_KINDS):
        if kind not in subject.capabilities:
            widths = (2, 1) if kind is StepKind.PREFILL else ()
            cases += _paths(replace(declared, kind=kind, widths=widths, feature=f"a {kind} step"))
    return cases


@check("refusals.step_kind", _missing_kinds)
def step_kind(subject: Subject, case: Case) -> Measured:
    """A step kind that is not declared."""
    return _refused_step(subject, case)


@check(
    "refusals.graph",
    _undeclared(
        lambda subject, kind, declared: (
            _asks(subject, kind, path="graph", captured_lens=(5, 3), bs=2, feature="a graph")
            for _ in range(1)
            if kind in UNIFORM_KINDS and not declared.graph
        )
    ),
)
def graph(subject: Subject, case: Case) -> Measured:
    """Capturing a kind that can't be."""
    return _refused_step(subject, case)


@check(
    "refusals.packed_graph",
    _undeclared(
        lambda subject, kind, declared: (
            _asks(subject, kind, path="graph", widths=(2, 1), bs=2, num_tokens=8, feature="a graph of packed rows")
            for _ in range(1)
            if kind in PACKED_KINDS and not declared.captures_packed
        )
    ),
)
def packed_graph(subject: Subject, case: Case) -> Measured:
    """Capturing packed rows of a kind that can't be."""
    return _refused_step(subject, case)


def _planned(
    subject: Subject, case: Case
) -> tuple[Scene, Callable[[AttentionLayer], tuple[Callable[[], object], ...]]]:
    """A planned step, and what gives the calls of its first forward on a layer."""
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    prepare_memory(scene, case)
    meta, given = world.backend.init_forward_metadata(scene.step()), scene.inputs()[0]
    at = meta.at(0, given.ancestors)
    return scene, lambda layer: (lambda: world.store(given, at, layer), lambda: world.attend(given, at, layer))


def _layer_extras(subject: Subject, kind: StepKind, declared: Capabilities) -> Iterator[Case]:
    given = [feature for feature in ("window", "sinks", "kv_scales") if not getattr(declared, feature)]
    given += [f"sinks={name}" for name, dtype in DTYPES.items() if dtype in SINK_TYPES - declared.sink_types]
    yield from (_asks(subject, kind, feature=feature) for feature in given)
    if declared.most_sinks is not None:
        yield _asks(subject, kind, feature="sinks", size=f"heads{2 * declared.most_sinks}")


@check("refusals.layer_extras", _of_layers(_layer_extras))
def layer_extras(subject: Subject, case: Case) -> Measured:
    """A sliding window, attention sinks, of other types and of more heads too, or scaled keys and values."""
    scene, calls = _planned(subject, case)
    return refused(case.feature, scene, *calls(with_extra(scene.world.layer, case.feature, scene.world.setup)))


def _combined_extras(subject: Subject, kind: StepKind, declared: Capabilities) -> Iterator[Case]:
    if kind in TREE_KINDS and declared.window and not declared.tree_window:
        yield _asks(subject, kind, topk=TREE_TOPK, feature="window")
    if declared.sinks and CacheFormat.LATENT in formats_of(subject):
        yield _asks(subject, kind, format=CacheFormat.LATENT, feature="sinks")


@check("refusals.combined_extras", _of_layers(_combined_extras))
def combined_extras(subject: Subject, case: Case) -> Measured:
    """A sliding window over a draft tree where one is declared over chains alone, and sinks on latents."""
    return layer_extras(subject, case)


@check(
    "refusals.query_heads",
    _of_layers(
        lambda subject, kind, declared: (
            _asks(subject, kind, feature="more query heads") for _ in range(1) if declared.query_heads is not None
        )
    ),
)
def query_heads(subject: Subject, case: Case) -> Measured:
    """Other numbers of local query heads than declared."""
    scene, calls = _planned(subject, case)
    declared, layer = subject.capabilities[StepKind(case.kind)].query_heads, scene.world.layer
    assert declared is not None, "the kernel takes any number of query heads"
    heads = (max(declared) // layer.num_kv_heads + 1) * layer.num_kv_heads
    sinks = None if layer.sinks is None else layer.sinks.new_zeros(heads)
    return refused(case.feature, scene, *calls(replace(layer, num_heads=heads, sinks=sinks)))


@check(
    "refusals.head_sizes",
    _of_layers(
        lambda subject, kind, declared: (
            _asks(subject, kind, feature="other head sizes") for _ in range(1) if declared.head_sizes is not None
        )
    ),
)
def head_sizes(subject: Subject, case: Case) -> Measured:
    """Head sizes that are not declared."""
    scene, calls = _planned(subject, case)
    layer = scene.world.layer
    resized = lambda number: calls(replace(layer, head_dim=layer.head_dim + 1))[number]()  # noqa: E731
    return refused(case.feature, scene, lambda: resized(0), lambda: resized(1))


@check(
    "refusals.dtype",
    _of_layers(
        lambda subject, kind, declared: (
            _asks(subject, kind, feature=name) for name in OTHER_DTYPES if getattr(torch, name) not in declared.dtypes
        )
    ),
)
def dtype(subject: Subject, case: Case) -> Measured:
    """Queries and a cache of a type that is not declared."""
    other = getattr(torch, case.feature)
    return _refused_types(subject, case, queries=other, entries=other)


def _undeclared_caches(subject: Subject, kind: StepKind, declared: Capabilities) -> Iterator[Case]:
    for name in OTHER_DTYPES:
        case = _asks(subject, kind, feature=f"a cache of {name}", cache_dtype="")
        if name != case.dtype and getattr(torch, name) not in declared.cache_dtypes:
            yield case


@check("refusals.cache_dtype", _of_layers(_undeclared_caches))
def cache_dtype(subject: Subject, case: Case) -> Measured:
    """A cache of a type that is not declared, under queries of one that is."""
    entries = getattr(torch, case.feature.removeprefix("a cache of "))
    return _refused_types(subject, case, queries=DTYPES[case.dtype], entries=entries)


def _refused_types(subject: Subject, case: Case, queries: torch.dtype, entries: torch.dtype) -> Measured:
    """A planned step must refuse to store and attend with queries, rows to store and a cache of these types."""
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    prepare_memory(scene, case)
    meta, given = world.backend.init_forward_metadata(scene.step()), scene.inputs()[0]
    cache, at, given = world.cache_as(entries), meta.at(0, given.ancestors), given.as_type(queries)
    return refused(
        case.feature,
        scene,
        lambda: world.store(given, at, cache=cache),
        lambda: world.attend(given, at, cache=cache),
    )


@check(
    "refusals.cache_format",
    _of_layers(
        lambda subject, kind, declared: (
            _asks(subject, kind, format=format, feature=f"a cache of {format}")
            for format in CacheFormat
            if format not in formats_of(subject)
        )
    ),
)
def cache_format(subject: Subject, case: Case) -> Measured:
    """A cache of a format that is not declared."""
    scene, calls = _planned(subject, case)
    return refused(case.feature, scene, *calls(scene.world.layer))
