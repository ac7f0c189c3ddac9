"""Bugs of planners, inputs, store and kernels, each of which the fuzzer must find within `MOST_BATCHES` batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from torch import Tensor

from attn_backends import cache
from attn_backends.backends import fa3, flashinfer_mla, reference, trtllm_mla
from attn_backends.kernels import plan_operators
from attn_backends.planning import metadata, planners
from spec_metadata import Step, StepKind, TreePart, static_inputs, visibility
from spec_metadata.plans import block_table, compressed, csr, ragged, slots
from spec_metadata.visibility import DensePart
from tests.fuzz.run import Spec, run

MOST_BATCHES = 10_000
Plant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Plant, tuple[str, str, str]]] = {}


def mutant(backend: str, path: str = "replay", planner: str = "torch") -> Callable[[Plant], Plant]:
    """Register a plant with the backend, planner and path in which it is looked for."""

    def register(plant: Plant) -> Plant:
        MUTANTS[plant.__name__] = plant, (backend, planner, path)
        return plant

    return register


def batches_until_found(cell: tuple[str, str, str]) -> int | None:
    """How many batches are planned until a mismatch; None if none is found in as many as there may be."""
    planned = 0
    for number in count():
        tally = run(Spec(0, number, *cell))
        planned += tally.planned.total()
        if tally.mismatches:
            return planned
        if planned > MOST_BATCHES:
            return None
    raise AssertionError


def wrap(patch: pytest.MonkeyPatch, place: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by one that is given it, and its arguments."""
    right = getattr(place, name)
    patch.setattr(place, name, lambda *args, **options: around(right, *args, **options))


@mutant("flashinfer_mla")
def pages_lie_one_further(patch: pytest.MonkeyPatch) -> None:
    """Planner: a list of pages starts behind its first entry."""

    def further(right: Callable[..., None], step: Step, dense: DensePart, table: Tensor) -> None:
        right(step, dense, table)
        table.copy_(table.roll(1, 1))

    wrap(patch, csr, "write_pages", further)


@mutant("trtllm_mla")
def padding_is_anything(patch: pytest.MonkeyPatch) -> None:
    """Planner: behind the visible pages of a block table is what the engine's has there."""

    def anything(right: Callable[..., None], step: Step, dense: DensePart, table: Tensor) -> None:
        table.copy_(step.paging.pages(table.shape[1]))

    wrap(patch, block_table, "write_pages", anything)


@mutant("fa3")
def a_draft_sees_one_key_too_few(patch: pytest.MonkeyPatch) -> None:
    """Planner: a drafted token does not see itself."""

    def added(right: Any, step: Step, forward: int | None) -> int:
        return right(step, forward) - (step.kind is StepKind.DRAFT_DECODE and not step.is_tree)

    wrap(patch, visibility, "num_added", added)


@mutant("reference", "eager")
def rows_see_those_behind_them(patch: pytest.MonkeyPatch) -> None:
    """Planner: no row is hidden from another one of its request."""
    wrap(patch, slots, "dense_part", lambda right, *args: DensePart(right(*args).kv_lens, causal=False))


@mutant("trtllm_mla", "eager")
def a_draft_writes_in_step_order(patch: pytest.MonkeyPatch) -> None:
    """Planner: the flat slots of a draft are read as (batch, step, topk)."""

    def wrong(right: Any, step: Step, forward: int = 0) -> Tensor:
        if step.kind is not StepKind.DRAFT_DECODE:
            return right(step, forward)
        return step.flat_slots().long().reshape(step.bs, step.num_steps, step.width)[:, forward].reshape(-1)

    wrap(patch, planners, "write_slots", wrong)


@mutant("fa3")
def a_tree_is_upside_down(patch: pytest.MonkeyPatch) -> None:
    """Planner: a node sees its children."""

    def wrong(right: Any, *args: Any) -> TreePart | None:
        tree = right(*args)
        return tree and TreePart(tree.slots, tree.mask.mT if tree.mask.shape[1] == tree.mask.shape[2] else tree.mask)

    wrap(patch, metadata, "tree_part", wrong)


@mutant("dsv4")
def states_lie_in_a_smaller_ring(patch: pytest.MonkeyPatch) -> None:
    """Planner: a row takes the place of one that an entry is still made of."""

    def wrong(right: Any, step: Any, buffers: Any, window: int, rings: Any) -> None:
        right(step, buffers, window, {each: ring - 1 for each, ring in rings.items()})

    wrap(patch, compressed, "write_compressed", wrong)


@mutant("fa3", "eager", "fused")
def a_fused_draft_stands_still(patch: pytest.MonkeyPatch) -> None:
    """Planner, fused: every forward of a draft sees as much as the first."""
    wrap(patch, plan_operators, "_keys", lambda right, step: (right(step)[0], 0))


@mutant("flashinfer_mla")
def padding_is_the_step_befores(patch: pytest.MonkeyPatch) -> None:
    """Inputs: the number of real requests is that of the step before."""

    def wrong(right: Any, static: Step, step: Step) -> None:
        before = static.num_real.clone()
        right(static, step)
        static.num_real.copy_(before)

    wrap(patch, planners, "copy_step", wrong)


@mutant("flashinfer_mla", "eager")
def rows_are_stored_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Store: the first row goes to the last slot."""
    wrap(patch, cache, "store_rows", lambda right, pages, rows, slots, scale: right(pages, rows, slots.flip(0), scale))


@mutant("trtllm_mla")
def two_pages_are_read(patch: pytest.MonkeyPatch) -> None:
    """Kernel: keys behind the second page are not seen."""

    def wrong(right: Any, q: Any, k: Any, v: Any, table: Any, lens: Any, **options: Any) -> Any:
        return right(q, k, v, table, lens.clamp(max=2 * k.shape[1]), **options)

    wrap(patch, trtllm_mla, "block_table_attention", wrong)


@mutant("fa3")
def requests_past_the_fourth_are_zero(patch: pytest.MonkeyPatch) -> None:
    """Kernel: a grid is four requests long."""

    def wrong(right: Any, q: Any, k: Any, v: Any, starts: Any, *args: Any, **options: Any) -> Any:
        out, lse = right(q, k, v, starts, *args, **options)
        out[int(starts[min(4, len(starts) - 1)]) :] = 0
        return out, lse

    wrap(patch, fa3, "page_table_attention", wrong)


@mutant("reference")
def heads_past_the_fourth_are_zero(patch: pytest.MonkeyPatch) -> None:
    """Kernel: a block has four heads."""

    def wrong(right: Any, *args: Any) -> Any:
        out, lse = right(*args)
        out[:, 4:] = 0
        return out, lse

    wrap(patch, reference, "slot_attention", wrong)


@mutant("flashinfer_mla", "eager")
def elements_past_the_32nd_are_zero(patch: pytest.MonkeyPatch) -> None:
    """Kernel: a row is as long as a warp."""

    def wrong(right: Any, *args: Any, **options: Any) -> Any:
        out, lse = right(*args, **options)
        out[..., 32:] = 0
        return out, lse

    wrap(patch, flashinfer_mla, "csr_attention", wrong)


@mutant("fa3")
def blocks_are_causal(patch: pytest.MonkeyPatch) -> None:
    """Planner: rows of a draft block see those before them alone."""
    patch.setattr(ragged, "is_causal", lambda step: not step.is_tree)


@mutant("reference", "eager")
def ragged_rows_are_as_many_as_may_be(patch: pytest.MonkeyPatch) -> None:
    """Inputs: a request of a ragged step has the rows that the bound on one allows."""

    def wrong(right: Any, query: Any, real: Tensor) -> Tensor:
        return right(replace(query, widths=query.widths * 0 + query.width), real)

    wrap(patch, static_inputs, "fit_widths", wrong)
