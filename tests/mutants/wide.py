"""A correct backend that declares windows over chains alone, and takes sinks in a launch of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.backends.reference import ReferenceBackend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.contract.kernel import Kernel
from attn_backends.kernels.torch_attention import attend
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection.providers import runs_anywhere
from spec_metadata import StepKind
from spec_metadata.capacity import UNIFORM_KINDS
from spec_metadata.plans import slots

_EXTRAS = {"tree_window": False, "cache_dtypes": frozenset()}
_CAPABILITIES = {
    kind: replace(declared, **_EXTRAS)
    for kind, declared in ReferenceBackend.kernels[-1].capabilities.items()
    if kind in UNIFORM_KINDS and kind is not StepKind.DRAFT_BLOCK
}


def launch(q: Tensor, cache: PagedCache, plan: slots.SlotPlan, layer: AttentionLayer) -> AttentionOutput:
    """Attention over slot lists with all extras of a layer."""
    k, v = cache.read(plan.slots)
    index, end = torch.arange(k.shape[1], device=q.device), plan.num_visible.unsqueeze(1)
    visible = (index < end) & (index >= end - (layer.window or k.shape[1]))
    scaled = ((k * layer.k_scale)[plan.request], (v * layer.v_scale)[plan.request])
    keys, values = (torch.where(visible[..., None, None], x, 0) for x in scaled)
    out, lse = (x.squeeze(1) for x in attend(q.unsqueeze(1), keys, values, visible.unsqueeze(1), layer.scale))
    if layer.sinks is not None:
        out = out * (lse - torch.logaddexp(lse, layer.sinks.to(lse.dtype))).exp().unsqueeze(-1)
    return AttentionOutput(out.to(q.dtype), lse)


class WideBackend(ReferenceBackend):
    """Slot lists, with windows, sinks and scaled keys and values."""

    name = "wide"
    formats = frozenset({CacheFormat.KV})
    kernels = (Kernel("torch", launch, _CAPABILITIES, runs_anywhere),)
