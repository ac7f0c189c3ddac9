"""The step: what one attention call of an engine is, as a frozen value that any worker builds from tensors it has.

A step is of one kind; `spec_metadata.mixed_step` makes one of packed rows from several. `seq_lens` counts the tokens
whose KV is committed before the step, per model (target and draft differ); what each row sees and where it writes
follows from it in `spec_metadata.visibility`. Query layouts are types of their own (`spec_metadata.query`, rule R2).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypedDict, Unpack

import torch
from torch import Tensor

from spec_metadata.capacity import Bucket, Capacity, Extent, StepKind, ceil_div
from spec_metadata.errors import InvalidStepError, describe
from spec_metadata.paging import Paging, RequestTable
from spec_metadata.query import AnyQuery, BoundedQuery, PackedQuery, PaddedQuery, UniformQuery, most_rows, packed_rows
from spec_metadata.step_checks import check_paging, check_requests, check_step, exact_lens, is_sound


class HostBounds(TypedDict, total=False):
    """Bounds of a step's lengths, known on the host.

    max_committed: bound on seq_lens, which makes the buffers of an eager step smaller (None says the same as the
    capacity's max_context). seq_lens_cpu: exact committed lengths of the real requests, which kernels that plan on the
    host need (None: the host does not know them). Integers of the host.
    """

    max_committed: int | None
    seq_lens_cpu: Sequence[int] | None


@dataclass(frozen=True, eq=False, init=False)
class Step:
    """One step of `bs` requests (padded rows included), built by the class methods below. Making one launches nothing
    and allocates nothing on the device.

    seq_lens: [bs] int32 or int64, committed tokens of each request before the step. paging: where its tokens live.
    out_cache_loc: write slots, int32 or int64, any stride; [num_tokens] in row order, for draft decode [bs * topk *
    num_steps] in (batch, topk, step) order. Values are not read outside of checking mode, so -1 is no way to write
    nothing (`CacheGeometry.reserved_slot` is). None: those right after the committed tokens, which whoever plans the
    step finds in its table. num_real: leading rows that are real requests, the rest is padding; an integer of the host,
    or [1] int32 where the device alone knows. num_steps: drafted depth of a draft-decode step, which plans num_steps -
    1 forwards; else 1. tree_mask: [bs, width, width] bool of a verify over a tree, row sees column (itself included);
    None for a chain. max_committed, seq_lens_cpu: what the host knows (`HostBounds`). reads_alone: its rows' own tokens
    are in the cache, and it writes none (`frozen_draft`). Raises `InvalidStepError` for other shapes, types and bounds.
    """

    kind: StepKind
    query: AnyQuery
    seq_lens: Tensor
    paging: Paging
    out_cache_loc: Tensor | None
    num_real: Tensor | int
    num_steps: int = 1
    tree_mask: Tensor | None = None
    max_committed: int | None = None
    seq_lens_cpu: tuple[int, ...] | None = None
    reads_alone: bool = False

    def __init__(
        self,
        kind: StepKind,
        query: AnyQuery,
        seq_lens: Tensor,
        paging: Paging,
        out_cache_loc: Tensor | None,
        num_real: Tensor | int,
        num_steps: int = 1,
        tree_mask: Tensor | None = None,
        max_committed: int | None = None,
        seq_lens_cpu: tuple[int, ...] | None = None,
        reads_alone: bool = False,
    ) -> None:
        vars(self).update(  # a frozen dataclass sets field by field, which takes twice as long
            kind=kind,
            query=query,
            seq_lens=seq_lens,
            paging=paging,
            out_cache_loc=out_cache_loc,
            num_real=num_real,
            num_steps=num_steps,
            tree_mask=tree_mask,
            max_committed=max_committed,
            seq_lens_cpu=seq_lens_cpu,
            reads_alone=reads_alone,
        )
        if not is_sound(self):
            check_step(self)

    @property
    def bs(self) -> int:
        """Requests, padded rows included."""
        return self.seq_lens.shape[0]

    @property
    def width(self) -> int:
        """Query rows of a request; of the longest one if packed."""
        return self.query.width

    @property
    def num_tokens(self) -> int:
        """Query rows of one forward; of widths of the device the bound on them."""
        return self.bs * self.width if isinstance(self.query, UniformQuery) else self.query.num_tokens

    @property
    def max_real(self) -> int:
        """Requests that can be real: all but those that a bounded query keeps for padded rows."""
        return self.bs - self.query.num_padding if isinstance(self.query, PaddedQuery) else self.bs

    @property
    def num_forwards(self) -> int:
        """Forwards that this step plans."""
        return self.num_steps - 1 if self.kind is StepKind.DRAFT_DECODE else 1

    @property
    def num_writes(self) -> int:
        """Slots in out_cache_loc; of widths of the device, `width` a request."""
        num_rows = self.bs * self.width if isinstance(self.query, BoundedQuery) else self.num_tokens
        return num_rows * self.num_steps

    @property
    def num_added_at_least(self) -> int:
        """Tokens that every request writes, at least; of widths of the device, those it has slots for."""
        query = self.query
        if isinstance(query, UniformQuery):
            return query.width * self.num_steps
        most = () if isinstance(query, PaddedQuery) else most_rows(query)
        return query.width * self.num_steps if most is None else min(most, default=0)

    @property
    def is_tree(self) -> bool:
        """Whether rows see a tree of drafted tokens beside the committed prefix."""
        return self.tree_mask is not None or (self.kind is StepKind.DRAFT_DECODE and self.width > 1)

    @property
    def device(self) -> torch.device:
        """Device of the step's tensors."""
        return self.seq_lens.device

    @property
    def layout(self) -> Hashable:
        """The key (kind, dtypes, shapes, strides) of a step without host lengths, and without a request table, which is
        read in place. Steps of equal layouts differ in values alone. What follows from other parts is left out, because
        replays compare layouts.
        """
        lens, slots, paging, mask, query = self.seq_lens, self.out_cache_loc, self.paging, self.tree_mask, self.query
        pages = paging.rows if isinstance(paging, RequestTable) else paging.table
        return (
            self.kind,
            type(query),
            query.width,
            (query.num_tokens, query.widths.dtype, query.widths.stride()) if isinstance(query, BoundedQuery) else None,
            self.num_steps,
            self.paging.geometry,
            lens.device,
            lens.dtype,
            lens.stride(),
            None if isinstance(self.num_real, Tensor) else self.num_real,
            None if slots is None else (slots.dtype, slots.stride()),
            pages.shape,
            pages.dtype,
            pages.stride(),
            None if mask is None else mask.stride(),
        )

    def longest(self, capacity: Capacity) -> int:
        """Committed tokens of the longest request, as far as the host knows.

        A draft extend that is no wider than the capacity's begins at the tokens that it runs again, so that a bound on
        what is committed leaves it room.
        """
        if self.seq_lens_cpu is not None:
            return max(self.seq_lens_cpu, default=0)
        bound = capacity.max_context if self.max_committed is None else self.max_committed
        if self.kind is not StepKind.DRAFT_EXTEND or bound > capacity.max_context:
            return bound
        num_added = self.num_added_at_least
        return min(bound, capacity.max_tokens - num_added) if num_added <= capacity.extend_width else bound

    def flat_slots(self) -> Tensor:
        """[num_writes] int32 or int64: out_cache_loc, or what stands for it where it was left out, looked up now."""
        if self.out_cache_loc is not None:
            return self.out_cache_loc
        return next_slots(self.query, self.num_steps, self.seq_lens, self.paging)

    def extent(self, capacity: Capacity) -> Extent:
        """Sizes of the buffers of an eager plan of this step: no more pages than its table has."""
        bs, width, query, page_size = self.seq_lens.shape[0], self.query.width, self.query, capacity.page_size
        num_tokens = bs * width if isinstance(query, UniformQuery) else query.num_tokens
        num_writes = num_tokens * self.num_steps
        committed = capacity.max_context if self.max_committed is None else self.max_committed
        room = max(num_writes // max(bs, 1), width, capacity.draft_room)
        row_tokens = self.paging.row_tokens if bs else capacity.max_kv_len  # of no request it may be of any width
        pages = ceil_div(min(capacity.max_kv_len, committed + room, row_tokens), page_size)
        cache_pages = self.paging.geometry.num_pages
        return Extent(bs, width, num_tokens, self.num_forwards, num_writes, page_size, pages, cache_pages)

    def bucket(self, bs: int | None = None) -> Bucket:
        """The bucket that this step fills, at batch size `bs` (default: its own). Packed steps have none."""
        if not isinstance(self.query, UniformQuery):
            raise InvalidStepError(f"a packed {self.kind} step fits no bucket of one width; take a TokenBucket")
        return Bucket(self.kind, self.bs if bs is None else bs, self.width, self.num_steps, self.is_tree)

    @classmethod
    def prefill(
        cls,
        query: PackedQuery,
        seq_lens: Tensor,
        paging: Paging,
        out_cache_loc: Tensor | None = None,
        **host: Unpack[HostBounds],
    ) -> Self:
        """Prompt tokens after `seq_lens` cached ones (0, or the earlier chunks); causal."""
        return cls._build(StepKind.PREFILL, query, seq_lens, paging, out_cache_loc, host)

    @classmethod
    def decode(
        cls, seq_lens: Tensor, paging: Paging, out_cache_loc: Tensor | None = None, **host: Unpack[HostBounds]
    ) -> Self:
        """One new token per request."""
        return cls._build(StepKind.DECODE, UniformQuery(1), seq_lens, paging, out_cache_loc, host)

    @classmethod
    def frozen_draft(cls, seq_lens: Tensor, paging: Paging, **host: Unpack[HostBounds]) -> Self:
        """All forwards of a draft without keys of its own (Gemma-4's MTP): rows at the last committed token, which
        lies after `seq_lens` others in the target's cache, see it and those, and write nothing. Branches of a request
        are rows of their own on its row of the table. A captured decode takes it; its graph attends by
        `Metadata.reading`.
        """
        return replace(cls.decode(seq_lens, paging, **host), reads_alone=True)

    @classmethod
    def draft_decode(
        cls,
        topk: int,
        num_steps: int,
        seq_lens: Tensor,
        paging: Paging,
        out_cache_loc: Tensor | None = None,
        **host: Unpack[HostBounds],
    ) -> Self:
        """All num_steps - 1 draft forwards of topk branches; forward i processes the tokens of depth i + 1."""
        return cls._build(StepKind.DRAFT_DECODE, UniformQuery(topk), seq_lens, paging, out_cache_loc, host, num_steps)

    @classmethod
    def draft_block(
        cls,
        block_size: int,
        seq_lens: Tensor,
        paging: Paging,
        out_cache_loc: Tensor | None = None,
        **host: Unpack[HostBounds],
    ) -> Self:
        """A block of drafted tokens in one forward (DFlash, DSpark): every row sees the committed tokens and
        all rows of the block. The next block is written over it, so it commits nothing.
        """
        return cls._build(StepKind.DRAFT_BLOCK, UniformQuery(block_size), seq_lens, paging, out_cache_loc, host)

    @classmethod
    def target_verify(
        cls,
        num_draft_tokens: int | BoundedQuery,
        seq_lens: Tensor,
        paging: Paging,
        out_cache_loc: Tensor | None = None,
        *,
        tree_mask: Tensor | None = None,
        **host: Unpack[HostBounds],
    ) -> Self:
        """One row per tree node (a chain without tree_mask); node j is written to position seq_lens + j. A chain may be
        ragged: a `BoundedQuery`, whose out_cache_loc is [bs * width], the slots that each request has for the longest.
        """
        query = num_draft_tokens if isinstance(num_draft_tokens, BoundedQuery) else UniformQuery(num_draft_tokens)
        return cls._build(StepKind.TARGET_VERIFY, query, seq_lens, paging, out_cache_loc, host, 1, tree_mask)

    @classmethod
    def draft_extend(
        cls,
        query: UniformQuery | PackedQuery | BoundedQuery,
        seq_lens: Tensor,
        paging: Paging,
        out_cache_loc: Tensor | None = None,
        **host: Unpack[HostBounds],
    ) -> Self:
        """The draft catches up with what was accepted; rows past the accepted ones are overwritten next cycle. A
        `BoundedQuery` has accepted rows alone, and slots as in `target_verify`; its widths count rows that run again.
        """
        return cls._build(StepKind.DRAFT_EXTEND, query, seq_lens, paging, out_cache_loc, host)

    @classmethod
    def idle(cls, paging: Paging) -> Self:
        """No request at all: what a rank without work calls. `paging` holds no rows."""
        check_paging(paging)
        empty = torch.empty(0, dtype=torch.int32, device=paging.static_input().device)
        return cls._build(StepKind.IDLE, UniformQuery(1), empty, paging, empty, {"seq_lens_cpu": ()})

    @classmethod
    def _build(
        cls,
        kind: StepKind,
        query: UniformQuery | PackedQuery | BoundedQuery,
        seq_lens: Tensor,
        paging: Paging,
        out_cache_loc: Tensor | None,
        host: HostBounds,
        num_steps: int = 1,
        tree_mask: Tensor | None = None,
    ) -> Self:
        if not isinstance(seq_lens, Tensor) or seq_lens.ndim != 1:
            check_requests(query, num_steps, seq_lens, paging)
        bs, max_committed, exact = seq_lens.shape[0], None, None
        if host:
            max_committed, exact = host.get("max_committed"), exact_lens(bs, **host)
        return cls(kind, query, seq_lens, paging, out_cache_loc, bs, num_steps, tree_mask, max_committed, exact)


def check_is_step(step: Step) -> None:
    """Refuse what is no step."""
    if not isinstance(step, Step):
        raise InvalidStepError(f"a step is what Step's constructors return, such as Step.decode, got {describe(step)}")


def next_slots(query: AnyQuery, num_steps: int, seq_lens: Tensor, paging: Paging) -> Tensor:
    """The slots right after the committed tokens, in out_cache_loc order: 1-D int64. seq_lens: [bs] int32 or int64.

    Row j of a request takes position seq_lens + j; (branch k, step i) of a draft takes seq_lens + k * num_steps + i.
    """
    if isinstance(query, UniformQuery | BoundedQuery):
        offsets = torch.arange(query.width * num_steps, device=seq_lens.device)
        return paging.slots(seq_lens.long().unsqueeze(1) + offsets).reshape(-1)
    request, offsets = packed_rows(query)
    per_row = repeat_requests(paging, request)
    return per_row.slots((seq_lens.long()[request] + offsets).unsqueeze(1)).squeeze(1)


def repeat_requests(paging: Paging, request: Tensor) -> Paging:
    """The paging of a batch whose row i is request `request[i]` of this one. request: [n] int64."""
    return paging.on_static(paging.static_input().index_select(0, request))
