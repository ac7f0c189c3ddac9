"""Uninitialised memory: an allocation, a plan or a workspace may hold any value."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.checks_math import prompts
from attn_backends.conformance.comparisons import compare_memory, compare_outputs
from attn_backends.conformance.exercise import Captured, batch_of, run_case, scene_of, setup_of, world_of
from attn_backends.conformance.situations import Cases, any_graph, eager, growing, joined, one_page_size, shrinking
from attn_backends.contract.kernel import LayerShape, Schedule
from attn_backends.selection.choose import Choice
from spec_metadata import StepKind


@contextmanager
def allocations_hold_nan() -> Iterator[None]:
    """A context in which memory that is allocated and not written holds NaN, or the largest integer, by torch's
    deterministic mode.
    """
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            settings.fill_uninitialized_memory = True
            torch.use_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch.use_deterministic_algorithms(mode, warn_only=warns)
            settings.fill_uninitialized_memory = fills


def _prompts(subject: Subject) -> list[Case]:
    return [case for case in prompts(subject) if case.path == "eager"]


@check("poison.unwritten", one_page_size(joined(eager(), _prompts, any_graph(growing))))
def unwritten(subject: Subject, case: Case) -> Measured:
    """NaN and the largest integers in whatever is allocated reach no output: eager buffers, results, what kernels use
    meanwhile, and what a capture allocates.
    """
    with allocations_hold_nan():
        ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


def _planned(cases: Cases) -> Cases:
    """The cases of a kernel whose vendor plans into workspaces, or uses scratch memory."""
    return lambda subject: cases(subject) if subject.chosen.schedule is not None else []


def _nobodys(dtype: torch.dtype) -> float | int:
    """What indexes nothing: NaN, or the largest integer, of bytes the one that makes large ones."""
    return float("nan") if dtype.is_floating_point else 0x7F if dtype.itemsize == 1 else torch.iinfo(dtype).max


@check("poison.workspaces", _planned(one_page_size(joined(any_graph(growing), any_graph(shrinking)))))
def workspaces(subject: Subject, case: Case) -> Measured:
    """A replay plans all that its launch reads of a vendor's workspaces, and a launch writes what it reads of scratch
    memory: before it they may hold NaN and numbers that index nothing.
    """
    world = world_of(setup_of(subject, case))
    given: list[Mapping[str, Tensor]] = []

    def noted(plan: Any, shape: LayerShape, buffers: Mapping[str, Tensor]) -> Schedule:
        given.append(buffers)
        assert subject.chosen.schedule is not None
        return subject.chosen.schedule(plan, shape, buffers)

    kind = StepKind(case.kind)
    world.backend.choices[kind] = Choice(replace(subject.chosen, schedule=noted))
    captured = Captured(world, case)
    kept = {spec.name for spec in subject.chosen.scratch if not spec.dtype.is_floating_point}  # the vendor's own
    for tensor in (t for buffers in given for name, t in buffers.items() if name not in kept):
        tensor.fill_(_nobodys(tensor.dtype))
    ran = captured.run(scene_of(world, batch_of(case), case.seed + 1), case)
    compare_memory(ran.scene, ran.before, padded=True)
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)
