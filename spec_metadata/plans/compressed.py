"""Windows, compressed entries and compressor rows: the format of DeepSeek-V4's sparse attention kernels.

A row attends to the last `window` tokens, each in its own slot, and to entries, each of which stands for a block of
`ratio` tokens. The row that closes a block makes its entry, from what the compressor projected for the tokens of the
block (and of the one before, where blocks overlap), and sees it already. The projections of tokens of earlier forwards
are read from state rows, a ring for each page: token p of a page has row p % ring of it.

Rows of a draft block attend to no entries. All of them see the same: the last `window` tokens before the block, and the
block. That is DSpark's window, of DeepSeek-V4.1 (SGLang 0.5.23, `dspark_attn_metadata.py`).

All stores are addressed by position: what a rejected token left behind is invisible until the forward that processes
its position again, and that one rewrites it first. So rolling back is nothing but the committed length.

A ring for each page is found through a request-to-token table as well as a block table, and a shared prefix of whole
pages brings its states along. It costs more than a ring for each request would. With 4 draft tokens and float32, each
page of 256 tokens has 100 KiB of states at ratio 4, its indexer's included, and 520 KiB at ratio 128, beside 146 KiB of
8-bit rows. Only those of the last pages are ever read again by the request that wrote them. So an engine that gives
layers page ids of their own can free the pages after the window, and their rings with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from spec_metadata.buffers import BS, MAX_PAGES, NOTHING, NUM_FORWARDS, NUM_TOKENS, Buffers, BufferSpec, Dim
from spec_metadata.capacity import Extent, ceil_div
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import Step
from spec_metadata.plans.declared import pages_spec, query_starts_spec
from spec_metadata.visibility import dense_part, query_starts, visible_pages, write_pages, write_slots

INDEX_GROUP = 64  # FlashMLA's sparse kernel reads indices in groups of as many
GROUP = Dim(str(INDEX_GROUP), lambda e: INDEX_GROUP)


@dataclass(frozen=True, slots=True)
class Compression:
    """Compression of a layer. ratio: tokens of a block, which becomes one entry, 1 or more. overlap: an entry is also
    made of the block before its own. indexed: a row attends to those entries only that an indexer selects, not to all.
    """

    ratio: int
    overlap: bool = False
    indexed: bool = False

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise InvalidStepError(f"a ratio counts tokens of a block, 1 or more, got {self.ratio}; for none say None")

    @property
    def read_window(self) -> int:
        """Tokens that an entry is made of."""
        return self.ratio * 2 if self.overlap else self.ratio


def min_ring(read_window: int, num_draft_tokens: int, num_draft_forwards: int = 0) -> int:
    """State rows that must be kept so that no rejected token overwrites one that is still needed.

    Entries are made before states are written, and of this forward's tokens from its inputs. Let L tokens be committed
    and W be the read window.

    A verify, or a draft extend, of N rows writes states L to L + N - 1, and at least one of them commits. The next
    entry closes at L + 1 or later and reads back to L + 2 - W. The last row written must not take that one's place:
    L + N - 1 - ring < L + 2 - W, so ring >= W + N - 2.

    A draft with compressed layers runs F forwards, which write L to L + F - 1, and then its draft extend starts at L
    again. Nothing was committed between, so it may read back to L + 1 - W, and ring >= W + F - 1.
    """
    return read_window + max(num_draft_tokens - 2, num_draft_forwards - 1)


def max_rows(read_window: int, ring: int, page_size: int) -> int | None:
    """Most tokens of a verify or draft extend that a ring allows; None for any: tokens of a page never collide."""
    return None if ring >= page_size else ring - read_window + 2


def max_draft_forwards(read_window: int, ring: int, page_size: int) -> int | None:
    """Most forwards of a draft loop that a ring allows; None for any."""
    return None if ring >= page_size else ring - read_window + 1


@dataclass(frozen=True, slots=True, eq=False)
class EntryPlan:
    """The entries of one ratio in one forward; tensors as declared in `buffer_specs`, of this forward.

    slots is None where an indexer selects, which reads the page table.
    """

    num_visible: Tensor
    slots: Tensor | None
    write_slots: Tensor
    first_positions: Tensor
    input_rows: Tensor
    state_reads: Tensor
    state_writes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CompressedPlan:
    """One forward; tensors as declared in `buffer_specs`, of this forward where each has its own.

    entries: of each ratio. max_query: most rows of a request, max_kv_len: of its tokens; host bounds, promised by the
    capacity.
    """

    qo_indptr: Tensor
    request: Tensor
    window_slots: Tensor
    window_lens: Tensor
    page_table: Tensor
    entries: Mapping[int, EntryPlan]
    page_size: int
    max_query: int
    max_kv_len: int


NUM_SLOTS = Dim("num_pages * page_size", lambda e: e.num_pages * e.page_size)


@cache
def buffer_specs(
    window: int, compressions: tuple[Compression, ...], *, is_block: bool = False
) -> tuple[BufferSpec, ...]:
    """The declared buffers. window: tokens that a row sees, itself included. is_block: of draft blocks, whose rows see
    the window before the block and all of it.
    """
    keys = Dim(str(window), lambda e: window)
    if is_block:
        keys = Dim(f"round_up({window} + width, {INDEX_GROUP})", lambda e: _in_groups(window + e.width))
    shape = (NUM_FORWARDS, NUM_TOKENS)
    specs = [
        query_starts_spec("qo_indptr"),
        BufferSpec("request", torch.int32, (NUM_TOKENS,), "request of each row", high=BS),
        BufferSpec(
            "window_slots", torch.int32, (*shape, keys), "a row's tokens, the last first, then -1", -1, -1, NUM_SLOTS
        ),
        BufferSpec("window_lens", torch.int32, shape, "tokens of the window", high=keys + 1),
        pages_spec("page_table", BS, MAX_PAGES),
    ]
    for compression in compressions:
        specs += _entry_specs(compression)
    return tuple(specs)


def _entry_specs(compression: Compression) -> list[BufferSpec]:
    ratio, width = compression.ratio, compression.read_window
    rows = (NUM_FORWARDS, NUM_TOKENS)
    made = Dim(f"min(num_tokens, num_tokens / {ratio} + bs)", lambda e: min(e.num_tokens, e.num_tokens // ratio + e.bs))
    entries = Dim(f"max_kv_len / {ratio}", lambda e: e.max_kv_len // ratio)
    slots = Dim(f"num_pages * page_size / {ratio}", lambda e: e.num_pages * e.page_size // ratio)
    sources = (NUM_FORWARDS, made, Dim(str(width), lambda e: width))

    def spec(
        name: str, shape: tuple[Dim, ...], doc: str, high: Dim, pad: int = -1, over_read: Dim = NOTHING
    ) -> BufferSpec:
        return BufferSpec(f"{name}_{ratio}", torch.int32, shape, doc, pad, low=pad, high=high, over_read=over_read)

    specs = [
        spec("num_entries", rows, "entries that a row may see", entries + 1, pad=0),
        spec("entry_writes", sources[:2], "slot of an entry that this forward makes, or -1", slots),
        spec("entry_positions", sources[:2], "first token of its block", entries * Dim(str(ratio), lambda e: ratio), 0),
        spec("input_rows", sources, "query row of a token that it is made of, -1 if of an earlier forward", NUM_TOKENS),
        spec("state_reads", sources, "state row of a token of an earlier forward, or -1", NUM_SLOTS),
        spec("state_writes", rows, "state row of a row, -1 if a later row takes its place", NUM_SLOTS),
    ]
    if not compression.indexed:
        width_in_groups = Dim(f"round_up({entries}, {INDEX_GROUP})", lambda e: _in_groups(entries.of(e)))
        specs.append(spec("entry_slots", (*rows, width_in_groups), "visible entries, then -1", slots, over_read=GROUP))
    return specs


def _in_groups(num: int) -> int:
    return ceil_div(num, INDEX_GROUP) * INDEX_GROUP


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Where the rows of a forward stand. request, position, write_slots: [num_tokens]. first_seen, last_seen:
    [num_tokens], of the tokens that a row sees. first_row, start, end: [bs], the first row of a request, its position,
    and the one past the last. pages: [bs, max_pages]. All int64.
    """

    request: Tensor
    position: Tensor
    first_seen: Tensor
    last_seen: Tensor
    write_slots: Tensor
    first_row: Tensor
    start: Tensor
    end: Tensor
    pages: Tensor
    page_size: int

    def page(self, request: Tensor, position: Tensor) -> Tensor:
        """The page that holds a token, positions clamped to the first."""
        return self.pages[request, position.clamp_min(0) // self.page_size]


def view_compressed(step: Step, buffers: Buffers, compressions: Collection[Compression]) -> tuple[CompressedPlan, ...]:
    """The plan of each forward of a step, as views of the buffers."""
    return tuple(
        CompressedPlan(
            qo_indptr=buffers["qo_indptr"],
            request=buffers["request"],
            window_slots=buffers["window_slots"][forward],
            window_lens=buffers["window_lens"][forward],
            page_table=buffers["page_table"],
            entries={each.ratio: _view_entries(each, buffers, forward) for each in compressions},
            page_size=buffers.extent.page_size,
            max_query=step.width,
            max_kv_len=buffers.extent.max_kv_len,
        )
        for forward in range(step.num_forwards)
    )


def _view_entries(compression: Compression, buffers: Buffers, forward: int) -> EntryPlan:
    ratio = compression.ratio
    return EntryPlan(
        num_visible=buffers[f"num_entries_{ratio}"][forward],
        slots=None if compression.indexed else buffers[f"entry_slots_{ratio}"][forward],
        write_slots=buffers[f"entry_writes_{ratio}"][forward],
        first_positions=buffers[f"entry_positions_{ratio}"][forward],
        input_rows=buffers[f"input_rows_{ratio}"][forward],
        state_reads=buffers[f"state_reads_{ratio}"][forward],
        state_writes=buffers[f"state_writes_{ratio}"][forward],
    )


def write_compressed(step: Step, buffers: Buffers, window: int, rings: Mapping[Compression, int]) -> None:
    """Write the windows, entries and compressor rows of all forwards of a step. Device only, fixed shapes.

    rings: state rows of a page, of each compression.
    """
    last = dense_part(step, step.num_forwards - 1)
    buffers["qo_indptr"].copy_(query_starts(step))
    buffers["request"].copy_(_request_of_rows(step))
    write_pages(step, last, buffers["page_table"])
    for forward, plan in enumerate(view_compressed(step, buffers, rings)):
        rows = _rows(step, forward, buffers.extent, window)
        num_seen = rows.last_seen + 1 - rows.first_seen
        back = torch.arange(plan.window_slots.shape[1], device=step.device)
        tokens = rows.last_seen.unsqueeze(1) - back
        slots = rows.page(rows.request.unsqueeze(1), tokens) * rows.page_size + tokens % rows.page_size
        plan.window_slots.copy_(torch.where(back < num_seen.unsqueeze(1), slots, -1))
        plan.window_lens.copy_(num_seen)
        for compression, ring in rings.items():
            _write_entries(plan.entries[compression.ratio], compression, ring, rows)


def _request_of_rows(step: Step) -> Tensor:
    row = torch.arange(step.num_tokens, device=step.device)
    return torch.searchsorted(query_starts(step).long()[1:], row, right=True)


def _rows(step: Step, forward: int, extent: Extent, window: int) -> _Rows:
    assert not step.is_tree, "a tree is refused before it is planned"
    dense = dense_part(step, forward)
    starts = query_starts(step).long()
    end = dense.kv_lens.long()
    row, request = torch.arange(step.num_tokens, device=step.device), _request_of_rows(step)
    position, start = end[request] - (starts[1:][request] - row), end - starts.diff()
    first = position + 1 if dense.causal else start[request]
    return _Rows(
        request=request,
        position=position,
        first_seen=(first - window).clamp_min(0),
        last_seen=position if dense.causal else end[request] - 1,
        write_slots=write_slots(step, forward),
        first_row=starts[:-1],
        start=start,
        end=end,
        pages=visible_pages(step, dense, extent.max_pages),
        page_size=extent.page_size,
    )


def _write_entries(plan: EntryPlan, compression: Compression, ring: int, rows: _Rows) -> None:
    ratio, page_size = compression.ratio, rows.page_size
    plan.num_visible.copy_((rows.position + 1) // ratio)
    _write_made(plan, compression, ring, rows)
    successor = rows.position + ring
    replaced = (successor < rows.end[rows.request]) & (successor // page_size == rows.position // page_size)
    states = rows.write_slots // page_size * ring + rows.position % ring
    plan.state_writes.copy_(torch.where(replaced, -1, states))
    if plan.slots is not None:
        entry = torch.arange(plan.slots.shape[1], device=rows.pages.device)
        page = rows.pages[:, (entry * ratio // page_size).clamp(max=rows.pages.shape[1] - 1)]
        slots = page * (page_size // ratio) + entry % (page_size // ratio)
        plan.slots.copy_(torch.where(entry < plan.num_visible.unsqueeze(1), slots[rows.request], -1))


def _write_made(plan: EntryPlan, compression: Compression, ring: int, rows: _Rows) -> None:
    """The entries that close in this forward, request after request, and what they are made of."""
    ratio, entry = compression.ratio, torch.arange(plan.write_slots.shape[0], device=rows.pages.device)
    closed_before = rows.start // ratio
    ends = (rows.end // ratio - closed_before).cumsum(0)
    request = torch.searchsorted(ends, entry, right=True)
    live = request < ends.shape[0]
    request = request.clamp(max=ends.shape[0] - 1)
    index = entry - torch.nn.functional.pad(ends, (1, 0))[request] + closed_before[request]
    first = torch.where(live, index * ratio, 0)
    start, first_row = rows.start[request], rows.first_row[request]
    row = torch.where(live, first_row + first + ratio - 1 - start, 0)
    plan.write_slots.copy_(torch.where(live, rows.write_slots[row] // ratio, -1))
    plan.first_positions.copy_(first)
    back = torch.arange(compression.read_window, device=entry.device) - (compression.read_window - ratio)
    token, live = first.unsqueeze(1) + back, live.unsqueeze(1)
    start, first_row, request = start.unsqueeze(1), first_row.unsqueeze(1), request.unsqueeze(1)
    plan.input_rows.copy_(torch.where(live & (token >= start), first_row + token - start, -1))
    is_state = live & (token >= 0) & (token < start)
    plan.state_reads.copy_(torch.where(is_state, rows.page(request, token) * ring + token % ring, -1))
