"""Mutants of random changes of one token (`tests.random_tokens`) that no check killed when they were drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends import backend
from attn_backends.backends import dsv4
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels import torch_compressed
from attn_backends.memory.phases import BackendMemory, PhaseMemory
from attn_backends.planning import captured, metadata, planners
from spec_metadata import (
    AnyBucket,
    BoundedQuery,
    BoundInputs,
    CacheGeometry,
    Paging,
    RequestTable,
    Step,
    bound_inputs,
    fit_widths,
    mixed,
    static_inputs,
    token_positions,
)
from spec_metadata.plans import block_table, compressed, ragged
from spec_metadata.query import PaddedQuery
from spec_metadata.visibility import DensePart, KeptRows, kept_rows, write_pages
from tests.mutants.mutant import mutant

ORIGIN = "a random change of one token"


def _write_two_more(step: Step, dense: DensePart, table: Tensor) -> None:
    write_pages(step, replace(dense, kv_lens=dense.kv_lens + 2), table)


@mutant(ORIGIN, "poison.table_tail")
def pages_of_later_tokens(patch: pytest.MonkeyPatch) -> None:
    """A plan has the pages of two tokens more than the last forward sees, which a request may not own."""
    patch.setattr(ragged, "write_pages", _write_two_more)


@mutant(ORIGIN, "compressed.rollback", "compressed.draft_and_extend", backend="dsv4")
def whole_pages_of_states_refuse_rows(patch: pytest.MonkeyPatch) -> None:
    """A page that keeps the states of all its tokens is taken for a ring that a few more rows overwrite."""
    patch.setattr(compressed, "max_rows", lambda window, ring, page_size: ring - window + 2)


@mutant(ORIGIN, "compressed.refuses_cut_blocks", backend="dsv4")
def recommended_pages_cut_blocks(patch: pytest.MonkeyPatch) -> None:
    """A refusal recommends a page size that is no whole number of blocks."""

    def refusal(what: str, reasons: Sequence[str], nearest: str = "") -> UnsupportedStepError:
        return UnsupportedStepError(what, reasons, re.sub(r"page size \d+", "page size 9", nearest))

    patch.setattr(dsv4, "UnsupportedStepError", refusal)


@mutant(ORIGIN, "compressed.refuses_lost_states", backend="dsv4")
def one_row_more_than_states(patch: pytest.MonkeyPatch) -> None:
    """A verify of one row more is taken than a ring keeps states for."""
    max_rows = compressed.max_rows
    patch.setattr(compressed, "max_rows", lambda window, ring, page_size: max_rows(window, ring + 1, page_size))


@mutant(ORIGIN, "compressed.refuses_lost_states", backend="dsv4")
def one_forward_more_than_states(patch: pytest.MonkeyPatch) -> None:
    """A draft loop of one forward more is taken than a ring keeps states for."""
    most = compressed.max_draft_forwards
    patch.setattr(compressed, "max_draft_forwards", lambda window, ring, page_size: most(window, ring + 1, page_size))


@mutant(ORIGIN, "graph.bound_ragged", graph=True)
def padded_requests_have_a_row(patch: pytest.MonkeyPatch) -> None:
    """Requests of padding count as a row each, for which real ones that ask for all rows lose one."""

    def counted(query: BoundedQuery, real: Tensor) -> Tensor:
        return fit_widths(replace(query, widths=torch.where(real, query.widths, 1)), torch.ones_like(real))

    patch.setattr(bound_inputs, "fit_widths", counted)


@mutant(ORIGIN, "cache.keeps_first_rows")
def kept_rows_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    """All rows that the device counts are stored, also those beyond the host's bound."""

    def unbounded(step: Step, slots: Tensor, num_kept: Tensor, num_rows: int) -> KeptRows:
        return kept_rows(step, slots, num_kept, step.num_tokens)

    patch.setattr(metadata, "kept_rows", unbounded)


@mutant(ORIGIN, "graph.bound_inputs", graph=True)
def padded_rows_write_what_an_engine_left(patch: pytest.MonkeyPatch) -> None:
    """Of an engine's slots those after its real requests are written, too, as far as the pool has them."""
    own = bound_inputs._write_slots

    def of_all(static: Step, inputs: BoundInputs, geometry: CacheGeometry) -> Tensor:
        every = torch.full_like(static.num_real, static.bs)
        return own(replace(static, num_real=every), inputs, geometry)

    patch.setattr(bound_inputs, "_write_slots", of_all)


@mutant(ORIGIN, "math.ragged_cut")
def first_padded_request_is_real(patch: pytest.MonkeyPatch) -> None:
    """Of a step whose device says how many requests are real one more has rows."""

    def one_more(query: BoundedQuery, real: Tensor) -> Tensor:
        return fit_widths(query, real | torch.nn.functional.pad(real, (1, -1)))

    patch.setattr(static_inputs, "fit_widths", one_more)


@mutant(ORIGIN, "graph.bound_inputs", graph=True)
def requests_without_a_length_are_real(patch: pytest.MonkeyPatch) -> None:
    """Rows of a block table whose requests have no token count as real, with the pages that an engine left there."""
    own = bound_inputs._num_real

    def of_all(inputs: BoundInputs, paging: Paging) -> Tensor:
        is_told = inputs.num_real is not None or isinstance(paging, RequestTable)
        return own(inputs, paging) if is_told else torch.tensor([paging.bs], device=inputs.seq_lens.device)

    patch.setattr(bound_inputs, "_num_real", of_all)


@mutant(ORIGIN, "graph.bound_ragged", graph=True)
def ragged_rows_write_past_the_pool(patch: pytest.MonkeyPatch) -> None:
    """Slots that an engine gives a ragged step are taken as they are, also after the last of the pool."""
    own = bound_inputs._read_rows

    def unbounded(static: Step, query: PaddedQuery, inputs: BoundInputs, real: Tensor) -> None:
        geometry = replace(static.paging.geometry, num_pages=2**20)
        own(replace(static, paging=replace(static.paging, geometry=geometry)), query, inputs, real)

    patch.setattr(bound_inputs, "_read_rows", unbounded)


@mutant(ORIGIN, "graph.planned_ahead", graph=True)
def fewer_requests_are_others(patch: pytest.MonkeyPatch) -> None:
    """A phase that is planned for the first requests of a batch is refused, as if its table were overwritten."""

    def same(one: Step, other: Step) -> bool:
        return one.paging.static_input().tolist() == other.paging.static_input().tolist()

    patch.setattr(captured, "_same_requests", same)


@mutant(ORIGIN, "graph.planned_ahead", graph=True)
def copied_tables_are_shared(patch: pytest.MonkeyPatch) -> None:
    """Phases of one block table copy it into one place, so the pages of one phase are those of another's requests."""
    own = BackendMemory._allocate

    def shared(self: BackendMemory, largest: AnyBucket, paging: Paging, shares: bool, within: object) -> PhaseMemory:
        return own(self, largest, paging, not self.checking, within)

    patch.setattr(BackendMemory, "_allocate", shared)


@mutant(ORIGIN, "api.keeps_no_state")
def drafted_slots_are_the_workers(patch: pytest.MonkeyPatch) -> None:
    """An eager tree reads drafted tokens by the worker's own slots, which may be those of its next step."""
    patch.setattr(backend, "own_drafted", lambda step, write_slots: step)


@mutant(ORIGIN, "poison.table_tail", backend="trtllm_mla")
def block_table_of_later_tokens(patch: pytest.MonkeyPatch) -> None:
    """A block table has the pages of two tokens more than the last forward sees, which a request may not own."""
    patch.setattr(block_table, "write_pages", _write_two_more)


@mutant(ORIGIN, "api.idle")
def idle_step_has_a_request(patch: pytest.MonkeyPatch) -> None:
    """A packed step of padding alone says that it has a request, whose length the host does not know."""

    def counted(**given: object) -> Step:
        return Step(**{**given, "num_real": 1})

    patch.setattr(static_inputs, "Step", counted)


@mutant(ORIGIN, "api.idle")
def idle_step_has_a_token(patch: pytest.MonkeyPatch) -> None:
    """The request of a packed step of padding alone has a committed token, of which the host does not know."""
    patch.setattr(static_inputs, "Step", lambda **given: Step(**given | {"seq_lens": given["seq_lens"] + 1}))


@mutant(ORIGIN, "plan.token_positions")
def first_forward_is_not_the_default(patch: pytest.MonkeyPatch) -> None:
    """Positions are those of the second forward, unless another is asked for."""
    patch.setattr(token_positions, "__defaults__", (1,))


@mutant(ORIGIN, "plan.padding", graph=True)
def idle_replay_counts_a_request(patch: pytest.MonkeyPatch) -> None:
    """A replay without any request says that the first padded one is real."""
    own = static_inputs._fill

    def counted(static: Step, step: Step | None) -> None:
        own(static, step)
        if step is None and isinstance(static.num_real, Tensor):
            static.num_real.fill_(1)

    patch.setattr(static_inputs, "_fill", counted)


@mutant(ORIGIN, "refusals.mixed")
def padded_parts_are_mixed(patch: pytest.MonkeyPatch) -> None:
    """A part whose device alone says how many of its requests are real is mixed as if all were."""
    own = mixed._part_reasons

    def taken(part: Step) -> list[str]:
        return own(replace(part, num_real=part.bs) if isinstance(part.num_real, Tensor) else part)

    patch.setattr(mixed, "_part_reasons", taken)


@mutant(ORIGIN, "refusals.mixed")
def caches_are_mixed(patch: pytest.MonkeyPatch) -> None:
    """Parts of caches of different sizes are mixed, and take the first one's."""
    own = mixed.mixed_reasons

    def taken(parts: Sequence[Step]) -> list[str]:
        geometry = parts[0].paging.geometry
        return own([replace(part, paging=replace(part.paging, geometry=geometry)) for part in parts])

    patch.setattr(mixed, "mixed_reasons", taken)


@mutant(ORIGIN, "plan.write_slots")
def last_forward_for_those_after_it(patch: pytest.MonkeyPatch) -> None:
    """A number past the last forward's gives the last one's metadata."""
    at = metadata.Metadata.at

    def last(self: metadata.Metadata, forward: int = 0, ancestors: Tensor | None = None) -> metadata.ForwardMetadata:
        return at(self, min(forward, self.step.num_forwards - 1), ancestors)

    patch.setattr(metadata.Metadata, "at", last)


@mutant(ORIGIN, "refusals.bound_values")
def plans_that_failed_are_taken(patch: pytest.MonkeyPatch) -> None:
    """A phase that holds no step, because planning it failed, is attended by."""
    own = captured.Captured.check_phase

    def taken(self: captured.Captured) -> None:
        if self.phase.planned is not None:
            own(self)

    patch.setattr(captured.Captured, "check_phase", taken)


@mutant(ORIGIN, "graph.after_a_refusal")
def another_table_is_known(patch: pytest.MonkeyPatch) -> None:
    """A step of another request table is taken for one of the capture's until it is copied, when the last is gone."""
    patch.setattr(captured, "_table_of", lambda paging, captured_on: None)


@mutant(ORIGIN, "graph.planned_ahead")
def pages_of_others_are_run(patch: pytest.MonkeyPatch) -> None:
    """A recorded graph runs though a table that it reads was planned for other requests since."""
    patch.setattr(captured, "_same_requests", lambda one, other: True)


@mutant(ORIGIN, "refusals.anothers_metadata")
def planner_is_not_the_one_asked_for(patch: pytest.MonkeyPatch) -> None:
    """A planner that is asked for by name and not there is replaced, without an error."""
    own = planners.choose_planner
    patch.setattr(backend, "choose_planner", lambda owner, asked, device, **has: own(owner, "torch", device, **has))


@mutant(ORIGIN, "graph.guards")
def eager_buffers_have_no_guards(patch: pytest.MonkeyPatch) -> None:
    """In checking mode, what is written next to the buffers of an eager step is not noticed."""
    check = BackendMemory.check

    def of_phases(self: BackendMemory) -> None:
        self._fresh = None
        check(self)

    patch.setattr(BackendMemory, "check", of_phases)


@mutant(ORIGIN, "compressed.layers_of_one_model", backend="dsv4")
def first_entry_is_not_selected(patch: pytest.MonkeyPatch) -> None:
    """Where more entries are selected than a request has, padding stands before them, and the first is lost."""
    own = torch_compressed.select_top

    def shifted(scores: Tensor, num_visible: Tensor, topk: int) -> Tensor:
        before = int(topk > scores.shape[-1])
        return own(torch.nn.functional.pad(scores, (before, 0), value=float("-inf")), num_visible, topk)

    patch.setattr(torch_compressed, "select_top", shifted)
