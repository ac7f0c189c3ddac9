"""Torch kernels over windows and compressed entries (`spec_metadata.plans.compressed`): pool, select, attend.

They are the definition that other kernels are compared with. Arithmetic is float32, or float64 for float64 inputs. What
a row does not see is replaced before it is multiplied: uninitialised memory may hold NaN.

A pool is its pages and `num_rows`, rows of a page: [num_pages, num_rows, dim] of rows as they are, or [num_pages,
page_bytes(num_rows)] uint8 of rows in the 8-bit page format (`attn_backends.kernels.fp8_pages`). A slot is
page * num_rows + offset.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_backends.kernels import fp8_pages
from attn_backends.kernels.torch_attention import attend, matmul

_SCORED = 64  # query rows of a request that are scored at a time
_ATTENDED = 256  # query rows whose keys are gathered at a time


class Keys(NamedTuple):
    """Rows of one pool that query rows attend to. slots: [num_tokens, n] int32, of which a query row sees the first
    lens [num_tokens] except those of -1.
    """

    pages: Tensor
    num_rows: int
    slots: Tensor
    lens: Tensor


def read_rows(pages: Tensor, num_rows: int, slots: Tensor) -> Tensor:
    """[*slots.shape, dim] rows of slots [...] of a pool, float32 of 8-bit pages; a slot of -1 reads anything."""
    slots = slots.long().clamp_min(0)
    if pages.dtype is torch.uint8:
        return fp8_pages.dequantise(pages[_byte_places(slots, num_rows)])
    return pages[slots // num_rows, slots % num_rows]


def write_rows(pages: Tensor, num_rows: int, slots: Tensor, rows: Tensor, reserved_page: int) -> None:
    """Write rows [n, dim] to slots [n] of a pool, nothing to a slot of -1, which only looks at the reserved page."""
    live, slots = _writes(slots, reserved_page * num_rows)
    if pages.dtype is torch.uint8:
        places, stored = _byte_places(slots, num_rows), fp8_pages.quantise(rows)
    else:
        places, stored = (slots // num_rows, slots % num_rows), rows.to(pages.dtype)
    pages[places] = torch.where(live, stored, pages[places])


def _writes(slots: Tensor, reserved: int) -> tuple[Tensor, Tensor]:
    live = slots >= 0
    return live.unsqueeze(-1), torch.where(live, slots.long(), reserved)


def _byte_places(slots: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return (slots // num_rows).unsqueeze(-1), fp8_pages.byte_offsets(slots % num_rows, num_rows)


def make_entries(
    values: Tensor,
    gates: Tensor,
    states: Tensor,
    input_rows: Tensor,
    state_reads: Tensor,
    first_positions: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    inv_freq: Tensor,
    overlap: bool,
) -> Tensor:
    """[num_entries, dim] entries that close in a forward, in the states' dtype.

    values, gates: [num_tokens, channels] of this forward's tokens. states: [num_pages, ring, 2 * channels]. input_rows,
    state_reads: [num_entries, read_window], where its tokens are, -1 for nowhere. first_positions: [num_entries].
    """
    rows = torch.cat((values, gates), dim=-1).to(states.dtype)
    read = read_rows(states, states.shape[1], state_reads)
    means = pool(*_gather_sources(rows, read, input_rows, state_reads), position_bias.to(rows.dtype), overlap)
    normed = rms_norm(means, norm_weight.to(rows.dtype), norm_eps)
    return rotate_tail(normed, first_positions, inv_freq)


def _gather_sources(rows: Tensor, states: Tensor, input_rows: Tensor, state_reads: Tensor) -> tuple[Tensor, Tensor]:
    """What entries are made of: values and gates [num_entries, read_window, dim].

    rows: [num_tokens, 2 * dim], this forward's values and gates. states: [num_entries, read_window, 2 * dim], read at
    `state_reads` where those are not -1. Tokens before the first have no weight: value 0 and gate -inf.
    """
    is_input = (input_rows >= 0).unsqueeze(-1)
    is_state = (state_reads >= 0).unsqueeze(-1)
    given = rows[input_rows.clamp_min(0)]
    values, gates = torch.where(is_input, given, states.to(rows.dtype)).chunk(2, dim=-1)
    known = is_input | is_state
    return torch.where(known, values, 0), torch.where(known, gates, float("-inf"))


def pool(values: Tensor, gates: Tensor, position_bias: Tensor, overlap: bool) -> Tensor:
    """Entries [num_entries, dim] as gated means, a softmax over tokens in each channel.

    values, gates: [num_entries, read_window, dim], or twice the channels where blocks overlap: then the block before
    takes part with its first half of channels and the entry's own with the second. position_bias: [ratio, channels],
    added to the gates by the token's place in its block.
    """
    if overlap:
        gates = gates + position_bias.repeat(2, 1)
        values, gates = _halves(values), _halves(gates)
    else:
        gates = gates + position_bias
    return (gates.softmax(dim=1) * values).sum(dim=1)


def _halves(x: Tensor) -> Tensor:
    """The first half of channels of the first half of tokens, then the second of the second."""
    (before, _), (_, own) = (half.chunk(2, dim=2) for half in x.chunk(2, dim=1))
    return torch.cat((before, own), dim=1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., dim], scaled to a root mean square of one, times weight [dim]."""
    return weight * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))


def rotate_tail(x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False) -> Tensor:
    """RoPE of the last 2 * len(inv_freq) channels in neighbouring pairs. x: [n, ..., dim]. positions: [n].

    inverse: by the negative angle, which takes a rotation back.
    """
    dtype = torch.promote_types(x.dtype, inv_freq.dtype)
    angles = positions.to(dtype).unsqueeze(-1) * inv_freq
    angles = angles.view(x.shape[0], *[1] * (x.ndim - 2), -1)
    cos, sin = angles.cos(), -angles.sin() if inverse else angles.sin()
    num_kept = x.shape[-1] - 2 * inv_freq.shape[0]
    head, tail = x[..., :num_kept], x[..., num_kept:]
    even, odd = tail.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), dim=-1)


def select_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    request: Tensor,
    num_visible: Tensor,
    max_query: int,
    topk: int,
) -> Tensor:
    """[num_tokens, topk] int32: slots of the visible entries of each row's request with the highest scores, then -1.

    q: [num_tokens, heads, dim]. weights: [num_tokens, heads]. keys: [num_pages, num_rows, dim], a pool. page_table:
    [bs, max_pages]. qo_indptr: [bs + 1]. request, num_visible: [num_tokens]. max_query: most rows of a request.
    """
    slots = (page_table.long().unsqueeze(2) * keys.shape[1] + torch.arange(keys.shape[1], device=q.device)).flatten(1)
    keys = read_rows(keys, keys.shape[1], slots)
    starts, row = qo_indptr.long(), torch.arange(q.shape[0], device=q.device)
    best = []
    for first in range(0, max_query, _SCORED):
        places = torch.arange(first, min(first + _SCORED, max_query), device=q.device)
        rows = (starts[:-1].unsqueeze(1) + places).clamp(max=q.shape[0] - 1)
        scores = index_scores(q[rows], weights[rows], keys, num_visible[rows])
        best.append(select_top(scores, num_visible[rows], topk))
    request = request.long()
    chosen = torch.cat(best, dim=1)[request, row - starts[request]]
    return torch.where(chosen >= 0, slots[request].gather(1, chosen.clamp_min(0)), -1).int()


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, num_visible: Tensor) -> Tensor:
    """[..., width, num_entries] scores, -inf where an entry is not visible.

    q: [..., width, heads, dim]. weights: [..., width, heads]. keys: [..., num_entries, dim]. num_visible: [..., width].
    """
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    dots = matmul(q.to(dtype).flatten(-3, -2), keys.to(dtype).transpose(-1, -2))
    dots = dots.unflatten(-2, q.shape[-3:-1]).relu()
    scores = (dots * weights.to(dtype).unsqueeze(-1)).sum(dim=-2)
    entry = torch.arange(keys.shape[-2], device=q.device)
    return scores.masked_fill(entry >= num_visible.unsqueeze(-1), float("-inf"))


def select_top(scores: Tensor, num_visible: Tensor, topk: int) -> Tensor:
    """[..., topk] int64: the visible entries of the highest scores, best first, then -1.

    scores: [..., num_entries], -inf where not visible; of equal ones the lower entry is taken. num_visible: [...].
    """
    missing = topk - scores.shape[-1]
    if missing > 0:
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    return torch.where(best < num_visible.unsqueeze(-1), best, -1)


def attend_rows(q: Tensor, sources: list[Keys], scale: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of each row over rows of several pools; else as `sparse_attention`."""
    parts = []
    for first in range(0, q.shape[0], _ATTENDED):
        rows = slice(first, first + _ATTENDED)
        keys = torch.cat([read_rows(source.pages, source.num_rows, source.slots[rows]) for source in sources], dim=1)
        visible = torch.cat([_visible(source.slots[rows], source.lens[rows]) for source in sources], dim=1)
        parts.append(sparse_attention(q[rows], keys, visible, scale, sinks))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _visible(slots: Tensor, lens: Tensor) -> Tensor:
    return (slots >= 0) & (torch.arange(slots.shape[1], device=slots.device) < lens.unsqueeze(1))


def sparse_attention(
    q: Tensor, keys: Tensor, visible: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of each row over keys of its own, which are values too.

    q: [num_tokens, num_heads, dim]. keys: [num_tokens, num_keys, dim]. visible: [num_tokens, num_keys] bool. sinks:
    [num_heads], logits of a key without value. Returns out [num_tokens, num_heads, dim] in q's dtype, sinks included,
    and natural lse [num_tokens, num_heads] without them.
    """
    shown = torch.where(visible.unsqueeze(-1), keys, 0).unsqueeze(2)
    out, lse = (x.squeeze(1) for x in attend(q.unsqueeze(1), shown, shown, visible.unsqueeze(1), scale))
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
    return out.to(q.dtype), lse
