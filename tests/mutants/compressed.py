"""Mutants of compressed keys: what entries are made of, who sees them, and the states that outlive a rejection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends import dsv4
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.kernels import fp8_pages, torch_compressed
from attn_backends.planning import planners
from spec_metadata import Buffers, Step, StepKind
from spec_metadata.plans import compressed
from spec_metadata.plans.compressed import EntryPlan
from spec_metadata.visibility import DensePart, dense_part
from tests.mutants.mutant import mutant


def change_entries(patch: pytest.MonkeyPatch, change: Callable[[EntryPlan, Any, int], None]) -> None:
    """Let every plan of entries be changed in place. change: (plan, rows, ratio)."""
    write_entries = compressed._write_entries

    def changed(plan: EntryPlan, compression: Any, ring: int, rows: Any) -> None:
        write_entries(plan, compression, ring, rows)
        change(plan, rows, compression.ratio)

    patch.setattr(compressed, "_write_entries", changed)


def with_visible(plan: EntryPlan, num_visible: Tensor) -> None:
    """Let rows see so many entries of those that they may see."""
    plan.num_visible.copy_(num_visible)
    if plan.slots is not None:
        entry = torch.arange(plan.slots.shape[1], device=num_visible.device)
        plan.slots.masked_fill_(entry >= num_visible.unsqueeze(1), -1)


@mutant(
    "SGLang #34189: a verify kept the states of its last 4 rows, whatever its width",
    "compressed.rollback",
    "compressed.draft_and_extend",
    "compressed.chunks",
    backend="dsv4",
    graph=True,
)
def states_of_the_last_rows_only(patch: pytest.MonkeyPatch) -> None:
    """Of a request's rows in a forward, the last 3 alone leave their states."""

    def tail_only(plan: EntryPlan, rows: Any, ratio: int) -> None:
        tail = rows.position >= rows.end[rows.request] - 3
        plan.state_writes.copy_(torch.where(tail, plan.state_writes, -1))

    change_entries(patch, tail_only)


@mutant(
    "an off-by-one of the causal rule: pos // r for (pos + 1) // r",
    "compressed.edges",
    "compressed.real_sizes",
    "math.target_verify",
    backend="dsv4",
)
def own_block_not_visible(patch: pytest.MonkeyPatch) -> None:
    """The row that closes a block does not see its entry."""
    change_entries(patch, lambda plan, rows, ratio: with_visible(plan, rows.position // ratio))


@mutant("visibility rounded up", "compressed.edges", "poison.unowned_nan", backend="dsv4")
def open_block_visible(patch: pytest.MonkeyPatch) -> None:
    """An indexer chooses among the entry of the open block too, which was never written."""
    change_entries(patch, lambda plan, rows, ratio: plan.num_visible.copy_((rows.position + ratio) // ratio))


@mutant("an overlapping compressor's halves", "compressed.edges", "cache.writes_owned_slots", backend="dsv4")
def halves_swapped(patch: pytest.MonkeyPatch) -> None:
    """The block before gives its second half of channels, the entry's own the first."""

    def swapped(x: Tensor) -> Tensor:
        (_, before), (own, _) = (half.chunk(2, dim=2) for half in x.chunk(2, dim=1))
        return torch.cat((before, own), dim=1)

    patch.setattr(torch_compressed, "_halves", swapped)


@mutant("the phase of the position bias", "compressed.edges", "cache.writes_owned_slots", backend="dsv4")
def position_bias_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A token's gate gets the bias of the place before its own."""
    pool = torch_compressed.pool
    patch.setattr(
        torch_compressed, "pool", lambda values, gates, bias, *rest: pool(values, gates, bias.roll(1, 0), *rest)
    )


@mutant("an entry rotated as its last token", "compressed.edges", "compressed.chunks", backend="dsv4")
def entry_stands_at_its_last_token(patch: pytest.MonkeyPatch) -> None:
    """An entry is rotated by the angles of another token than its block's first."""
    rotate = torch_compressed.rotate_tail
    patch.setattr(torch_compressed, "rotate_tail", lambda x, positions, inv_freq: rotate(x, positions + 1, inv_freq))


@mutant(
    "a constant where the layer has a number of its own", "compressed.edges", "cache.writes_owned_slots", backend="dsv4"
)
def norm_eps_of_another_norm(patch: pytest.MonkeyPatch) -> None:
    """An indexer's keys are normalised with the epsilon of its layer's compressor."""
    store = DSV4Backend.store

    def same_eps(self: Any, inputs: Any, cache: Any, meta: Any, layer: Any) -> None:
        if layer.indexer is not None:
            layer = replace(layer, indexer=replace(layer.indexer, norm_eps=layer.compressor.norm_eps))
        store(self, inputs, cache, meta, layer)

    patch.setattr(DSV4Backend, "store", same_eps)


@mutant("a sink left out", "math.decode", "math.prefill", backend="dsv4")
def sink_dropped(patch: pytest.MonkeyPatch) -> None:
    """Attention without the sinks' share."""
    attend = torch_compressed.sparse_attention
    patch.setattr(
        torch_compressed,
        "sparse_attention",
        lambda q, keys, visible, scale, sinks: attend(q, keys, visible, scale, None),
    )


@mutant("a sink under each of two softmaxes", "math.decode", "compressed.real_sizes", backend="dsv4")
def sink_taken_twice(patch: pytest.MonkeyPatch) -> None:
    """The sink takes its share of the window and of the entries, one after the other."""
    attend = torch_compressed.sparse_attention

    def twice(q: Tensor, keys: Tensor, visible: Tensor, scale: float, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, keys, visible, scale, sinks)
        return out * torch.sigmoid(lse - sinks).unsqueeze(-1), lse

    patch.setattr(torch_compressed, "sparse_attention", twice)


@mutant("a window without its oldest token", "math.decode", "compressed.chunks", backend="dsv4")
def window_one_short(patch: pytest.MonkeyPatch) -> None:
    """A row misses the oldest token of its window."""
    write_compressed = compressed.write_compressed

    def short(step: Step, buffers: Buffers, *rest: Any) -> None:
        write_compressed(step, buffers, *rest)
        buffers["window_slots"][..., -1] = -1

    patch.setattr(compressed, "write_compressed", short)


@mutant(
    "SGLang #26239: the write targets of a draft loop come from the unsliced out_cache_loc",
    "compressed.draft_and_extend",
    "math.draft_decode",
    "cache.writes_forward_by_forward",
    backend="dsv4",
)
def draft_targets_not_sliced(patch: pytest.MonkeyPatch) -> None:
    """Rows, states and entries of every draft forward go where the first slots of the flat list say."""
    for module in (planners, compressed):
        patch.setattr(module, "write_slots", lambda step, forward=0: step.flat_slots()[: step.num_tokens].long())


@mutant(
    "SGLang 0.5.23 on CUDA: every draft step has the causal length of the first",
    "compressed.draft_and_extend",
    "math.draft_decode",
    backend="dsv4",
    graph=True,
)
def draft_length_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    """Draft forward i sees, and closes blocks, as if it were the first."""

    def first(step: Step, forward: int = 0) -> DensePart:
        dense = dense_part(step, forward)
        return replace(dense, kv_lens=dense.kv_lens - forward) if step.kind is StepKind.DRAFT_DECODE else dense

    patch.setattr(compressed, "dense_part", first)


@mutant(
    "vLLM disables an overlap of two launches for this race",
    "compressed.chunks",
    "compressed.rollback",
    backend="dsv4",
)
def states_written_before_entries_are_made(patch: pytest.MonkeyPatch) -> None:
    """States of a forward take the place of those that its entries are made of."""
    store, write_states = dsv4._store_entries, dsv4.write_states

    def late(pools: Any, given: Any, compressor: Any, made: EntryPlan, *rest: Any) -> None:
        write_states(pools.states.data, made.state_writes, given.values, given.gates, 2)
        store(pools, given, compressor, made, *rest)

    patch.setattr(dsv4, "_store_entries", late)


@mutant("the bound on the ring of states is tight", "compressed.rollback", backend="dsv4", graph=True)
def ring_one_row_short(patch: pytest.MonkeyPatch) -> None:
    """A rejected token's state takes the place of one that is still needed."""
    min_ring, max_rows, max_drafts = compressed.min_ring, compressed.max_rows, compressed.max_draft_forwards
    patch.setattr(compressed, "min_ring", lambda *bounds: min_ring(*bounds) - 1)
    patch.setattr(compressed, "max_rows", lambda window, ring, page: max_rows(window, ring + 1, page))
    patch.setattr(compressed, "max_draft_forwards", lambda window, ring, page: max_drafts(window, ring + 1, page))


@mutant("SGLang encodes no entry as slot 0, vLLM as -1", "compressed.no_block_closes", "graph.padded", backend="dsv4")
def nothing_is_a_slot(patch: pytest.MonkeyPatch) -> None:
    """A write target of -1, for none, is dereferenced."""
    patch.setattr(torch_compressed, "_writes", lambda slots, reserved: (slots.unsqueeze(-1) >= -1, slots.long()))


@mutant("entries that an indexer selects, kept for the next layer", "compressed.layers_of_one_model", backend="dsv4")
def selection_of_the_layer_before(patch: pytest.MonkeyPatch) -> None:
    """Layers of a step attend to the entries that the first of them selected."""
    select, kept = dsv4._select, {}

    def once(index: Any, cache: Any, plan: Any, layer: Any) -> Tensor:
        key = plan.qo_indptr.data_ptr()
        kept.setdefault(key, (plan, select(index, cache, plan, layer)))
        return kept[key][1]

    patch.setattr(dsv4, "_select", once)


@mutant("entries addressed as if pages were neighbours", "laws.relabelled_pages", "math.decode", backend="dsv4")
def entries_of_neighbouring_pages(patch: pytest.MonkeyPatch) -> None:
    """The entries of a request are sought after its first one."""

    def in_a_row(plan: EntryPlan, rows: Any, ratio: int) -> None:
        if plan.slots is not None:
            behind = plan.slots[:, :1] + torch.arange(plan.slots.shape[1], device=plan.slots.device)
            plan.slots.copy_(torch.where(plan.slots >= 0, behind, -1))

    change_entries(patch, in_a_row)


@mutant(
    "write targets of entries that only the capture computes",
    "graph.equals_eager",
    "graph.shrinking",
    backend="dsv4",
    graph=True,
)
def entries_of_the_capture(patch: pytest.MonkeyPatch) -> None:
    """What an entry is made of, and where it goes, is planned once for each buffer and never again."""
    write_made, planned = compressed._write_made, {}

    def once(plan: EntryPlan, *rest: Any) -> None:
        key = plan.write_slots.data_ptr()
        if key not in planned:
            write_made(plan, *rest)
        planned[key] = plan  # which keeps an eager step's memory, so that no other gets it

    patch.setattr(compressed, "_write_made", once)


@mutant("an indexer without its weights of heads", "math.decode", "math.target_verify", backend="dsv4")
def index_heads_not_weighted(patch: pytest.MonkeyPatch) -> None:
    """Entries are selected by the sum of their heads' scores."""
    select = dsv4.select_entries
    patch.setattr(dsv4, "select_entries", lambda q, weights, *rest, **more: select(q, weights * 0 + 1, *rest, **more))


@mutant("slots of entries by arithmetic over pages", "compressed.refuses_cut_blocks", backend="dsv4")
def pages_cut_blocks(patch: pytest.MonkeyPatch) -> None:
    """A page size that is no whole number of blocks is taken."""
    patch.setattr(dsv4, "lcm", lambda *ratios: 1)


@mutant("SGLang #30339: a ring is not known by its content", "compressed.refuses_lost_states", backend="dsv4")
def prefix_inside_a_page(patch: pytest.MonkeyPatch) -> None:
    """A request may start on a part of another one's page."""
    patch.setattr(DSV4Backend, "check_prefix", lambda self, num_tokens: None)


@mutant("a top-k that does not say which of equal scores it takes", "compressed.equal_scores", backend="dsv4")
def higher_of_equal_entries_selected(patch: pytest.MonkeyPatch) -> None:
    """Of entries with equal scores the higher is selected."""
    select_top = torch_compressed.select_top

    def reversed_ties(scores: Tensor, num_visible: Tensor, topk: int) -> Tensor:
        best = select_top(scores.flip(-1), torch.full_like(num_visible, scores.shape[-1]), topk)
        best = scores.shape[-1] - 1 - best
        return torch.where((best >= 0) & (best < num_visible.unsqueeze(-1)), best, -1)

    patch.setattr(torch_compressed, "select_top", reversed_ties)


@mutant("a top-k that takes 256 rows at a time", "compressed.equal_scores", backend="dsv4")
def rows_past_the_256th_select_as_the_first(patch: pytest.MonkeyPatch) -> None:
    """Rows 256 and on have the entries of rows 0 and on."""
    select_entries = torch_compressed.select_entries

    def again(*arguments: Any) -> Tensor:
        chosen = select_entries(*arguments)
        chosen[256:] = chosen[: len(chosen[256:])].clone()
        return chosen

    patch.setattr(torch_compressed, "select_entries", again)


@mutant("a tile read with the scale of its neighbour", "compressed.rollback", backend="dsv4")
def groups_read_with_another_groups_scale(patch: pytest.MonkeyPatch) -> None:
    """In the 8-bit page format, each group of 64 elements is read with the scale of the one before it."""
    dequantise = fp8_pages.dequantise

    def shifted(bytes: Tensor) -> Tensor:
        data, scales, rest = bytes.split([fp8_pages.DATA_BYTES, fp8_pages.NUM_GROUPS, 1], dim=-1)
        return dequantise(torch.cat((data, scales.roll(1, dims=-1), rest), dim=-1))

    patch.setattr(fp8_pages, "dequantise", shifted)


@mutant("a random change of one token", "compressed.chunks", backend="dsv4")
def two_rows_write_one_state(patch: pytest.MonkeyPatch) -> None:
    """Rows of a forward that goes round the ring all write their states: which one stays is chance."""
    own = compressed._write_entries

    def written(plan: EntryPlan, compression: Any, ring: int, rows: Any) -> None:
        own(plan, compression, ring, rows)
        plan.state_writes.copy_(rows.write_slots // rows.page_size * ring + rows.position % ring)

    patch.setattr(compressed, "_write_entries", written)


@mutant("a random change of one token", "compressed.chunks", backend="dsv4")
def own_tokens_are_states_too(patch: pytest.MonkeyPatch) -> None:
    """An entry's tokens of this forward are listed among the states, too."""
    change_entries(patch, lambda plan, *_: plan.state_reads.copy_(plan.state_reads.maximum(plan.input_rows)))
