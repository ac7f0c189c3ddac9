"""Vendors' schedules, planned on the device by us: operators of `torch.library`, namespace `attn_backends`.

    share_out    FlashMLA's share-out of blocks of keys to the parts of the GPU

The CPU implementation in torch is the definition; on a GPU one Triton launch writes the same integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.kernels.devices import on_its_device

BLOCK_KEYS = 64
OVERHEAD = 5
"""What a part pays to begin a request, in blocks: FlashMLA's own estimate for its kernels of SM90."""

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "share_out(Tensor lens, Tensor? more_lens, Tensor(a!) parts, Tensor(b!) splits, Tensor(c!) marks, "
    "Tensor(d!)? read_lens, int most) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def share_out(
    lens: Tensor,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    *,
    more_lens: Tensor | None = None,
    read_lens: Tensor | None = None,
    most: int = 2**30,
) -> None:
    """Share blocks of 64 keys of n requests out to parts of the GPU, as FlashMLA does.

    lens: [n] int32, keys of each request. parts: [num_parts, 8] int32, written: first and last request of a part (both
    inclusive), first block of the first and end block of the last, number of the first piece in its request, whether
    the first and the last request are split, 0 (FlashMLA's `DecodingSchedMeta`). splits: [n + 1] int32, written: first
    piece of each request among all, and the end. marks: [n, 2] int32, scratch. more_lens: [n] int32, keys of a second
    list, which begin at a whole block; at most `most` of them are read, and `read_lens` [n] int32 is written with how
    many.

    A request costs its blocks, at least one, and an overhead for each part that it has a piece in. Parts are filled
    with requests in order, up to an even share and one overhead more; a request that does not fit goes on in the next
    part, and one that would begin in no more than an overhead begins there.
    """
    torch.ops.attn_backends.share_out(lens, more_lens, parts, splits, marks, read_lens, most)


def _share_out_torch(
    lens: Tensor,
    more_lens: Tensor | None,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    read_lens: Tensor | None,
    most: int,
) -> None:
    num_parts, n = parts.shape[0], lens.shape[0]
    blocks = (lens.long() + BLOCK_KEYS - 1) // BLOCK_KEYS
    if more_lens is not None:
        more = more_lens.long().clamp(max=most)
        blocks = blocks + (more + BLOCK_KEYS - 1) // BLOCK_KEYS
        if read_lens is not None:
            read_lens.copy_(more)
    end, blocks = blocks, blocks.clamp_min(1)
    size = (blocks.sum() + n * OVERHEAD + num_parts - 1) // num_parts  # blocks of a part that has one request alone
    part, room = torch.zeros_like(size), size + OVERHEAD
    for request, mark in zip(blocks, marks, strict=True):
        fits = room >= request + OVERHEAD
        taken = torch.where(fits, request, (room - OVERHEAD).clamp_min(0))
        further = (request - taken + size - 1) // size
        mark.copy_(torch.stack((part, taken)))
        last = request - taken - (further - 1) * size
        room = torch.where(fits, room - request - OVERHEAD, size - last)
        part = part + further

    (begun, taken), numbers = marks.long().T, torch.arange(n, device=lens.device)
    pieces = (blocks - taken + size - 1) // size + (taken > 0)
    splits[:1].zero_()
    splits[1:].copy_(pieces.cumsum(0))
    piece = torch.arange(num_parts, device=lens.device).expand(n, -1)
    is_begun = torch.where(taken > 0, taken, size).unsqueeze(1)  # blocks of the first piece
    begin = torch.where(piece > 0, is_begun + (piece - 1) * size, 0)
    stop = torch.minimum(is_begun + piece * size, end.unsqueeze(1))
    is_alone = torch.cat((taken, taken.new_zeros(1))) == 0  # whether a request begins a part; one behind the last does
    is_first = (piece > 0) | (is_alone[:-1] | (numbers == 0)).unsqueeze(1)
    is_last = (piece < pieces.unsqueeze(1) - 1) | is_alone[1:].unsqueeze(1)
    row = (begun + (taken == 0)).unsqueeze(1) + piece
    live, request = piece < pieces.unsqueeze(1), numbers.unsqueeze(1).expand_as(piece)
    is_split = (pieces > 1).unsqueeze(1).expand_as(piece)
    table = torch.zeros(num_parts + 1, 8, dtype=torch.long, device=lens.device)  # its last row is of no part
    table[:, 0], table[:, 1] = n, n - 1
    for values, mask in (((request, begin, piece, is_split), is_first), ((request, stop, is_split), is_last)):
        at = torch.where(live & mask, row, num_parts).flatten()
        for column, value in zip((0, 2, 4, 5) if len(values) == 4 else (1, 3, 6), values, strict=True):
            table[:, column].index_copy_(0, at, value.long().flatten())
    parts.copy_(table[:-1])


@on_its_device
def _share_out_cuda(
    lens: Tensor,
    more_lens: Tensor | None,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    read_lens: Tensor | None,
    most: int,
) -> None:
    from attn_backends.kernels import triton_share_out

    triton_share_out.share_out(lens, more_lens, parts, splits, marks, read_lens, most)


_library.impl("share_out", _share_out_torch, "CPU")
_library.impl("share_out", _share_out_cuda, "CUDA")
torch.library.register_fake("attn_backends::share_out", lambda *_: None, lib=_library)
