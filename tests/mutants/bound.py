"""Mutants of inputs that a graph reads from an engine's own buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from spec_metadata import BoundStep, Paging, bound_inputs
from tests.mutants.mutant import mutant


@mutant("vLLM's seq_lens, which count the step's rows", "graph.bound_inputs", backend="trtllm_mla")
def bound_lengths_are_committed_whatever_they_count(patch: pytest.MonkeyPatch) -> None:
    """Lengths that include the step's rows are taken for committed ones."""
    read = BoundStep.read

    def reading(bound: BoundStep) -> None:
        static, inputs = bound.static, bound.inputs
        lens = inputs.seq_lens + (inputs.seq_lens > 0) * (static.width if inputs.lens_include_rows else 0)
        read(replace(bound, inputs=replace(inputs, seq_lens=lens)))

    patch.setattr(BoundStep, "read", reading)


@mutant("vLLM's slot mapping, -1 after the real rows", "graph.bound_inputs", backend="flashinfer_mla")
def bound_slots_are_taken_as_they_come(patch: pytest.MonkeyPatch) -> None:
    """Slots of padding are those that the engine left there, as far as the pool has them."""
    patch.setattr(bound_inputs, "_write_slots", lambda static, inputs, geometry: inputs.out_cache_loc.clamp(min=64))


@mutant("SGLang #21987: planned from the capture's values", "graph.bound_inputs", "graph.bound_ragged", graph=True)
def buffers_are_read_at_capture_alone(patch: pytest.MonkeyPatch) -> None:
    """A replay plans from what the engine's buffers held at the capture."""
    known: set[BoundStep] = set()
    read = BoundStep.read

    def read_once(bound: BoundStep) -> None:
        if bound not in known:
            known.add(bound)
            read(bound)

    patch.setattr(BoundStep, "read", read_once)


@mutant("values that are clamped without a word", "refusals.bound_values")
def bound_values_are_never_refused(patch: pytest.MonkeyPatch) -> None:
    """Checking mode takes what the device brought within bounds."""
    patch.setattr(BoundStep, "check", lambda self: None)


@mutant("a random change of one token", "graph.bound_inputs", graph=True)
def no_request_is_one(patch: pytest.MonkeyPatch) -> None:
    """An engine that has no request is taken to have one."""
    own = bound_inputs._num_real
    patch.setattr(bound_inputs, "_num_real", lambda inputs, paging: own(inputs, paging).clamp_min(1))


@mutant("a random change of one token", "graph.bound_inputs", backend="trtllm_mla", graph=True)
def pages_past_the_pool_are_read(patch: pytest.MonkeyPatch) -> None:
    """The page after the last of the pool is taken for one of it."""
    own = bound_inputs._read_paging

    def read(into: Paging, given: Paging, real: Tensor) -> None:
        own(into, replace(given, geometry=replace(given.geometry, num_pages=given.geometry.num_pages + 1)), real)

    patch.setattr(bound_inputs, "_read_paging", read)
