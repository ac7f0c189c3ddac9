"""FlashAttention-3's scheduler metadata: how many splits each request's keys get, in which order tiles run.

A package's own `get_scheduler_metadata` makes it, in one launch and a copy. Where the installed version's format and
tiles are known, the launch that plans a captured step writes the same words along (`kernels.triton_plan_tiles`):

    rows of each request | splits of its keys, if any has more than one | heads beside each other, under a mask | 0

each kind in a run of whole 16 bytes, and last the counter that tiles are drawn from, which every launch leaves at 0.
Splits follow from tiles, whose sizes are the kernel's (hopper/tile_size.h). The most splits, and the rows that a query
token fills, are read off the package's own words at capture, for one request that is as long as any may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attn_backends.contract.kernel import LayerShape, Schedule
from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.plan_operators import PagePlanner
from attn_backends.kernels.tile_sizes import tile_sizes
from attn_backends.selection import providers
from spec_metadata import BufferSpec
from spec_metadata.buffers import NUM_FORWARDS, Dim
from spec_metadata.capacity import ceil_div
from spec_metadata.plans.ragged import RaggedPlan
from spec_metadata.visibility import BlockRows

MLA_SIZES = (576, 512)
_MOST_REQUESTS = 992  # of one block of the vendor's threads; with more it writes no splits

# At most four numbers a request, each kind in a run of whole 16 bytes, then a counter; 16 bytes keep forwards aligned.
METADATA = BufferSpec(
    "scheduler_metadata",
    torch.int32,
    (NUM_FORWARDS, Dim("4 * round_up(bs, 4) + 4", lambda e: 16 * ceil_div(e.bs, 4) + 4)),
    "splits and order of the tiles of each request, and the counter that tiles are drawn from",
)


class TileSchedule(Schedule):
    """The scheduler metadata of one forward and shape. metadata: [words] int32, at the same place in every step.
    prepare: where the package's own function is, as of `providers.load`.
    """

    def __init__(self, prepare: str, plan: RaggedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self._prepare, self._workspace = prepare, buffers[METADATA.name]
        self._arguments = _arguments(plan, shape)
        self.metadata = self._workspace[:0]

    def refresh(self) -> None:
        """Make it again from the plan's lengths."""
        made = providers.load(self._prepare)(**self._arguments)
        self.metadata = self._workspace[: made.shape[0]]
        self.metadata.copy_(made)


def split_along(
    prepare: str, planner: object, plan: RaggedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]
) -> bool:
    """Have a fused planner write the scheduler metadata of all forwards by the launch that plans them."""
    if not isinstance(planner, PagePlanner) or plan.seqused_k.shape[0] > _MOST_REQUESTS:
        return False
    arguments = _arguments(plan, shape)
    starts = torch.tensor([0, plan.max_seqlen_q], dtype=torch.int32, device=plan.seqused_k.device)
    longest = {"cu_seqlens_q": starts, "cache_seqlens": torch.full_like(starts[:1], plan.max_seqlen_k)}
    words = providers.load(prepare)(**(arguments | longest | {"batch_size": 1})).tolist()
    sizes = tile_sizes(words, arguments, gpu_of(plan.seqused_k.device).num_processors)
    return planner.split_tiles(buffers[METADATA.name], sizes)


def is_causal(plan: RaggedPlan, window: int | None) -> bool:
    """Whether the kernel masks. A last row sees all keys, and a launch of nothing else is a tenth faster without."""
    return plan.causal and (plan.max_seqlen_q > 1 or window is not None)


def window_of(plan: RaggedPlan, window: int | None) -> tuple[int, int]:
    """(keys before the row's own, keys after it), -1 for all; rows are the last tokens of what is seen. `is_causal`
    decides about the latter, but in a draft block, whose rows see all that come after them.
    """
    return (-1, -1) if window is None else (window - 1, -1 if isinstance(plan.drafted, BlockRows) else 0)


def _arguments(plan: RaggedPlan, shape: LayerShape) -> dict[str, Any]:
    head_dim, v_head_dim = _head_sizes(shape)
    return {
        "batch_size": plan.seqused_k.shape[0],
        "max_seqlen_q": plan.max_seqlen_q,
        "max_seqlen_k": plan.max_seqlen_k,
        "num_heads_q": shape.num_heads,
        "num_heads_kv": shape.num_kv_heads,
        "headdim": head_dim,
        "cache_seqlens": plan.seqused_k,
        "qkv_dtype": shape.dtype,
        "headdim_v": v_head_dim,
        "cu_seqlens_q": plan.cu_seqlens_q,
        "page_size": plan.page_size,
        "causal": is_causal(plan, shape.window),
        "window_size": window_of(plan, shape.window),
    }


def _head_sizes(shape: LayerShape) -> tuple[int, int]:
    """Of queries and of values, as the kernel takes them: of MLA the rotated part, and the latent."""
    sizes = (shape.head_dim, shape.v_head_dim)
    return (sizes[0] - sizes[1], sizes[1]) if sizes == MLA_SIZES else sizes
