"""One attention function for training and evaluation, registered with transformers.

Both families call it with per-head queries, keys and values. What a query sees is decided by the
``plan`` that the caller passes through the model: plain causal attention without one, a recording
prefill, drafted or verified nodes behind a prefix, or the unrolled draft steps of training.

Shapes: queries and keys ``[B, h, T, d]``, values ``[B, h, T, v]`` with ``v <= d``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "eagle_training"
_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


class Plan(Protocol):
    """Decides what the queries of one forward pass see."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Returns the attention output ``[B, h, T, v]`` of layer ``layer``."""


def pad_last(x: Tensor, width: int) -> Tensor:
    """Zero-pads the last dimension, so that flash kernels take values narrower than keys."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention over equally long queries and keys."""
    wide = pad_last(v, q.shape[-1]) if q.is_cuda else v
    out = F.scaled_dot_product_attention(q, k, wide, is_causal=True, scale=scale)
    return out[..., : v.shape[-1]]


class Recorder:
    """Causal prefill that keeps each layer's keys and values (``self.kv[layer]``)."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See ``Plan``."""
        self.kv[layer] = (k, v)
        return causal(q, k, v, scale)


class Nodes:
    """Tree nodes behind a recorded prefix.

    Args:
        kv: the prefix's keys and values by layer, ``[B, h, W, d]`` and ``[B, h, W, v]``.
        seen: ``[B, W]`` bool, the prefix rows that the nodes see.
        mask: ``[B, N, R + N]`` bool, the ``R`` earlier and ``N`` own nodes that a node sees.
        earlier: the earlier nodes' keys and values by layer; ``None`` where ``R`` is 0.

    After a pass, ``self.nodes`` holds all ``R + N`` nodes' keys and values.
    """

    def __init__(
        self,
        kv: dict[int, tuple[Tensor, Tensor]],
        seen: Tensor,
        mask: Tensor,
        earlier: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.kv, self.seen, self.mask = kv, seen, mask
        self.nodes = dict(earlier or {})

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See ``Plan``."""
        if layer in self.nodes:
            past_k, past_v = self.nodes[layer]
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        self.nodes[layer] = (k, v)
        prefix_k, prefix_v = self.kv[layer]
        prefix = (q @ prefix_k.mT * scale).masked_fill(~self.seen[:, None, None], -torch.inf)
        own = (q @ k.mT * scale).masked_fill(~self.mask[:, None], -torch.inf)
        weights = torch.cat((prefix, own), -1).float().softmax(-1).to(v.dtype)
        width = prefix_k.shape[2]
        return weights[..., :width] @ prefix_v + weights[..., width:] @ v


class Unrolled:
    """The draft's unrolled training steps over one window, with the visibility of serving.

    Step ``s`` runs the rows ``s..T-1`` (``T - s`` queries), each with ``s`` drafted ancestors: the
    query of row ``t`` sees step 0's keys of rows up to ``t - s`` (committed rows, computed from
    the target's hidden states) and, for each ``j`` in ``1..s``, step ``j``'s key of row
    ``t - s + j``. One object serves one window's steps, in order.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See ``Plan``; drafts have one layer, so ``layer`` is 0."""
        self.steps.append((k, v))
        if len(self.steps) == 1:
            return causal(q, k, v, scale)
        rows = q.shape[2]
        kept = [(step_k[:, :, :rows], step_v[:, :, :rows]) for step_k, step_v in self.steps]
        if not q.is_cuda:
            return unrolled_reference(q, kept, scale)
        width = v.shape[-1]
        flat = [pad_last(x, q.shape[-1]) for pair in kept for x in pair]
        return UnrolledFlash.apply(q, scale, *flat)[..., :width]


def unrolled_reference(q: Tensor, kept: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """One softmax over step 0's causal scores and one score for each later step.

    Args:
        q: ``[B, h, n, d]``.
        kept: keys and values of step 0 to ``s``, cut to ``n`` rows.
        scale: factor of the scores.
    """
    n = q.shape[2]
    k0, v0 = kept[0]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ k0.mT * scale).masked_fill(hidden, -torch.inf)]
    scores += [(q * k).sum(-1, keepdim=True) * scale for k, _ in kept[1:]]
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :n] @ v0
    for j, (_, v) in enumerate(kept[1:]):
        out = out + weights[..., n + j, None] * v
    return out


class UnrolledFlash(torch.autograd.Function):
    """``unrolled_reference`` on the flash kernels, without a score matrix.

    Forward: causal flash attention over step 0, merged with the other steps' single scores
    through the log-sum-exp. Backward: the flash backward kernel takes the merged output and
    log-sum-exp, which makes its probabilities those of the whole softmax.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, scale: float, *flat: Tensor) -> Tensor:
        """``flat`` is ``k0, v0, k1, v1, ...``, all ``[B, h, n, d]``."""
        k0, v0 = flat[:2]
        out0, lse0, *rest = _flash(q, k0, v0, 0.0, True, False, scale=scale)
        single = [(q.float() * k.float()).sum(-1) * scale for k in flat[2::2]]
        lse = torch.logsumexp(torch.stack([lse0, *single]), 0)
        out = out0.float() * (lse0 - lse).exp()[..., None]
        for score, v in zip(single, flat[3::2], strict=True):
            out += (score - lse).exp()[..., None] * v
        out = out.to(q.dtype)
        ctx.scale, ctx.kernel = scale, (rest[0], rest[1], rest[2], rest[3])
        ctx.save_for_backward(q, out, lse, rest[4], rest[5], *single, *flat)
        ctx.extra = len(single)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of ``q`` and of each key and value."""
        q, out, lse, seed, offset, *saved = ctx.saved_tensors
        single, flat = saved[: ctx.extra], saved[ctx.extra :]
        grad = grad.contiguous()
        kernel = (*ctx.kernel, 0.0, True, seed, offset)
        dq, dk0, dv0 = _flash_backward(grad, q, flat[0], flat[1], out, lse, *kernel, scale=ctx.scale)
        wide = grad.float()
        delta = (wide * out.float()).sum(-1)
        dq = dq.float()
        grads = [dk0, dv0]
        for score, k, v in zip(single, flat[2::2], flat[3::2], strict=True):
            weight = (score - lse).exp()
            dscore = (weight * ((wide * v.float()).sum(-1) - delta) * ctx.scale)[..., None]
            dq += dscore * k.float()
            grads += [(dscore * q.float()).to(k.dtype), (weight[..., None] * wide).to(v.dtype)]
        return (dq.to(q.dtype), None, *grads)


def check_kernel(device: torch.device) -> float:
    """Largest relative error of ``UnrolledFlash`` (output and gradients) against the reference."""
    shape, scale = (2, 4, 300, 80), 80**-0.5
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=device).bfloat16() for _ in range(7)]
    grad = torch.randn(shape, device=device).bfloat16()

    def run(dtype: torch.dtype, flash: bool) -> list[Tensor]:
        q, *flat = (x.to(dtype).requires_grad_() for x in leaves)
        if flash:
            out = UnrolledFlash.apply(q, scale, *flat)
        else:
            kept = list(zip(flat[::2], flat[1::2], strict=True))
            out = unrolled_reference(q, kept, scale)
        return [out, *torch.autograd.grad(out, [q, *flat], grad.to(dtype))]

    fast, exact = run(torch.bfloat16, True), run(torch.float64, False)
    pairs = zip(fast, exact, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    plan: Plan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered function: expands grouped heads, aligns dtypes and follows ``plan``."""
    groups = module.num_key_value_groups
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query, key = query.to(value.dtype), key.to(value.dtype)
    if plan is None:
        out = causal(query, key, value, scaling)
    else:
        out = plan.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
