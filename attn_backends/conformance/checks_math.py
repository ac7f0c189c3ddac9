"""Every row's output and log-sum-exp against the float64 oracle, for each step kind, eagerly and through a graph."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.conformance.cases import CACHE_DTYPES, Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_memory, compare_outputs
from attn_backends.conformance.exercise import Captured, batch_of, run_case, run_eagerly, scene_of, setup_of, world_of
from attn_backends.conformance.situations import (
    Cases,
    around_pages,
    dtypes,
    eager,
    graph,
    in_every_dtype,
    joined,
    long_contexts,
    one_page_size,
    packed_graph,
    situations,
)
from attn_backends.conformance.worlds import World, with_extra
from spec_metadata import StepKind


def _of_kind(kind: StepKind) -> Cases:
    """A uniform kind: everywhere in the finest type, at one page size in the other types, and with bounded lengths."""
    kinds = (kind,)
    shortest = 1 if kind is StepKind.DRAFT_EXTEND else 0  # an extend has a row of what is committed
    bounded = one_page_size(eager(kinds, lens=(shortest, 5, 3), bounded=True))
    typed = in_every_dtype(one_page_size(joined(eager(kinds), graph(kinds=kinds))))
    return joined(eager(kinds), graph(kinds=kinds), bounded, typed)


def prompts(subject: Subject) -> list[Case]:
    """Prompts with and without a cached prefix."""
    cases = []
    for case in situations(subject, StepKind.PREFILL):
        edge, less, more, context = around_pages(case)
        cases.append(replace(case, lens=(0, 0), widths=(edge, 1)))
        cases.append(replace(case, lens=(less, 0, more, context), widths=(3, context, 1, 2)))
        cases.append(replace(case, lens=(less, 0, more), widths=(2, edge, 1), bounded=True))
        cases.append(replace(case, lens=(0, 1, 0), widths=(context, 1, 1), bounded=True))
    return cases + in_every_dtype(lambda _: cases[:1])(subject) + _captured_rows(StepKind.PREFILL)(subject)


def packed_extend(subject: Subject) -> list[Case]:
    """Every mix of accept lengths in one packed draft extend."""
    declared = subject.capabilities.get(StepKind.DRAFT_EXTEND)
    if declared is None or not declared.packed:
        return []
    cases = situations(subject, StepKind.DRAFT_EXTEND, topks=(1,))
    eagerly = [replace(case, widths=widths) for case in cases for widths in ((2, 4, 1, 3), (1, 1, 4, 1))]
    return eagerly + _captured_rows(StepKind.DRAFT_EXTEND)(subject)


def _captured_rows(kind: StepKind) -> Cases:
    """A packed kind through graphs, everywhere in the finest type and at one page size in the others."""

    def of_kind(subject: Subject) -> list[Case]:
        return [case for case in packed_graph()(subject) if case.kind == kind]

    return joined(of_kind, in_every_dtype(one_page_size(of_kind)))


def _measure(subject: Subject, case: Case) -> Measured:
    ran = run_case(subject, case)
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


@check("math.decode", _of_kind(StepKind.DECODE))
def decode(subject: Subject, case: Case) -> Measured:
    """A decode row sees its committed tokens and itself."""
    return _measure(subject, case)


@check("math.draft_decode", _of_kind(StepKind.DRAFT_DECODE))
def draft_decode(subject: Subject, case: Case) -> Measured:
    """Each row of draft forward i sees the committed tokens and the i + 1 drafted ones of its own branch."""
    return _measure(subject, case)


@check("math.draft_block", _of_kind(StepKind.DRAFT_BLOCK))
def draft_block(subject: Subject, case: Case) -> Measured:
    """Every row of a draft block sees the committed tokens and all rows of the block, those after it too."""
    return _measure(subject, case)


@check("math.target_verify", _of_kind(StepKind.TARGET_VERIFY))
def target_verify(subject: Subject, case: Case) -> Measured:
    """A row of a verify sees the committed tokens, its ancestors and itself."""
    return _measure(subject, case)


@check("math.draft_extend", _of_kind(StepKind.DRAFT_EXTEND))
def draft_extend(subject: Subject, case: Case) -> Measured:
    """Row j of a draft extend of uniform width sees the committed tokens and j + 1 more."""
    return _measure(subject, case)


@check("math.packed_draft_extend", packed_extend)
def packed_draft_extend(subject: Subject, case: Case) -> Measured:
    """A draft extend of differing accept lengths, packed, where the kernel declares it."""
    return _measure(subject, case)


def _scaled(subject: Subject) -> list[Case]:
    """Chains, trees, prompts and packed extends at one page size, where the kernel declares scales, and over long
    contexts.
    """
    found = joined(one_page_size(joined(eager(), graph(), prompts, packed_extend)), long_contexts(1))(subject)
    return [replace(case, feature="kv_scales") for case in found if subject.capabilities[StepKind(case.kind)].kv_scales]


def _cache_types(subject: Subject) -> list[Case]:
    """Chains, trees, prompts and packed extends at one page size, and over long contexts, eagerly in the finest type of
    queries, in graphs in bfloat16.
    """
    cases = []
    for case in joined(one_page_size(joined(eager(), graph(), prompts, packed_extend)), long_contexts(0))(subject):
        kind = StepKind(case.kind)
        declared, finest = subject.capabilities[kind], dtypes(subject, kind)[0]
        graphs = "bfloat16" if torch.bfloat16 in declared.dtypes else finest
        names = [name for name, dtype in CACHE_DTYPES.items() if dtype in declared.cache_dtypes]
        if case.dtype == finest:
            of_path = replace(case, dtype=graphs if case.path == "graph" else finest)
            cases += [replace(of_path, cache_dtype=name) for name in names]
    return cases


def extra_world_of(subject: Subject, case: Case) -> World:
    """The world of a case, whose layer has what it asks for."""
    world = world_of(setup_of(subject, case))
    if case.feature:
        world.layer = with_extra(world.layer, case.feature, world.setup)
    return world


def measure_extra(subject: Subject, case: Case) -> Measured:
    """Outputs and memory of a case whose layer has what it asks for."""
    world = extra_world_of(subject, case)
    if case.path == "graph":
        ran = Captured(world, case).run(scene_of(world, batch_of(case), case.seed + 1), case)
    else:
        ran = run_eagerly(scene_of(world, batch_of(case), case.seed), case)
    compare_memory(ran.scene, ran.before, padded=batch_of(case).is_ragged or case.path == "graph")  # it pads itself
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


@check("math.kv_scales", _scaled)
def kv_scales(subject: Subject, case: Case) -> Measured:
    """The cache holds keys and values divided by their scales, where the kernel declares it."""
    return measure_extra(subject, case)


@check("math.cache_types", _cache_types)
def cache_types(subject: Subject, case: Case) -> Measured:
    """A cache of 8-bit floats holds what divided by its scale is nearest, the largest clamped, and is read so."""
    ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


@check("math.prefill", prompts)
def prefill(subject: Subject, case: Case) -> Measured:
    """Prompt rows see what is cached and the prompt up to themselves."""
    return _measure(subject, case)
