"""FlashMLA's sparse decode over 8-bit pages (SM90): `flash_mla_with_kvcache` of sgl-flash-mla 1.0, its legacy kernels.

    q [num_tokens, 1, 64 or 128, 512], rows and entries as pages [num_pages, rows of a page, 1, 584], and for each row
    the slots of its window and of its entries, valid ones first  ->  out [num_tokens, 1, 64 or 128, 512], lse

Every query row is a request of its own to the kernel, which takes one length a request. Heads are padded, with zeros
and with sinks of -inf. The kernel puts windows and entries under one softmax and multiplies the sink in once, at the
end; the log-sum-exp is natural and without it.

Left to itself, a launch plans first which SM reads which keys: 22 µs on an H200, where attention of 8 rows over 640
keys each takes 17. So that is planned once per forward and kind of layer, on the device, into declared buffers, by the
same one launch as the dense kernel's schedule.

Prefill is the same kernel on the same flattened rows: 1.2 ms for 4096 rows of 64 heads over 640 keys each, on an H200,
and a float32 accumulator of every row, 128 KiB. FlashMLA's prefill kernel takes half of that time, but keys that were
gathered and widened to bfloat16 before, and of how many of them a forward sees the host knows only the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends.compressed_cache import CompressedCache, Fp8Pages
from attn_backends.contract.capabilities import FP8_TYPES, Capabilities, LseBase, of_listed
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.fp8_pages import ROW_DIM
from attn_backends.kernels.schedule_operators import share_out
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection import providers
from attn_backends.vendors import flashmla
from spec_metadata import BufferSpec
from spec_metadata.buffers import NUM_FORWARDS, NUM_TOKENS, Dim
from spec_metadata.plans.compressed import INDEX_GROUP, CompressedPlan

NAME = "flashmla_sparse"
_HEAD_GROUP = 64  # it is built for one and two groups of heads
_MOST_OUTPUTS = 2**31
"""Elements of outputs. 64 rows fewer were right, at 2**32 its merge of splits broke the CUDA context (H100), between
them nothing was tried.
"""
_SPARSE = Capabilities(
    page_sizes=None,
    dtypes=frozenset({torch.bfloat16}),
    head_sizes=frozenset({(ROW_DIM, ROW_DIM)}),
    query_heads=frozenset(range(1, 2 * _HEAD_GROUP + 1)),
    packed=True,
    packed_graph=True,
    lse=LseBase.NATURAL,
    window=True,
    sinks=True,
    cache_dtypes=FP8_TYPES,
    own_cache=False,
)
_NUM_PARTS = Dim("144", lambda e: 144)  # SMs of a whole GH100; no Hopper has more
_PART_WORDS = Dim("8", lambda e: 8)
_PARTS = BufferSpec(
    "tile_scheduler_metadata",
    torch.int32,
    (NUM_FORWARDS, _NUM_PARTS, _PART_WORDS),
    "rows and groups of keys that each part of the GPU works on, as FlashMLA's DecodingSchedMeta",
)
_SPLITS = BufferSpec("num_splits", torch.int32, (NUM_FORWARDS, NUM_TOKENS + 1), "first split of each row, and the end")
_MARKS = BufferSpec(
    "marks", torch.int32, (NUM_FORWARDS, NUM_TOKENS, Dim("2", lambda e: 2)), "where rows begin; scratch"
)
_ENTRY_LENS = BufferSpec("entry_lens", torch.int32, (NUM_FORWARDS, NUM_TOKENS), "entries that a row attends to")


class RowSchedule(Schedule):
    """FlashMLA's share-out for one forward and kind of layer.

    parts: [num_parts, 8] int32, splits: [num_tokens + 1] int32, entry_lens: [num_tokens] int32, at the same place in
    every step.
    """

    def __init__(self, plan: CompressedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        assert isinstance(shape.variant, tuple)
        compression, topk = shape.variant
        self._window_lens, self._num_heads = plan.window_lens, _padded_heads(shape.num_heads)
        num_tokens = plan.window_lens.shape[0]
        if num_tokens * self._num_heads * ROW_DIM >= _MOST_OUTPUTS:
            most = (_MOST_OUTPUTS - 1) // (self._num_heads * ROW_DIM)
            raise UnsupportedStepError(
                NAME,
                [f"{num_tokens} query rows of {shape.num_heads} heads (it takes {most}; prefill in smaller chunks)"],
            )
        self._num_visible = None if compression is None else plan.entries[compression.ratio].num_visible
        self._most = topk or 2**30
        self.parts = buffers[_PARTS.name][: flashmla.num_parts(self._num_heads, plan.window_lens.device)]
        self.splits, self._marks = buffers[_SPLITS.name], buffers[_MARKS.name]
        self.entry_lens = buffers[_ENTRY_LENS.name]

    def refresh(self) -> None:
        """Share out again by the plan's lengths."""
        entries = {} if self._num_visible is None else {"more_lens": self._num_visible, "read_lens": self.entry_lens}
        share_out(self._window_lens, self.parts, self.splits, self._marks, most=self._most, **entries)


class VendorRowSchedule(RowSchedule):
    """FlashMLA's own share-out: the definition of a valid one, and what a version of unknown format gets.

    Only a launch can plan for windows and entries. But FlashMLA distributes groups of 64 keys by one scheduler for all
    kernels. So the planning call of its dense kernel, which is recordable, does it for as many keys as there are in
    whole groups of either pool.
    """

    def refresh(self) -> None:
        """Share out again by the plan's lengths."""
        keys = _whole_groups(self._window_lens)
        if self._num_visible is not None:
            self.entry_lens.copy_(self._num_visible.clamp(max=self._most))
            keys = keys + _whole_groups(self.entry_lens)
        flashmla.plan_by_vendor(keys, self._num_heads, self.parts, self.splits)


def _schedule(plan: CompressedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> RowSchedule:
    return (RowSchedule if flashmla.has_known_schedules() else VendorRowSchedule)(plan, shape, buffers)


class Selection(Protocol):
    """The arguments of a launch, from the backend."""

    @property
    def planned(self) -> CompressedPlan | Scheduled[CompressedPlan]:
        """The plan and its schedule."""

    @property
    def entry_slots(self) -> Tensor | None:
        """[num_tokens, num_entries] int32, entries that each row attends to and then -1; None without compression."""


def _launch(q: Tensor, cache: Any, selected: Selection, layer: AttentionLayer) -> AttentionOutput:
    assert isinstance(selected.planned, Scheduled)
    assert isinstance(cache, CompressedCache)
    plan, schedule = selected.planned.plan, selected.planned.schedule
    assert isinstance(schedule, RowSchedule)
    extra = {}
    if selected.entry_slots is not None:
        assert cache.compressor is not None
        extra = {
            "extra_k_cache": _pages(cache.compressor.entries, layer),
            "extra_indices_in_kvcache": _slots(selected.entry_slots),
            "extra_topk_length": schedule.entry_lens,
        }
    missing = _padded_heads(layer.num_heads) - layer.num_heads
    shared = providers.load("flash_mla.flash_mla_interface:FlashMLASchedMeta")(
        tile_scheduler_metadata=schedule.parts, num_splits=schedule.splits
    )
    out, lse = providers.load("flash_mla:flash_mla_with_kvcache")(
        q=pad(q, (0, 0, 0, missing)).unsqueeze(1),
        k_cache=_pages(cache.rows, layer),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=ROW_DIM,
        tile_scheduler_metadata=shared,
        softmax_scale=layer.scale,
        is_fp8_kvcache=True,
        indices=_slots(plan.window_slots),
        attn_sink=None if layer.sinks is None else pad(layer.sinks.float(), (0, missing), value=float("-inf")),
        topk_length=plan.window_lens,
        use_legacy=True,
        **extra,
    )
    return AttentionOutput(out[:, 0, : layer.num_heads], lse[:, : layer.num_heads, 0])


def _padded_heads(num_heads: int) -> int:
    """Heads that the kernel is launched with."""
    return num_heads + -num_heads % _HEAD_GROUP


def _whole_groups(lens: Tensor) -> Tensor:
    return (lens + (INDEX_GROUP - 1)) & -INDEX_GROUP


def _slots(slots: Tensor) -> Tensor:
    """Slots [num_tokens, n] as [num_tokens, 1, n], n filled up with -1 to whole groups."""
    missing = -slots.shape[1] % INDEX_GROUP
    return (slots if missing == 0 else pad(slots, (0, missing), value=-1)).unsqueeze(1)


def _pages(pool: object, layer: AttentionLayer) -> Tensor:
    if not isinstance(pool, Fp8Pages):
        raise UnsupportedStepError(
            f"{NAME} layer {layer.id}", [f"a pool of {type(pool).__name__} (it takes Fp8Pages, the 8-bit page format)"]
        )
    return pool.rows_view


def unavailable_reasons(device: torch.device) -> list[str]:
    """Reasons why it can't run on a device: as any vendor's kernel, or as FlashMLA's other legacy kernel."""
    return providers.vendor_reasons(NAME)(device) or flashmla.unavailable_reasons(device)


KERNEL: Kernel[CompressedPlan] = Kernel(
    NAME,
    _launch,
    of_listed(_SPARSE),
    unavailable_reasons,
    architectures=frozenset({9}),
    schedule=_schedule,
    workspaces=(_PARTS, _SPLITS, _MARKS, _ENTRY_LENS),
)
