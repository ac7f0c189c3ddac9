"""Grouped-query attention on sequence-major slot tables: a backend in a package of its own.

    out[t] = softmax(scale * q[t] @ k[visible(t)].T) @ v[visible(t)]

Column r of the table lists the slots of request r, so that neighbouring requests lie beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_backends import (
    AttentionBackend,
    AttentionLayer,
    AttentionOutput,
    CacheFormat,
    Capabilities,
    Kernel,
    LseBase,
    PagedCache,
    PagedKV,
)
from spec_metadata import (
    BS,
    MAX_KV_LEN,
    NUM_FORWARDS,
    NUM_TOKENS,
    Buffers,
    BufferSpec,
    Step,
    StepKind,
    dense_part,
    query_starts,
)

BUFFERS = (
    BufferSpec(
        "slot_table",
        torch.int32,
        (MAX_KV_LEN, BS),
        "slot of each token position; a reserved slot past those that the last forward sees",
    ),
    BufferSpec("request", torch.int64, (NUM_TOKENS,), "request of each query row", high=BS),
    BufferSpec("num_keys", torch.int32, (NUM_FORWARDS, NUM_TOKENS), "keys that a query row sees", high=MAX_KV_LEN + 1),
)


@dataclass(frozen=True, slots=True, eq=False)
class SlotTablePlan:
    """One forward: row t belongs to `request[t]` and sees the first `num_keys[t]` slots of that column."""

    slot_table: Tensor
    request: Tensor
    num_keys: Tensor


def view_slot_tables(step: Step, buffers: Buffers) -> tuple[SlotTablePlan, ...]:
    """The plan of each forward of a step, as views of the buffers."""
    tables = buffers["slot_table"], buffers["request"]
    return tuple(SlotTablePlan(*tables, num_keys) for num_keys in buffers["num_keys"].unbind())


def write_slot_tables(step: Step, buffers: Buffers) -> None:
    """Write the slot table of a step, which its forwards share, and how much of it each one sees."""
    last = dense_part(step, step.num_forwards - 1)
    position = torch.arange(buffers.extent.max_kv_len, device=step.device).unsqueeze(1)
    slots = step.paging.slots(position.T.expand(step.bs, -1)).T
    reserved = step.paging.geometry.reserved_page * step.paging.geometry.page_size
    buffers["slot_table"].copy_(torch.where(position < last.kv_lens, slots, reserved))

    row = torch.arange(step.num_tokens, device=step.device)
    ends = query_starts(step)[1:].long()
    request = torch.searchsorted(ends, row, right=True)
    buffers["request"].copy_(request)
    for forward, num_keys in enumerate(buffers["num_keys"].unbind()):
        dense = dense_part(step, forward)
        rows_after = ends[request] - 1 - row if dense.causal else 0
        num_keys.copy_(dense.kv_lens[request] - rows_after)


def launch_torch(q: Tensor, cache: PagedCache, plan: SlotTablePlan, layer: AttentionLayer) -> AttentionOutput:
    """Attention of q [num_tokens, num_heads, head_dim]; out in q's dtype, and the natural log-sum-exp."""
    assert isinstance(cache, PagedKV)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    position = torch.arange(plan.slot_table.shape[0], device=q.device).unsqueeze(1)
    visible = (position < plan.num_keys)[..., None, None]
    # What a row does not see may be NaN in memory that nobody owns: it is replaced, never multiplied by zero.
    entries = zip(cache.read(plan.slot_table.long()), (layer.k_scale, layer.v_scale), strict=True)
    k, v = (torch.where(visible, x[:, plan.request].to(dtype) * scale, 0) for x, scale in entries)
    grouped = q.to(dtype).reshape(len(q), layer.num_kv_heads, -1, layer.head_dim)
    scores = torch.einsum("thgd,pthd->pthg", grouped, k) * layer.scale
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.where(visible, scores.softmax(0), 0)  # a row that sees nothing gets 0, and an LSE of -inf
    out = torch.einsum("pthg,pthd->thgd", weights, v)
    return AttentionOutput(out.flatten(1, 2).to(q.dtype), scores.logsumexp(0).flatten(1, 2))


UNIFORM = Capabilities(
    page_sizes=None,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16}),
    cache_dtypes=frozenset({torch.float8_e4m3fn}),
    non_causal=True,
    lse=LseBase.NATURAL,
    kv_scales=True,
)
PACKED = replace(UNIFORM, packed=True)
CAPABILITIES = {
    StepKind.PREFILL: PACKED,
    StepKind.DECODE: UNIFORM,
    StepKind.DRAFT_DECODE: UNIFORM,
    StepKind.TARGET_VERIFY: UNIFORM,
    StepKind.DRAFT_EXTEND: PACKED,
}


def no_reasons(device: torch.device) -> list[str]:
    """Why the kernel can't run on a device: torch runs on all."""
    return []


class SeqMajorBackend(AttentionBackend[SlotTablePlan]):
    """Grouped-query attention on sequence-major slot tables."""

    name = "seqmajor"
    formats = frozenset({CacheFormat.KV})
    kernels = (Kernel("torch", launch_torch, CAPABILITIES, no_reasons),)

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """The slot table, for every kind."""
        return BUFFERS

    def plans(self, step: Step, buffers: Buffers) -> tuple[SlotTablePlan, ...]:
        """The slot table of each forward, one for all."""
        return view_slot_tables(step, buffers)

    def write(self, step: Step, buffers: Buffers) -> None:
        """Write the slot table of all forwards."""
        write_slot_tables(step, buffers)
