"""The reference: attention row by row over slot lists, for any cache format. Slow and plain.

out[t] = softmax(scale * q[t] @ k[slots(t)].T) @ v[slots(t)], of a sliding window the last slots of these alone, with
sinks the share of the softmax that they leave.
"""

from __future__ import annotations

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.contract.capabilities import TORCH, of_dense
from attn_backends.contract.kernel import Kernel
from attn_backends.kernels.torch_attention import slot_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection.providers import runs_anywhere
from spec_metadata import Buffers, BufferSpec, Step, StepKind
from spec_metadata.plans import slots
from spec_metadata.visibility import windowed

_TORCH = of_dense(TORCH)


def _launch_torch(q: Tensor, cache: PagedCache, plan: slots.SlotPlan, layer: AttentionLayer) -> AttentionOutput:
    k, v = cache.read(plan.slots)
    scales, window = (layer.scale, layer.k_scale, layer.v_scale), windowed(layer.window, plan.drafted)
    return AttentionOutput(*slot_attention(q, k, v, plan.request, plan.num_visible, *scales, *window, layer.sinks))


class ReferenceBackend(AttentionBackend[slots.SlotPlan]):
    """Attention over slot lists, the definition that the others are read against."""

    name = "reference"
    formats = frozenset({CacheFormat.KV, CacheFormat.LATENT})
    kernels = (Kernel("torch", _launch_torch, _TORCH, runs_anywhere),)

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """Slot lists, for every kind."""
        return slots.BUFFERS

    def plans(self, step: Step, buffers: Buffers) -> tuple[slots.SlotPlan, ...]:
        """The slot lists of each forward."""
        return slots.view_slot_lists(step, buffers)

    def write(self, step: Step, buffers: Buffers) -> None:
        """Write the slot lists of all forwards."""
        slots.write_slot_lists(step, buffers)
