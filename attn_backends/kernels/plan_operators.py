"""Fused planners: all metadata of a step in one launch, as operators of `torch.library`.

    plan_pages        page lists of dense attention: ragged, block table, CSR
    plan_compressed   windows, entries and compressor rows of dsv4

The definition of what they write are the functions `write_*` of `spec_metadata.plans`, and `spec_metadata.write_slots`.
They are equal to them in every element that a kernel may read, and leave the rest as it is. They
read the step's tensors on the device, of either integer type and any stride. There is Triton alone: on a CPU they run
where its interpreter does (TRITON_INTERPRET=1), for tests.

`bind_*` look a step and its buffers up once; what they return plans again with every call. A captured step that is
bound to an engine's buffers is read from those and written by the same launch, as `BoundStep.read` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attn_backends.kernels.devices import is_watched, on_its_device, undispatched
from attn_backends.kernels.tile_sizes import TileSizes
from attn_backends.kernels.work_operators import WorkLists
from spec_metadata import BoundStep, Buffers, Paging, RequestTable, Step, StepKind, UniformQuery
from spec_metadata.errors import InvalidStepError
from spec_metadata.plans.compressed import INDEX_GROUP, Compression
from spec_metadata.plans.csr import page_lists
from spec_metadata.query import packed_starts
from spec_metadata.visibility import num_added

if TYPE_CHECKING:
    from attn_backends.kernels.triton_launch import Prepared

_STEP = (
    "Tensor seq_lens, Tensor? num_real, Tensor? query_starts, Tensor? out_cache_loc, Tensor table, Tensor? rows, "
    "Tensor? tree_mask, Tensor? widths, Tensor(z!)[] captured, int[] bound"
)
_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    f"plan_pages({_STEP}, Tensor(a!)? starts, Tensor(b!)? page_starts, Tensor(c!) lens, Tensor(d!) pages, "
    "Tensor(e!) write_slots, Tensor(f!)[] along, int[] listed, int width, int num_steps, int unseen, int advance, "
    "int page_size, int reserved_page, int known_real, int max_pages) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"plan_compressed({_STEP}, Tensor(a!) starts, Tensor(b!) request, Tensor(c!) page_table, Tensor(d!) window_slots, "
    "Tensor(e!) window_lens, Tensor(f!) write_slots, Tensor(g!)[] entries, int[] ratios, int[] rings, "
    "int[] read_windows, int over_read, int window, int is_block, int width, int num_steps, int unseen, int advance, "
    "int page_size, int reserved_page, int known_real) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_NUM_COUNTS = 8  # numbers that end the arguments of plan_pages
_ENTRY_BUFFERS = ("num_entries", "state_writes", "entry_writes", "entry_positions", "input_rows", "state_reads")


class StepInputs(NamedTuple):
    """Tensors of a step that an operator reads: num_real that the device knows, query_starts of a packed query,
    out_cache_loc that was not left out, rows of a request table. Of a bound step they are the engine's, with the widths
    of a ragged one.

    captured: what a bound step writes: seq_lens, num_real, out_cache_loc, the static paging, bytes of the tree mask,
    and row starts. For what it has not stands any tensor. bound: `BoundSizes`.
    """

    seq_lens: Tensor
    num_real: Tensor | None
    query_starts: Tensor | None
    out_cache_loc: Tensor | None
    table: Tensor
    rows: Tensor | None
    tree_mask: Tensor | None = None
    widths: Tensor | None = None
    captured: Sequence[Tensor] = ()
    bound: Sequence[int] = ()

    @property
    def bs(self) -> int:
        """Requests of the step, padded ones too."""
        return (self.captured[0] if self.captured else self.seq_lens).shape[0]

    @staticmethod
    def of(step: Step, bound: BoundStep | None) -> StepInputs:
        """Inputs of a step, or of the engine's buffers that it is bound to."""
        if bound is not None:
            return _bound_inputs(bound)
        num_real = step.num_real if isinstance(step.num_real, Tensor) else None
        starts, paging = packed_starts(step.query), step.paging
        return StepInputs(step.seq_lens, num_real, starts, step.out_cache_loc, paging.table, _rows(paging))


class BoundSizes(NamedTuple):
    """Bounds of what an engine's buffers hold, and strides. included: rows that lengths count beside committed tokens;
    1 if those of a ragged step count widths. most: committed tokens that are taken. num_rows: of a table of slots.
    num_columns, paging_stride: of the captured paging. num_requests: of the engine; a ragged step has some more.
    num_tokens: bound on the rows of all.
    """

    included: int
    most: int
    num_pages: int
    num_rows: int
    reserved_row: int
    num_columns: int
    paging_stride: int
    mask_stride: int
    mask_row_stride: int
    mask_column_stride: int
    num_requests: int
    num_tokens: int
    widths_stride: int


def bind_ragged(step: Step, buffers: Buffers, bound: BoundStep | None = None) -> Callable[[], None]:
    """A planner of the ragged form of a step and its write slots. buffers: as the plan's, and `write_slots`. bound: an
    engine's buffers that the same launch reads the step from, or None.
    """
    outputs = (buffers["cu_seqlens_q"], None, buffers["seqused_k"], buffers["page_table"])
    return _bind_pages(step, buffers, bound, outputs, _keys(step))


def bind_block_table(step: Step, buffers: Buffers, bound: BoundStep | None = None) -> Callable[[], None]:
    """A planner of the block table of a uniform step and its write slots. Else as `bind_ragged`."""
    if not isinstance(step.query, UniformQuery):
        raise InvalidStepError(f"a block table has one query stride, the {step.kind} step is packed: {step.query}")
    outputs = (None, None, buffers["cache_seqlens"], buffers["block_table"])
    return _bind_pages(step, buffers, bound, outputs, _keys(step))


def bind_csr(step: Step, buffers: Buffers, bound: BoundStep | None = None) -> Callable[[], None]:
    """A planner of the page lists of a step and its write slots. Else as `bind_ragged`."""
    outputs = (buffers["qo_indptr"], buffers["kv_indptr"], buffers["kv_len"].unsqueeze(0), page_lists(buffers))
    return _bind_pages(step, buffers, bound, outputs, (step.width - num_added(step, None), 0))


def bind_compressed(
    step: Step, buffers: Buffers, window: int, rings: Mapping[Compression, int], bound: BoundStep | None = None
) -> Callable[[], None]:
    """A planner of the windows, entries and compressor rows of a step, and its write slots. Else as `bind_ragged`.

    window: tokens of it. rings: state rows of a page, of each compression.
    """
    is_block = step.kind is StepKind.DRAFT_BLOCK
    assert buffers["window_slots"].shape[-1] >= window + is_block * step.width, "buffers of another window"
    names = ("qo_indptr", "request", "page_table", "window_slots", "window_lens", "write_slots")
    entries = []
    for compression in rings:
        own = [buffers[f"{name}_{compression.ratio}"] for name in _ENTRY_BUFFERS]
        no_slots = own[0].unsqueeze(-1)[..., :0]
        entries += [*own, no_slots if compression.indexed else buffers[f"entry_slots_{compression.ratio}"]]
    ratios, read_windows = [each.ratio for each in rings], [each.read_window for each in rings]
    outputs = [buffers[name] for name in names]
    lists = (entries, ratios, list(rings.values()), read_windows)
    inputs = StepInputs.of(step, bound)
    return Repeated(
        "plan_compressed", *inputs, *outputs, *lists, INDEX_GROUP, window, int(is_block), *_sizes(step, _keys(step))
    )


def _keys(step: Step) -> tuple[int, int]:
    """Rows whose keys the last row of a step's requests does not see, and keys that it sees more in each forward."""
    first = num_added(step, 0)
    return step.width - first, num_added(step, 1) - first


def _sizes(step: Step, keys: tuple[int, int]) -> tuple[int, ...]:
    """Of a step as operators take them, `width` to `known_real`: num_real where the host knows it. keys: as `_keys`."""
    geometry, known_real = step.paging.geometry, 0 if isinstance(step.num_real, Tensor) else step.num_real
    return (step.width, step.num_steps, *keys, geometry.page_size, geometry.reserved_page, known_real)


def _bind_pages(
    step: Step,
    buffers: Buffers,
    bound: BoundStep | None,
    outputs: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    keys: tuple[int, int],
) -> Callable[[], None]:
    inputs, sizes = StepInputs.of(step, bound), (*_sizes(step, keys), buffers.extent.max_pages)
    return PagePlanner("plan_pages", *inputs, *outputs, buffers["write_slots"], (), (), *sizes)


class Repeated:
    """A plan, launched with every call. The first call, often the only one, is of its operator, and so is any that a
    dispatch mode watches, such as a `RecordedGraph`. Others launch what was compiled then, without a look at arguments.
    """

    def __init__(self, name: str, *arguments: Any) -> None:
        self._name, self._arguments, self._num_calls = name, arguments, 0
        self._direct: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Launch."""
        if self._num_calls == 1:
            self._direct = self.prepared().bind()
        self._num_calls += 1
        if self._direct is None or is_watched():
            _OPERATORS[self._name](*self._arguments)
        else:
            self._direct()

    def prepared(self) -> Prepared:
        """The launch with its arguments."""
        return _PREPARED[self._name](*self._arguments)


class PagePlanner(Repeated):
    """A planner of page lists and write slots, and of a vendor's schedule in the same launch."""

    def share_out(self, parts: Tensor, splits: Tensor, marks: Tensor) -> bool:
        """Write FlashMLA's share-outs of all forwards along from now on; False where others are written already.

        parts: [num_forwards, num_parts, 8] int32, splits: [num_forwards, bs + 1] int32 and marks: [num_forwards, bs, 2]
        int32, as of `schedule_operators.share_out`, of a request or more.
        """
        return self._write_along((parts, splits, marks), ())

    def list_work(self, lists: WorkLists, num_tokens: int, num_heads: int, causal: bool) -> bool:
        """Write FlashInfer's work lists along from now on; False where another schedule is written already.
        Arguments as of `work_operators.list_work`, of CSR of one length a request.
        """
        return self._write_along(lists, (num_tokens, num_heads, int(causal)))

    def split_tiles(self, words: Tensor, tiles: TileSizes) -> bool:
        """Write FlashAttention-3's scheduler metadata of all forwards along from now on; False where another schedule
        is written already. words: [num_forwards, words] int32, of a request or more: rows, splits and heads, the kinds
        that `tiles` has, [stride] each, then the counter of tiles, 0.
        """
        return self._write_along((words,), tiles)

    def _write_along(self, tensors: Sequence[Tensor], listed: Sequence[int]) -> bool:
        *own, along, numbers = self._arguments[:-_NUM_COUNTS]
        if along or numbers:
            return False
        self._arguments = (*own, tensors, listed, *self._arguments[-_NUM_COUNTS:])
        self._num_calls, self._direct = 0, None
        return True


def _rows(paging: Paging) -> Tensor | None:
    return paging.rows if isinstance(paging, RequestTable) else None


def _bound_inputs(bound: BoundStep) -> StepInputs:
    static, inputs, paging = bound.static, bound.inputs, bound.paging
    table, geometry, mask = static.paging.static_input(), paging.geometry, inputs.tree_mask
    rows, widths, starts = _rows(paging), inputs.widths, packed_starts(static.query)
    of_mask = (0, 0, 0) if mask is None else mask.stride()
    added = static.num_added_at_least if widths is None else 1
    included = added if inputs.lens_include_rows else 0
    bounds = (included, bound.most, geometry.num_pages, paging.table.shape[0], geometry.reserved_row)
    ragged = (paging.bs, static.num_tokens, 0 if widths is None else widths.stride(0))
    sizes = BoundSizes._make((*bounds, table.shape[-1], table.stride(0), *of_mask, *ragged))
    nodes = None if static.tree_mask is None else static.tree_mask.view(torch.uint8)
    captured = [static.seq_lens, static.num_real, static.out_cache_loc, table, nodes, starts]
    return StepInputs(
        inputs.seq_lens,
        inputs.num_real,
        None,
        inputs.out_cache_loc,
        paging.table,
        rows,
        None if mask is None else mask.view(torch.uint8),
        widths,
        [each if isinstance(each, Tensor) else static.seq_lens for each in captured],
        sizes,
    )


def _pages(*arguments: Any) -> Prepared:
    num, counts = len(StepInputs._fields), arguments[-_NUM_COUNTS:]
    inputs, (*outputs, along, listed) = StepInputs(*arguments[:num]), arguments[num:-_NUM_COUNTS]
    if len(along) == 1:
        from attn_backends.kernels import triton_plan_tiles

        return triton_plan_tiles.plan_and_split(inputs, outputs, along[0], TileSizes(*listed), *counts)
    if listed:
        from attn_backends.kernels import triton_plan_work

        return triton_plan_work.plan_and_list(inputs, outputs, WorkLists(*along), listed, *counts)
    from attn_backends.kernels import triton_plan

    return triton_plan.plan_pages(inputs, *outputs, along, *counts)


def _compressed(*arguments: Any) -> Prepared:
    from attn_backends.kernels import triton_plan_compressed
    from attn_backends.kernels.triton_plan_entries import Entries

    num, each = len(StepInputs._fields), len(_ENTRY_BUFFERS) + 1
    starts, request, pages, slots, lens, writes, entries, ratios, rings, read_windows, *rest = arguments[num:]
    found = [Entries(*entries[i : i + each]) for i in range(0, len(entries), each)]
    compressions = list(zip(ratios, rings, read_windows, strict=True))
    outputs = (starts, request, pages, slots, lens, writes)
    return triton_plan_compressed.plan_compressed(StepInputs(*arguments[:num]), *outputs, found, compressions, *rest)


def _launched(prepare: Callable[..., Prepared]) -> Callable[..., None]:
    @on_its_device
    def launch(first: Tensor, *rest: Any) -> None:
        prepare(first, *rest)()

    return launch


_PREPARED: dict[str, Callable[..., Prepared]] = {"plan_pages": _pages, "plan_compressed": _compressed}
_OPERATORS: dict[str, Callable[..., None]] = {}
for _name, _prepare in _PREPARED.items():
    _launch = _launched(_prepare)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _launch, _key)
    _OPERATORS[_name] = undispatched(getattr(torch.ops.attn_backends, _name).default, _launch)
    torch.library.register_fake(f"attn_backends::{_name}", lambda *_: None, lib=_library)
