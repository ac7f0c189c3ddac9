"""FlashMLA's dense decode on a block table (SM90): `flash_mla_with_kvcache` of sgl-flash-mla 1.0, its legacy kernels.

    q [bs, width, num_heads, 576], latents [num_pages, 64, 1, 576]  ->  out [bs, width, num_heads, 512], lse

A schedule shares the blocks of keys of all requests out to the SMs, once per forward and shape of layers, and every
layer's launch reads it. Where the installed version's format is known we plan it ourselves: for a captured step in the
launch that plans it, else in one of its own (`schedule_operators.share_out`). Of another version
`get_mla_decoding_metadata` plans on one thread, 20 µs of an H200. How many parts there are follows from the number of
SMs, heads and rows, so it is the same in every step of a graph.

FlashMLA launches its kernel as a programmatic dependent (`cudaLaunchAttributeProgrammaticStreamSerialization`), which
does not wait for the grid before it (`cudaGridDependencySynchronize`; csrc/sm90/decode/dense/splitkv_mla.cuh). It may
begin before all of that grid's writes can be seen, such as keys that were stored right before. With 15 processes on
one H200, 2 of some 5,000 outputs were wrong, and right when launched again. So another launch goes between: it begins
after the store, writes nothing that FlashMLA reads, and is all that FlashMLA's may overlap with.

The log-sum-exp comes as [bs, num_heads, width], natural. Of a row without keys it is +inf where ours is -inf; that row
exists only in a tree over nothing committed, so one more launch, in steps over trees alone, turns it round.

An 8-bit cache is not declared: that kernel takes it only under queries of the same type, and rounding the caller's
queries to three bits is not ours to do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedLatent
from attn_backends.contract.capabilities import Capabilities, LseBase
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.plan_operators import PagePlanner
from attn_backends.kernels.schedule_operators import share_out
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection import providers
from spec_metadata import BufferSpec
from spec_metadata.buffers import BS, NUM_FORWARDS, ONE, Dim
from spec_metadata.capacity import UNIFORM_KINDS, ceil_div
from spec_metadata.plans.block_table import BlockTablePlan

NAME = "flashmla"
_DENSE = Capabilities(
    page_sizes=frozenset({64}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    head_sizes=frozenset({(576, 512)}),
    non_causal=True,
    lse=LseBase.NATURAL,
)

_NUM_PARTS = Dim("144", lambda e: 144)  # SMs of a whole GH100; no Hopper has more
_PART_WORDS = Dim("8", lambda e: 8)
_PARTS = BufferSpec(
    "tile_scheduler_metadata",
    torch.int32,
    (NUM_FORWARDS, _NUM_PARTS, _PART_WORDS),
    "requests and blocks of keys that each part of the GPU works on, as FlashMLA's DecodingSchedMeta",
)
_SPLITS = BufferSpec("num_splits", torch.int32, (NUM_FORWARDS, BS + 1), "first split of each request, and the end")
_FENCE = BufferSpec("fence", torch.int32, (ONE,), "written between the launches before FlashMLA's kernel and it")
_MARKS = BufferSpec("marks", torch.int32, (NUM_FORWARDS, BS, Dim("2", lambda e: 2)), "where requests begin; scratch")


class PartSchedule(Schedule):
    """The share-out for one forward and shape.

    parts: [num_parts, 8] int32 and splits: [bs + 1] int32, at the same place in every step. fence: [1] int32 that is
    never read.
    """

    def __init__(self, plan: BlockTablePlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self._lens, self._num_rows = plan.cache_seqlens, plan.width * shape.num_heads
        self.parts = buffers[_PARTS.name][: num_parts(self._num_rows, self._lens.device)]
        self.splits, self._marks = buffers[_SPLITS.name], buffers[_MARKS.name]
        self.fence = buffers[_FENCE.name]

    def refresh(self) -> None:
        """Share out again by the plan's lengths."""
        share_out(self._lens, self.parts, self.splits, self._marks)


class VendorPartSchedule(PartSchedule):
    """FlashMLA's own share-out: the definition of a valid one, and what a version of unknown format gets."""

    def refresh(self) -> None:
        """Share out again by the plan's lengths."""
        plan_by_vendor(self._lens, self._num_rows, self.parts, self.splits)


def num_parts(num_rows: int, device: torch.device) -> int:
    """Parts of a schedule, where every request has so many query rows, all heads counted: 64 are one part's work."""
    return max(gpu_of(device).num_processors // ceil_div(num_rows, 64), 1)


def plan_by_vendor(lens: Tensor, num_rows: int, parts: Tensor, splits: Tensor) -> None:
    """Write FlashMLA's own share-out of lens [n] int32 into parts and splits."""
    plan_parts = providers.load("flash_mla:get_mla_decoding_metadata")
    by_vendor = plan_parts(seqlens_k=lens, num_q_tokens_per_head_k=num_rows, h_k=1, use_legacy=True)
    for destination, planned in zip((parts, splits), by_vendor, strict=True):
        destination.copy_(planned)


def has_known_schedules() -> bool:
    """Whether the installed version reads schedules in the form that we write."""
    return (providers.version_of("sgl-flash-mla") or "").startswith("1.0.")


def _schedule(plan: BlockTablePlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> PartSchedule:
    return (PartSchedule if has_known_schedules() else VendorPartSchedule)(plan, shape, buffers)


def _along(planner: object, plan: BlockTablePlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> bool:
    """Have a fused planner write the share-outs of all forwards by the launch that plans them."""
    if not (has_known_schedules() and isinstance(planner, PagePlanner)):
        return False
    parts = buffers[_PARTS.name][:, : num_parts(plan.width * shape.num_heads, plan.cache_seqlens.device)]
    return planner.share_out(parts, buffers[_SPLITS.name], buffers[_MARKS.name])


def _launch(q: Tensor, cache: PagedCache, planned: Scheduled[BlockTablePlan], layer: AttentionLayer) -> AttentionOutput:
    plan, schedule = planned.plan, planned.schedule
    assert isinstance(cache, PagedLatent)
    assert isinstance(schedule, PartSchedule)
    shared = providers.load("flash_mla.flash_mla_interface:FlashMLASchedMeta")(
        tile_scheduler_metadata=schedule.parts, num_splits=schedule.splits
    )
    schedule.fence.zero_()
    out, lse = providers.load("flash_mla:flash_mla_with_kvcache")(
        q=q.view(-1, plan.width, *q.shape[1:]),
        k_cache=cache.latent.unsqueeze(2),
        block_table=plan.block_table,
        cache_seqlens=plan.cache_seqlens,
        head_dim_v=cache.rank,
        tile_scheduler_metadata=shared,
        softmax_scale=layer.scale,
        causal=plan.causal,
        use_legacy=True,
    )
    lse = lse.transpose(1, 2).flatten(0, 1)
    if not plan.causal:
        lse = torch.nan_to_num(lse, nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"))
    return AttentionOutput(out.flatten(0, 1), lse)


def unavailable_reasons(device: torch.device) -> list[str]:
    """Reasons why it can't run on a device: as any vendor's kernel, or a wheel that was built without the legacy
    kernels.
    """
    reasons = providers.vendor_reasons(NAME)(device)
    if not reasons and not providers.load("flash_mla:has_legacy")():
        reasons = [f"sgl-flash-mla has no legacy kernels: {providers.load('flash_mla._loader:_LEGACY_UNAVAILABLE')}"]
    return reasons


KERNEL = Kernel(
    NAME,
    _launch,
    dict.fromkeys(UNIFORM_KINDS, _DENSE),
    unavailable_reasons,
    architectures=frozenset({9}),
    schedule=_schedule,
    workspaces=(_PARTS, _SPLITS, _MARKS),
    along=_along,
    scratch=(_FENCE,),
)
